"""The contestants of bench/gpu.py: a session of each, and the times of its calls."""

import functools
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np

from bench.timing import median_seconds, seconds
from posenc_export.runtime import load

CONTEXTS = (128, 1024, 4096)
STEPS = 64  # timed steps per round
WARM = 16  # untimed steps before them
PROMPTS = 5  # timed prompts per round
CONTESTANTS = (
    "ort-cuda", "ort-cuda uncaptured", "onnx float16", "onnx-static float16", "onnxruntime-genai",
    "transformers eager", "transformers static cache", "transformers static cache, compiled",
)  # fmt: skip
CAPACITY = 8192  # tokens of the caches that are allocated at once
# A prefill of some number of tokens, and a step after it.
Calls = Tuple[Callable[[int], Any], Callable[[], Any]]
Opened = Callable[[], Calls]  # returns the calls of an empty session


def one_round(contestant: str, folder: Path, rehearse: bool) -> Dict[str, Any]:
    """Measure one contestant in this process; return {"device", and seconds as "load", "prefill":
    {context: median}, "step": {context: median}}. Wrong outputs fail.

    Args:
        rehearse: time wrong outputs too, run torch on the CPU, and take only a few steps of the
            shortest context.
    """
    import torch

    device = "cpu" if rehearse else "cuda"
    begin = time.perf_counter()
    if contestant.startswith("transformers"):
        opened = _transformers(contestant, folder, torch, device)
    elif contestant == "onnxruntime-genai":
        opened = _genai(folder)
    else:
        opened = _ours(contestant, folder, check=not rehearse)
    report = {
        "device": device if rehearse else torch.cuda.get_device_name(),
        "load": time.perf_counter() - begin,
        "prefill": {},
        "step": {},
    }
    for context in CONTEXTS[:1] if rehearse else CONTEXTS:
        prefills = []
        for _ in range(2 if rehearse else 1 + PROMPTS):
            prefill, step = opened()
            prefills.append(seconds(functools.partial(prefill, context)))
        # The first run selects kernels.
        report["prefill"][context] = statistics.median(prefills[1:])
        times, warm = (3, 1) if rehearse else (STEPS, WARM)
        report["step"][context] = median_seconds(step, times, warm)
    return report


def _ours(contestant: str, folder: Path, check: bool) -> Opened:
    session = load(
        folder / contestant.split()[0],
        provider="cuda",
        check=check,
        capture="uncaptured" not in contestant,
    ).session(capacity=CAPACITY)
    token = np.zeros(1, np.int64)

    def opened() -> Calls:
        session.reset()
        return lambda context: session.prefill(
            np.zeros((1, context), np.int64), chunk=context, logits_to_keep=1
        ), lambda: session.step(token, copy=False)

    return opened


def _genai(folder: Path) -> Opened:
    """Open what onnxruntime-genai's own builder makes of the checkpoint, with CUDA graphs."""
    import onnxruntime_genai

    from posenc_export.benchmark.peers import genai, genai_int4

    if not (folder / "genai" / "genai_config.json").exists():
        genai_int4.build(
            folder / "float32", folder / "genai", "fp16", "cuda", "enable_cuda_graph=true"
        )
    session = genai.GenaiSession(onnxruntime_genai.Model(str(folder / "genai")), CAPACITY)
    token = np.zeros((1, 1), np.int64)

    def opened() -> Calls:
        session.reset()
        return lambda context: session.call(np.zeros((1, context), np.int64)), lambda: session.call(
            token
        )

    return opened


def _transformers(contestant: str, folder: Path, torch: Any, device: str) -> Opened:
    from transformers import LlamaForCausalLM, StaticCache

    # cuDNN plans attention anew for each number of keys: a step with a growing cache took 50 to 77
    # ms. Compiled steps of a fixed size are fastest with it.
    torch.backends.cuda.enable_cudnn_sdp("compiled" in contestant)
    model = LlamaForCausalLM.from_pretrained(
        folder / "llama", dtype=torch.float16, attn_implementation="sdpa"
    )
    model, compiled = model.to(device).eval(), model.forward
    if "compiled" in contestant:
        compiled = torch.compile(compiled, mode="reduce-overhead", fullgraph=True)
    ids = {
        count: torch.zeros((1, count), dtype=torch.int64, device=device) for count in (1, *CONTEXTS)
    }
    state: Dict[str, Any] = {}

    def run(forward: Any, count: int) -> None:
        places = torch.arange(state["length"], state["length"] + count, device=device)
        how = {"use_cache": True, "position_ids": places[None], "logits_to_keep": 1}
        with torch.inference_mode():
            out = forward(ids[count], past_key_values=state["cache"], **how)
            state.update(cache=out.past_key_values, length=state["length"] + count)
            out.logits.cpu()

    def opened() -> Calls:
        static = "static" in contestant
        cache = StaticCache(config=model.config, max_cache_len=CAPACITY) if static else None
        state.update(cache=cache, length=0)
        return lambda count: run(model.forward, count), lambda: run(compiled, 1)

    return opened
