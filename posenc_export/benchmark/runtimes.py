"""Other runtimes to compare artefacts with: they rebuild the model, or load the folder."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, Dict, Tuple

from posenc_export.benchmark import shapes
from posenc_export.runtime.artefact.manifest import Manifest

ARTEFACT = "artefact"  # the runtime of this package
PEERS, EXPORT = "posenc_export.benchmark.peers", "posenc-export[export]"


@dataclass(frozen=True)
class Runtime:
    """One other runtime.

    Args:
        peer: name of the module whose `open_session(folder, manifest, threads, batch)` returns the
            session to time.
        needs: modules that must be installed.
        install: requirement for pip that installs them.
        supports: returns whether the runtime supports an artefact, given folder and manifest.
        rule: description of the supported artefacts, for error messages.
        builds: True if the runtime rebuilds the model from its description, once per model; False
            if it loads each supported folder.
        quantizes: whether a runtime that rebuilds the model quantizes its weights.
    """

    peer: str
    needs: Tuple[str, ...]
    install: str
    supports: Callable[[Path, Manifest], bool]
    rule: str
    builds: bool = True
    quantizes: bool = False

    def missing(self) -> Tuple[str, ...]:
        """Return the required modules that are not installed."""
        return tuple(module for module in self.needs if find_spec(module) is None)


def _any_described(folder: Path, manifest: Manifest) -> bool:
    return manifest.kind != "module"


def _llama(folder: Path, manifest: Manifest) -> bool:
    return manifest.dtype == "float32" and shapes.is_llama(manifest.config, ("rope",))


def _plain_block(folder: Path, manifest: Manifest) -> bool:
    return manifest.dtype == "float32" and shapes.is_plain_block(manifest.config)


def _hand_written(folder: Path, manifest: Manifest) -> bool:
    llama = manifest.dtype == "float32" and shapes.is_llama(manifest.config)
    return llama or _plain_block(folder, manifest)


def _genai(folder: Path, manifest: Manifest) -> bool:
    return (folder / "genai_config.json").is_file()


def _openvino(folder: Path, manifest: Manifest) -> bool:
    described = (manifest.target, manifest.signature, manifest.kind)
    append_only = [state.grows and len(state.axes) == 4 for state in manifest.states]
    return described == ("onnx", "mask", "decoder") and all(append_only)


TORCH, WITH_MASK = ("torch", "safetensors"), "a decoder exported with --signature mask"
DESCRIBED = "a model that is built from a description, not your own module"
LLAMA = (
    "a float32 decoder of Llama's shape: rope, RMS norms before attention and a gated SiLU MLP, "
    "no biases"
)
RUNTIMES: Dict[str, Runtime] = {
    "eager": Runtime(f"{PEERS}.torch_module", TORCH, EXPORT, _any_described, DESCRIBED),
    "transformers": Runtime(
        f"{PEERS}.llama", (*TORCH, "transformers"), f"{EXPORT} transformers", _llama, LLAMA
    ),
    "hand-written": Runtime(
        f"{PEERS}.hand_written",
        (*TORCH, "onnx", "onnxruntime"),
        "posenc-export[export,cpu]",
        _hand_written,
        f"a float32 block, or {LLAMA}; rope or nope alone",
    ),
    "hand-written-torchscript": Runtime(
        f"{PEERS}.hand_torchscript",
        TORCH,
        EXPORT,
        _plain_block,
        "a float32 block; rope or nope alone",
    ),
    "genai": Runtime(
        f"{PEERS}.genai",
        ("onnxruntime_genai",),
        "onnxruntime-genai",
        _genai,
        f"{WITH_MASK} for an ONNX target",
        builds=False,
    ),
    "genai-int4": Runtime(
        f"{PEERS}.genai_int4",
        (*TORCH, "transformers", "onnxruntime", "onnxruntime_genai"),
        "posenc-export[export,cpu] transformers onnxruntime-genai",
        _llama,
        LLAMA,
        quantizes=True,
    ),
    "openvino": Runtime(
        f"{PEERS}.open_vino",
        ("openvino",),
        "openvino",
        _openvino,
        f"{WITH_MASK} for target onnx",
        builds=False,
    ),
}
