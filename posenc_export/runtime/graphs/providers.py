"""Names of providers, and threads of an operator."""

import os
from typing import Any

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared import suggestion
from posenc_export.shared.refusal import refusal

# The runtimes start every thread that they are asked for, and abort the process if the system
# refuses one.
MOST_THREADS = 1024
NAMES = ("auto", "cpu", "cuda")
HELP = "auto, cpu or cuda for ONNX Runtime; cpu for torch (default: auto)"
AUTO = "auto"
# Operators of target ort that have no float32 kernel for CUDA, or one with other rules.
HOST_ONLY = {"GroupQueryAttention", "MoE", "QMoE"}
Threads = None | int | str  # None, a number, or AUTO
PRODUCTS = (
    "Conv", "DynamicQuantizeMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "MatMulNBits", "MoE", "QMoE",
)  # fmt: skip
# With 2 threads instead of 1, a step of a decoder with 14,000 numbers per product takes 1.03 of the
# time, of a block with 130,000 numbers 0.97, with 520,000 numbers 0.60; 512 tokens of the first two
# take 0.73 and 0.63 (2 cores of an AMD EPYC; ONNX Runtime 1.31).
# So prompts gain from a second thread in any case, and steps gain from threads that get about this
# many numbers. More cores were not measured.
SHARE = 1 << 16
LEAST = 2  # threads of the smallest model


def check_threads(threads: Any) -> None:
    """Raise ValueError unless threads is None, AUTO or a whole number 1 .. MOST_THREADS."""
    whole = hasattr(threads, "__index__") and not isinstance(threads, bool)
    if threads not in (None, AUTO) and not (whole and 1 <= threads <= MOST_THREADS):
        rule = f"threads to be a whole number 1 .. {MOST_THREADS}"
        raise refusal("runtime", rule, repr(threads), "leave it out for the default")


def check_name(name: str, manifest: Manifest) -> None:
    """Raise ValueError if a provider does not exist or, by the manifest, lacks what it needs."""
    target = manifest.target
    suggestion.check_name("runtime: expected provider", name, NAMES)
    if (manifest.in_torch or target == "ort-native") and name not in ("auto", "cpu"):
        remedy = "export target ort or onnx-static"
        raise refusal("runtime", f"provider cpu for target {target}", name, remedy)


def host_only(manifest: Manifest) -> str:
    """Return what of an artefact for ONNX Runtime runs on the CPU only; empty for nothing. Other
    targets than ort-cuda have weights of few bits in forms that CUDA's kernels refuse, or read
    otherwise (export/targets/weights.py).
    """
    if manifest.weights is not None and manifest.target != "ort-cuda":
        return f"weights in {manifest.weights.format}"
    ours = manifest.target == "ort-native" or not HOST_ONLY.isdisjoint(manifest.operators)
    return f"target {manifest.target} in float32" if ours and manifest.dtype == "float32" else ""


def threads_for(threads: Threads, manifest: Manifest) -> int | None:
    """Return the number of threads, or None for all cores: for AUTO, a thread for every SHARE
    numbers of a product, at least LEAST and at most all cores.
    """
    if threads != AUTO:
        return threads  # type: ignore[return-value]
    products = sum(count for name, count in manifest.operators.items() if name in PRODUCTS)
    if not products or not manifest.step_weights:  # a graph of torch, or an early manifest
        return None
    count = max(LEAST, manifest.step_weights // products // SHARE)
    return None if count >= cores() else count


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_text(manifest: Manifest) -> str:
    """Return what AUTO chooses on this machine, for `posenc inspect`."""
    count = threads_for(AUTO, manifest)
    chosen = cores() if count is None else count
    return f"{chosen} of {cores()} cores, by the size of its matrices (threads=auto)"
