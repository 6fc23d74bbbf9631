"""Another runtime in its own process, for bench.bits: reads one request per line of JSON from
stdin, and answers with a line of JSON.

    python bits_peers.py genai FOLDER THREADS
    python bits_peers.py llama.cpp FILE THREADS
    python bits_peers.py checkpoint FILE FOLDER

The last command writes a checkpoint of transformers, which the model builder of onnxruntime-genai
reads.

Requests: {"logits": ids} answers {"shape": [S,V]} and S*V float32 in little-endian order, null if
the runtime gives no logits; {"ids": ids, "steps": n} answers {"prefill": seconds, "step": seconds
per token}, where steps follow the prompt.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np


class Genai:
    """onnxruntime-genai with a folder of its model builder."""

    def __init__(self, place: str, threads: int) -> None:
        import onnxruntime_genai

        self.genai = onnxruntime_genai
        config = onnxruntime_genai.Config(place)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = onnxruntime_genai.Model(config)

    def _read(self, ids: List[int]) -> Any:
        parameters = self.genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=2048)
        generator = self.genai.Generator(self.model, parameters)
        generator.append_tokens(np.array([ids], np.int32))
        return generator

    def logits(self, ids: List[int]) -> Optional[np.ndarray]:
        """Return logits [S,V] of all tokens."""
        return np.asarray(self._read(ids).get_output("logits")[0], np.float32)

    def times(self, ids: List[int], steps: int) -> Dict[str, float]:
        """Return seconds of the prompt, and the median of steps."""
        stamps = [time.perf_counter()]
        generator = self._read(ids)
        generator.get_logits()
        stamps.append(time.perf_counter())
        for token in ids[:steps]:
            generator.append_tokens(np.array([[token]], np.int32))
            generator.get_logits()
            stamps.append(time.perf_counter())
        prefill, *step = np.diff(stamps).tolist()
        return {"prefill": prefill, "step": statistics.median(step)}


class LlamaCpp:
    """The server of llama.cpp in xllamacpp, without HTTP. It times itself, without logits."""

    def __init__(self, place: str, threads: int) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel = place, 2048, 1
        parameters.warmup = True
        parameters.n_batch = parameters.n_ubatch = 1024
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(parameters)

    def logits(self, ids: List[int]) -> Optional[np.ndarray]:
        """Return None."""
        return None

    def times(self, ids: List[int], steps: int) -> Dict[str, float]:
        """Return seconds of the prompt, and the mean of steps."""
        request = {
            "prompt": ids,
            "n_predict": steps,
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        answer = self.server.handle_completions(request)
        times = (json.loads(answer) if isinstance(answer, (str, bytes)) else answer)["timings"]
        return {
            "prefill": times["prompt_ms"] / 1000,
            "step": times["predicted_per_token_ms"] / 1000,
        }


def write_checkpoint(file: Path, folder: str) -> None:
    """Dequantize a GGUF file to a checkpoint of transformers in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype="float32"
    )
    # Its weights are float32, but transformers does not save a model that was read from such a
    # file.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


def main() -> None:
    """Answer requests until stdin ends."""
    name, place, last = sys.argv[1:]
    if name == "checkpoint":
        write_checkpoint(Path(place), last)
        return
    kinds: Dict[str, Any] = {"genai": Genai, "llama.cpp": LlamaCpp}
    peer = kinds[name](place, int(last))
    for line in sys.stdin:
        request = json.loads(line)
        if "ids" in request:
            answer(peer.times(request["ids"], request["steps"]))
            continue
        logits = peer.logits(request["logits"])
        if logits is None:
            answer(None)
        else:
            answer({"shape": logits.shape}, logits.astype("<f4").tobytes())


def answer(content: Any, numbers: bytes = b"") -> None:
    """Write a line of JSON, and numbers behind it."""
    sys.stdout.buffer.write(b"\nanswer " + json.dumps(content).encode() + b"\n" + numbers)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
