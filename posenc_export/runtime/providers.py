"""What runs a graph, by name: which artefacts each provider takes, the library behind it, and the rounding it adds."""

import difflib
from typing import Optional

from posenc_export.numerics import bfloat16_tolerance
from posenc_export.runtime.manifest import Manifest

OPENVINO = ("openvino", "openvino-bf16")
NAMES = ("auto", "cpu", "cuda", *OPENVINO)
HELP = "auto, cpu or cuda of ONNX Runtime; openvino in float32, openvino-bf16 in bfloat16 (default: auto, never OpenVINO)"
TORCH = ("torchscript", "pt2", "eager")  # targets
# Operators that OpenVINO 2026.4 does not read, or reads wrongly: its GRU gives other numbers where rows end at different steps.
NOT_IN_OPENVINO = ("TensorScatter", "GRU")
# Products that a value passes in an operator.
PRODUCTS = {
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "Conv"), 1),
    **dict.fromkeys(("Attention", "GroupQueryAttention", "MultiHeadAttention"), 2),
}


def check_name(name: str, manifest: Manifest) -> None:
    """Refuse a provider that does not exist, or that does not run an artefact.

    Raises:
        ValueError: an unknown name, or one whose library has not what the target or an operator needs.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        remedy = f"did you mean {near[0]}?" if near else "choose among these"
        raise ValueError(f"runtime: expected provider to be one of {', '.join(NAMES)}, got {name!r}; {remedy}")
    if manifest.target in TORCH and name not in ("auto", "cpu"):
        raise ValueError(f"runtime: expected provider cpu for target {manifest.target}, got {name}; export target onnx or ort")
    found = not_for_openvino(manifest) if name in OPENVINO else None
    if found is not None:
        rule = f"target onnx or ort without {' and '.join(NOT_IN_OPENVINO)}"
        raise ValueError(f"runtime: expected {rule} for provider {name}, got {found}; give provider cpu")


def not_for_openvino(manifest: Manifest) -> Optional[str]:
    """The target, or the first operator, that OpenVINO does not run; None where the manifest tells of none."""
    if manifest.target not in ("onnx", "ort"):
        return f"target {manifest.target}"
    return next((f"operator {name}" for name in NOT_IN_OPENVINO if name in manifest.operators), None)


def library(name: str, manifest: Manifest) -> str:
    """The distribution that runs the graph."""
    if name in OPENVINO:
        return "openvino"
    return "torch" if manifest.target in TORCH else "onnxruntime"


def rounding(name: str, manifest: Manifest) -> float:
    """What a provider adds to the tolerance of an artefact: 0, except in bfloat16."""
    if name != "openvino-bf16":
        return 0.0
    return bfloat16_tolerance(sum(count * manifest.operators.get(operator, 0) for operator, count in PRODUCTS.items()))
