"""The names of what runs a graph, and which artefacts each one takes."""

import difflib

from posenc_export.runtime.manifest import Manifest

ORT = ("cpu", "cuda")  # of ONNX Runtime
OPENVINO = ("openvino", "openvino-bf16")
NAMES = ("auto", *ORT, *OPENVINO)
HELP = "of ONNX Runtime auto, cpu or cuda; openvino, or openvino-bf16 in bfloat16 (default: auto)"


def check_name(name: str, manifest: Manifest) -> None:
    """Refuse a provider that is none, or that is not for the target of an artefact.

    Raises:
        ValueError: such a name.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        remedy = f"did you mean {near[0]}?" if near else "choose among these"
        raise ValueError(f"runtime: expected provider to be one of {', '.join(NAMES)}, got {name!r}; {remedy}")
    if manifest.target in ("torchscript", "pt2") and name not in ("auto", "cpu"):
        raise ValueError(f"runtime: expected provider cpu for target {manifest.target}, got {name}; export target onnx or ort")
    if manifest.target not in ("onnx", "ort") and name in OPENVINO:
        raise ValueError(f"runtime: expected provider cpu or cuda for target {manifest.target}, got {name}; export target onnx or ort")
