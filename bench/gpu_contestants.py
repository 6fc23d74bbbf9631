"""The contestants of bench/gpu.py: a session of each, and the times of its calls."""

import functools
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np

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
Calls = Tuple[
    Callable[[int], Any], Callable[[], Any]
]  # a prefill of some number of tokens, and a step after it
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
    else:
        opened = (
            _genai(folder)
            if contestant == "onnxruntime-genai"
            else _ours(contestant, folder, check=not rehearse)
        )
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
            prefills.append(_seconds(functools.partial(prefill, context)))
        report["prefill"][context] = statistics.median(
            prefills[1:]
        )  # the first run selects kernels
        steps = [_seconds(step) for _ in range(4 if rehearse else WARM + STEPS)]
        report["step"][context] = statistics.median(steps[1 if rehearse else WARM :])
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
    model = (
        LlamaForCausalLM.from_pretrained(
            folder / "llama", dtype=torch.float16, attn_implementation="sdpa"
        )
        .to(device)
        .eval()
    )
    compiled = (
        torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        if "compiled" in contestant
        else model.forward
    )
    token, at = torch.zeros((1, 1), dtype=torch.int64, device=device), [0]

    def opened() -> Calls:
        held = {
            "cache": StaticCache(config=model.config, max_cache_len=CAPACITY)
            if "static" in contestant
            else None
        }

        def run(forward: Any, ids: Any) -> None:
            with torch.inference_mode():
                places = torch.arange(at[0], at[0] + ids.shape[1], device=device)
                out = forward(
                    ids,
                    past_key_values=held["cache"],
                    use_cache=True,
                    position_ids=places[None],
                    logits_to_keep=1,
                )
                held["cache"] = out.past_key_values
                at[0] += ids.shape[1]
                out.logits.cpu()

        def prefill(context: int) -> None:
            at[0] = 0
            run(model.forward, torch.zeros((1, context), dtype=torch.int64, device=device))

        return prefill, lambda: run(compiled, token)

    return opened


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
