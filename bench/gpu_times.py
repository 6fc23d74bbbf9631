"""Parts "prompts" and "steps" of bench.gpu: times of one decoder in several runtimes."""

import functools
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

from bench.timing import median_seconds, seconds
from posenc_export.export import Sources, export
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import load
from posenc_export.runtime.graphs import cuda

CONTEXTS = (128, 1024, 4096)
ROWS = (1, 4, 16, 64)
CAPACITY = 8192  # tokens of the caches, for several rows CAPACITY / 16
PROMPTS, STEPS, WARM = 10, 64, 16  # timed prompts, timed steps, and calls before them
OURS, GENAI, COMPILED = "ort-cuda", "onnxruntime-genai", "transformers, torch.compile"
CAPTURE = {OURS: True, f"{OURS}, capture=False": False}  # contestants of ours
FORMATS = {"float16": None, "int4": "int4"}
# Arguments of `prompts` and of `steps` in a round.
PROMPTING = [(name, n) for name in (*CAPTURE, GENAI) for n in CONTEXTS]
STEPPING = [
    (name, weights, rows)
    for rows in ROWS
    for name in (OURS, GENAI, COMPILED)
    for weights in (FORMATS if name in (OURS, GENAI) else ("float16",))
]
# The measured decoder: Llama's architecture.
LLAMA: dict[str, Any] = {
    "vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
# A prompt [B,S], and a step after it.
Calls = tuple[Callable[[np.ndarray], Any], Callable[[], Any]]
Opened = Callable[[], Calls]  # returns the calls of an empty session


def prepare(folder: Path, layers: int, **changed: Any) -> None:
    """Write a Llama checkpoint and its artefacts, unless they are there."""
    if (folder / "prepared").exists():
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changed}, num_hidden_layers=layers)).eval()
    llama.save_pretrained(folder / "float32")
    sources = Sources(from_pretrained(folder / "float32"))
    for name, weights in FORMATS.items():
        export(sources, "ort-cuda", folder / name, weights=weights, verify=False)
    llama.half().save_pretrained(folder / "llama")
    (folder / "prepared").touch()


def prompts(name: str, context: int, folder: Path, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Yield seconds of prompts of one row: before a step was captured, after steps, and of lengths
    that were not read before.
    """
    opened, times = _opened(name, "float16", 1, folder, rehearse), 2 if rehearse else PROMPTS
    ids = np.zeros((1, context), np.int64)

    def of_prompt(less: int = 0) -> float:
        return seconds(functools.partial(opened()[0], ids[:, less:]))

    def repeated() -> float:
        return statistics.median([of_prompt() for _ in range(2 + times)][2:])

    row = {"contestant": name, "context": context, "prompt": repeated()}
    row["new length"] = statistics.median([of_prompt(less) for less in (1, 2, 3)])
    prompt, step = opened()
    prompt(ids)
    median_seconds(step, 4, WARM)
    yield {**row, "after steps": repeated()}


def steps(
    name: str, weights: str, rows: int, folder: Path, rehearse: bool
) -> Iterator[dict[str, Any]]:
    """Yield seconds of steps after prompts, and the memory of the device in MB."""
    before, opened = _memory(), _opened(name, weights, rows, folder, rehearse)
    row = {"contestant": name, "weights": weights, "rows": rows}
    for context in CONTEXTS[:1] if rehearse or rows > 1 else CONTEXTS:
        prompt, step = opened()
        prompt(np.zeros((rows, context), np.int64))
        taken = median_seconds(step, *((3, 1) if rehearse else (STEPS, WARM)))
        yield {**row, "context": context, "step": taken, "memory": _memory() - before}


def device(query: str) -> str:
    """Return what nvidia-smi says of the first device; empty without one."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return said.partition("\n")[0]


def _memory() -> int:
    """Return how many MB of the device are in use; 0 without a device."""
    return int(device("memory.used") or 0)


def _opened(name: str, weights: str, rows: int, folder: Path, rehearse: bool) -> Opened:
    capacity = CAPACITY if rows == 1 else CAPACITY // 16
    if name == COMPILED:
        return _compiled(folder, rows, capacity, "cpu" if rehearse else "cuda")
    if name == GENAI:
        return _genai(folder, weights, rows, capacity)
    return _ours(folder / weights, rows, capacity, rehearse, CAPTURE[name])


def _ours(folder: Path, rows: int, capacity: int, rehearse: bool, capture: bool) -> Opened:
    """Open an artefact. Wrong outputs fail, except in a rehearsal."""
    provider = "cuda" if not rehearse or cuda.obstacle() is None else "cpu"
    model = load(folder, provider, check=not rehearse, capture=capture)
    session, token = model.session(batch=rows, capacity=capacity), np.zeros(rows, np.int64)
    prompt = functools.partial(session.prefill, logits_to_keep=1)

    def opened() -> Calls:
        session.reset()
        return prompt, lambda: session.step(token, copy=False)

    return opened


def _genai(folder: Path, weights: str, rows: int, capacity: int) -> Opened:
    """Open what onnxruntime-genai's own builder makes of the checkpoint, with CUDA graphs. With
    several rows, a step also chooses tokens: a Generator appends to several rows only once.
    """
    import onnxruntime_genai
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from bench.audit_exporters import genai

    built = folder / f"genai-{weights}"
    if not (built / "genai_config.json").exists():
        precision = {"float16": "fp16"}.get(weights, weights)
        words = Tokenizer(models.WordLevel({"first": 0, "second": 1}, unk_token="first"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="second")
        tokenizer.save_pretrained(folder / "float32")
        options = ("prune_lm_head=true", "enable_cuda_graph=true")
        genai(folder / "float32", built, precision, "cuda", *options)
    model, kept = onnxruntime_genai.Model(str(built)), {}

    def opened() -> Calls:
        kept.clear()  # two Generators at once crash

        def read(ids: np.ndarray) -> None:
            kept["generator"].append_tokens(ids.astype(np.int32))
            kept["generator"].get_logits()

        def prompt(ids: np.ndarray) -> None:
            parameters = onnxruntime_genai.GeneratorParams(model)
            parameters.set_search_options(max_length=capacity, batch_size=rows)
            kept["generator"] = onnxruntime_genai.Generator(model, parameters)
            read(ids)

        def step() -> None:
            if rows > 1:
                kept["generator"].generate_next_token()
            else:
                read(np.zeros((1, 1)))

        return prompt, step

    return opened


def _compiled(folder: Path, rows: int, capacity: int, device: str) -> Opened:
    """Open transformers with a static cache, whose steps torch compiles and captures."""
    import torch
    from transformers import LlamaForCausalLM, StaticCache

    kind = {"dtype": torch.float16, "attn_implementation": "sdpa"}
    model = LlamaForCausalLM.from_pretrained(folder / "llama", **kind).to(device).eval()
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    state: dict[str, Any] = {}

    def run(forward: Any, ids: np.ndarray) -> None:
        count = ids.shape[1]
        places = torch.arange(state["length"], state["length"] + count, device=device)
        how = {"use_cache": True, "position_ids": places[None], "logits_to_keep": 1}
        with torch.inference_mode():
            tokens = torch.from_numpy(ids).to(device)
            forward(tokens, past_key_values=state["cache"], **how).logits.cpu()
        state["length"] += count

    def opened() -> Calls:
        state.update(cache=StaticCache(config=model.config, max_cache_len=capacity), length=0)
        token = np.zeros((rows, 1), np.int64)
        return lambda ids: run(model.forward, ids), lambda: run(compiled, token)

    return opened


def rows(part: str, key: str, folder: Path, rehearse: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a piece, whose key is a JSON list."""
    arguments = json.loads(key)[1:]  # without the round
    yield from (prompts if part == "prompts" else steps)(*arguments, folder, rehearse)
