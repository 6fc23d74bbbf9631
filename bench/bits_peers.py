"""Another runtime in its own process, for bench.bits and bench.rows: reads one request per line of
JSON from stdin, and answers with a line of JSON.

    python bits_peers.py genai FOLDER THREADS python bits_peers.py llama.cpp FILE THREADS [ROWS]
    python bits_peers.py transformers FOLDER THREADS python bits_peers.py checkpoint FILE FOLDER
    (writes a checkpoint of transformers, which the model builder of onnxruntime-genai reads)

Requests: {"logits": ids} answers {"shape": [S,V]} and S*V float32 in little-endian order, null if
the runtime gives no logits; {"ids": ids, "steps": n} answers {"prefill": seconds, "step": seconds
per token}, where steps follow the prompt; {"ids": ids, "rows": n, "steps": k, "clock": name of a
function of time} answers the seconds of a step of n rows that have read ids, from k steps.
"""

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import numpy as np


class Genai:
    """onnxruntime-genai with a folder of its model builder."""

    def __init__(self, place: str, threads: int) -> None:
        import onnxruntime_genai

        self.genai = onnxruntime_genai
        config = onnxruntime_genai.Config(place)
        config.overlay(
            json.dumps(
                {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
            )
        )
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
        start = time.perf_counter()
        generator = self._read(ids)
        generator.get_logits()
        prefill, each = time.perf_counter() - start, []
        for token in ids[:steps]:
            start = time.perf_counter()
            generator.append_tokens(np.array([[token]], np.int32))
            generator.get_logits()
            each.append(time.perf_counter() - start)
        return {"prefill": prefill, "step": statistics.median(each)}


class LlamaCpp:
    """The server of llama.cpp inside the package xllamacpp, called without HTTP. It reports its
    own times, and gives no logits. Each row is a slot of 1,024 tokens.
    """

    def __init__(self, place: str, threads: int, rows: int = 1) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = (
            place,
            max(2048, 1024 * rows),
            rows,
            True,
        )
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
        found = (json.loads(answer) if isinstance(answer, (str, bytes)) else answer)["timings"]
        return {
            "prefill": found["prompt_ms"] / 1000,
            "step": found["predicted_per_token_ms"] / 1000,
        }

    def step_of_rows(
        self, ids: List[int], rows: int, steps: int, clock: Callable[[], float]
    ) -> float:
        """Return seconds of a step of requests at once, of which each reads the last of ids
        again and then decodes.
        """
        asked = {"prompt": ids, "cache_prompt": True, "ignore_eos": True, "temperature": 0.0}
        with ThreadPoolExecutor(rows) as threads:
            for predicted in (
                1,
                steps,
            ):  # the first requests fill the slots, where they are not filled yet
                start = clock()
                list(
                    threads.map(
                        lambda slot, count=predicted: self.server.handle_completions(
                            {**asked, "id_slot": slot, "n_predict": count}
                        ),
                        range(rows),
                    )
                )
        return (clock() - start) / steps


class Transformers:
    """transformers in float32 with static caches, without torch.compile."""

    def __init__(self, place: str, threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.torch, self.static_cache = torch, transformers.StaticCache
        self.model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype="float32")
        self.caches: Dict[int, Any] = {}

    def step_of_rows(
        self, ids: List[int], rows: int, steps: int, clock: Callable[[], float]
    ) -> float:
        """Return seconds of a step of a batch. The cache of one row is read once and copied."""
        torch = self.torch
        if 0 not in self.caches:
            self.caches[0] = self._cache(len(ids) + steps)
            self.model(torch.tensor([ids]), past_key_values=self.caches[0], logits_to_keep=1)
        if rows not in self.caches:
            self.caches[rows] = cache = self._cache(len(ids) + steps)
            for layer, filled in zip(cache.layers, self.caches[0].layers, strict=True):
                layer.lazy_initialization(
                    *(part.expand(rows, -1, -1, -1) for part in (filled.keys, filled.values))
                )
                layer.keys.copy_(filled.keys)
                layer.values.copy_(filled.values)
        for layer in self.caches[rows].layers:
            layer.cumulative_length.fill_(len(ids))
        start = clock()
        for token in ids[:steps]:
            self.model(torch.full((rows, 1), token), past_key_values=self.caches[rows])
        return (clock() - start) / steps

    def _cache(self, slots: int) -> Any:
        return self.static_cache(config=self.model.config, max_cache_len=slots)


def write_checkpoint(file: Path, folder: str) -> None:
    """Dequantize a GGUF file to a checkpoint of transformers in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype="float32"
    )
    # Its weights are float32, but transformers does not save a model that was read from such a
    # file.
    del read.config.quantization_config
    made = AutoModelForCausalLM.from_config(read.config)
    made.load_state_dict(read.state_dict())
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(folder)


def main() -> None:
    """Answer requests until stdin ends."""
    name, place, threads, *rows = sys.argv[1:]
    if name == "checkpoint":
        write_checkpoint(Path(place), threads)
        return
    kinds: Dict[str, Any] = {"genai": Genai, "llama.cpp": LlamaCpp, "transformers": Transformers}
    peer = kinds[name](place, int(threads), *map(int, rows))
    for line in sys.stdin:
        asked = json.loads(line)
        if "logits" in asked:
            found = peer.logits(asked["logits"])
            answer(
                None if found is None else {"shape": found.shape},
                b"" if found is None else found.astype("<f4").tobytes(),
            )
        elif "rows" in asked:
            answer(
                peer.step_of_rows(
                    asked["ids"], asked["rows"], asked["steps"], getattr(time, asked["clock"])
                )
            )
        else:
            answer(peer.times(asked["ids"], asked["steps"]))


def answer(content: Any, numbers: bytes = b"") -> None:
    """Write a line of JSON, and numbers behind it."""
    sys.stdout.buffer.write(b"\nanswer " + json.dumps(content).encode() + b"\n" + numbers)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
