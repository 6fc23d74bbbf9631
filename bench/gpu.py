"""The CUDA provider: verify every encoding on a GPU, and compare decode and prefill times of a float16 decoder with transformers.

    python -m bench.gpu proofs --json FILE [--names NAME ...]
    python -m bench.gpu latency --json FILE

Latency is measured with one process per contestant, in turn, ROUNDS times. Results are the median of the rounds' medians, with minimum and maximum. All
contestants run the same decoder with one row: 12 layers of width 768 (124 million parameters) in float16. A step includes copying the token to the device
and the logits to the host.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import numpy as np

from posenc_export.encodings import REGISTRY
from posenc_export.export import Sources, export
from posenc_export.models.presets import seeded
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load, verify
from posenc_export.shared import json_rows

TARGETS = ("ort-cuda", "onnx", "onnx-static")
CONTEXTS = (128, 1024, 4096)
STEPS = 64  # timed steps per round
WARM = 16  # untimed steps before them
ROUNDS = 5
# The measured decoder: Llama's architecture with 124 million parameters.
LLAMA: Dict[str, Any] = {
    "vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
CONTESTANTS = ("ort-cuda", "onnx float16", "onnx-static float16", "transformers eager", "transformers static cache", "transformers static cache, compiled")


def proofs(names: Sequence[str]) -> List[Dict[str, Any]]:
    """Verify every encoding on every target on CUDA; return one row for each."""
    import onnxruntime
    import torch  # noqa: F401  loads the CUDA libraries that the provider needs

    onnxruntime.preload_dlls()
    rows = []
    for name in names:
        causal = "causal" in REGISTRY[name].works_in
        block = block_config(48, 6, 1100, kv_heads=3, head_size=16, encoding={"name": name}, causal=causal)
        sources = Sources(seeded(decoder_config(61, 2, 40, block, tied=name != "complex_order")))
        for target in TARGETS:
            with tempfile.TemporaryDirectory() as temporary:
                row: Dict[str, Any] = {"encoding": name, "target": target}
                try:
                    export(sources, target, Path(temporary) / "a", verify=False)
                    found = verify(Path(temporary) / "a", provider="cuda")
                    worst = max(found["cells"], key=lambda cell: found["cells"][cell])
                    row |= {"worst": found["cells"][worst], "at": worst, "cells": len(found["cells"])}
                    row |= {key: found[key] for key in ("passed", "tolerance", "machine")}
                except (ValueError, RuntimeError) as error:
                    row |= {"refused": str(error)[:300]}
            print(json.dumps(row), file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def one_round(contestant: str, folder: Path) -> Dict[str, Any]:
    """Measure one contestant in this process; return seconds as {"load", "prefill": {context: ...}, "step": {context: median}}."""
    import torch

    if contestant.startswith("transformers"):
        return _transformers(contestant, folder, torch)
    import onnxruntime

    onnxruntime.preload_dlls()
    begin = time.perf_counter()
    session = load(folder / contestant.split()[0], provider="cuda").session(capacity=8192)
    report: Dict[str, Any] = {"load": time.perf_counter() - begin, "prefill": {}, "step": {}}
    token = np.zeros(1, np.int64)
    for context in CONTEXTS:
        prompt = np.zeros((1, context), np.int64)
        for _ in range(2):  # the first run selects kernels and is overwritten
            session.reset()
            begin = time.perf_counter()
            session.prefill(prompt, chunk=context)
            report["prefill"][context] = time.perf_counter() - begin
        report["step"][context] = _median(lambda: session.step(token, copy=False))
    return report


def _transformers(contestant: str, folder: Path, torch: Any) -> Dict[str, Any]:
    from transformers import LlamaForCausalLM, StaticCache

    begin = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.float16, attn_implementation="sdpa").cuda().eval()
    report: Dict[str, Any] = {"load": time.perf_counter() - begin, "prefill": {}, "step": {}}
    static = "static" in contestant
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if "compiled" in contestant else model.forward
    token = torch.zeros((1, 1), dtype=torch.int64, device="cuda")
    with torch.inference_mode():
        for context in CONTEXTS:
            prompt = torch.zeros((1, context), dtype=torch.int64, device="cuda")
            for _ in range(2):
                cache = StaticCache(config=model.config, max_cache_len=8192) if static else None
                begin = time.perf_counter()
                places = torch.arange(context, device="cuda")
                out = model.forward(prompt, past_key_values=cache, use_cache=True, cache_position=places)
                out.logits[:, -1].cpu()
                report["prefill"][context] = time.perf_counter() - begin
            cache, at = out.past_key_values, [context]

            def step(cache: Any = cache, at: List[int] = at) -> None:
                forward(token, past_key_values=cache, use_cache=True, cache_position=torch.tensor([at[0]], device="cuda")).logits.cpu()
                at[0] += 1

            report["step"][context] = _median(step)
    return report


def _median(step: Callable[[], Any]) -> float:
    times = []
    for _ in range(WARM + STEPS):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM:])


def prepare(folder: Path) -> Dict[str, float]:
    """Write the artefacts, and a Llama checkpoint with the same weights.

    Returns:
        {"difference": largest difference between logits of the float16 onnx artefact and of the float32 Llama model, relative to the largest logit}.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    llama.save_pretrained(folder / "float32")
    sources = Sources(from_pretrained(folder / "float32"))
    for target in TARGETS:
        export(sources, target, folder / target, dtype="float16", verify=False)
    tokens = torch.arange(24)[None] * 37 % LLAMA["vocab_size"]
    with torch.inference_mode():
        theirs = llama(tokens).logits.numpy()
    llama.half().save_pretrained(folder / "llama")
    ours = load(folder / "onnx", provider="cpu").session().prefill(tokens.numpy()).astype(np.float32)
    return {"difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max())}


def latency() -> Dict[str, Any]:
    """Measure all rounds of every contestant, and return a summary for each."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        report: Dict[str, Any] = {"same_weights": prepare(folder), "contestants": {}}
        rounds: Dict[str, List[Dict[str, Any]]] = {name: [] for name in CONTESTANTS}
        for index in range(ROUNDS):
            for name in CONTESTANTS:
                ran = subprocess.run([sys.executable, "-W", "ignore", "-m", "bench.gpu", "round", name, str(folder)], capture_output=True, text=True, check=False)
                if ran.returncode:
                    rounds[name].append({"error": ran.stderr[-800:]})
                    continue
                rounds[name].append(json.loads(ran.stdout.splitlines()[-1]))
                print(f"round {index}: {name}: {ran.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
        for name, found in rounds.items():
            right = [one for one in found if "error" not in one]
            report["contestants"][name] = _summary(right) if right else {"error": found[0]["error"]}
        return report


def _summary(rounds: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    def of(values: Sequence[float]) -> Dict[str, float]:
        return {"median_us": round(1e6 * statistics.median(values), 1), "least_us": round(1e6 * min(values), 1), "most_us": round(1e6 * max(values), 1)}

    made: Dict[str, Any] = {"load": of([one["load"] for one in rounds])}
    for what in ("prefill", "step"):
        made[what] = {context: of([one[what][context] for one in rounds]) for context in rounds[0][what]}
    return made


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    proving = commands.add_parser("proofs")
    proving.add_argument("--names", nargs="*", default=list(REGISTRY))
    timing = commands.add_parser("latency")
    for command in (proving, timing):
        command.add_argument("--json", type=Path, required=True)
    single = commands.add_parser("round")
    single.add_argument("contestant", choices=CONTESTANTS)
    single.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "round":
        print(json.dumps(one_round(options.contestant, options.folder)))
        return 0
    found = proofs(options.names) if options.command == "proofs" else latency()
    json_rows.write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
