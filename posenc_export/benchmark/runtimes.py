"""Other runtimes to compare artefacts with: they rebuild the model, or load the folder."""

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Mapping

from posenc_export.runtime.artefact.manifest import Manifest

ARTEFACT = "artefact"  # the runtime of this package
EXPORT = "posenc-export[export]"
TORCH, WITH_MASK = ("torch", "safetensors"), "a decoder exported with --signature mask"
DESCRIBED = "a model that is built from a description, not a module of your own"
LLAMA_CPP = {"llama.cpp": "F32", "llama.cpp-q8_0": "Q8_0", "llama.cpp-q4_0": "Q4_0"}
LLAMA = (
    "a float32 decoder of Llama's shape: rope, RMS norms before attention and a gated SiLU MLP, "
    "no biases"
)


def is_llama(config: dict[str, Any]) -> bool:
    """Whether config describes a decoder of Llama's shape (Touvron et al. 2023, LLaMA, 2.2)."""
    from posenc_export.models.config_json import to_json
    from posenc_export.models.short_forms import block_config, decoder_config

    try:
        attention, mlp = (config["layers"]["layer"][part] for part in ("attention", "mlp"))
        heads = (attention["kv_heads"], attention["head_size"])
        block = block_config(config["width"], attention["heads"], config["max_positions"], *heads)
        sizes = (config["tokens"]["vocabulary"], len(config["order"]), mlp["hidden"])
        epsilon, tied = config["norm"]["epsilon"], config["head"]["tied"]
        plain = decoder_config(*sizes, block, epsilon=epsilon, tied=tied)
    except (KeyError, TypeError, ValueError):  # a block, a module, or a part of another kind
        return False
    return to_json(plain) == config


@dataclass(frozen=True)
class Runtime:
    """One other runtime."""

    peer: str  # file of peers/, whose `open_session(folder, manifest, threads, batch)` opens it
    needs: tuple[str, ...]  # modules that must be installed
    install: str  # requirement for pip that installs them
    # Returns whether the runtime supports an artefact, given folder and manifest
    supports: Callable[[Path, Manifest], bool]
    rule: str  # description of the supported artefacts, for error messages
    # True if the runtime rebuilds the model from its description, once per model; False if it loads
    # each supported folder
    builds: bool = True
    quantizes: bool = False  # whether a runtime that rebuilds the model quantizes its weights
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments of open_session

    def missing(self) -> tuple[str, ...]:
        """Return the required modules that are not installed."""
        return tuple(module for module in self.needs if find_spec(module) is None)


def _llama(folder: Path, manifest: Manifest) -> bool:
    return manifest.dtype == "float32" and is_llama(manifest.config)


def _openvino(folder: Path, manifest: Manifest) -> bool:
    described = (manifest.target, manifest.signature, manifest.kind)
    append_only = [state.grows and len(state.axes) == 4 for state in manifest.states]
    return described == ("onnx", "mask", "decoder") and all(append_only)


RUNTIMES: dict[str, Runtime] = {
    "eager": Runtime(
        "eager", TORCH, EXPORT, lambda folder, manifest: manifest.kind != "module", DESCRIBED
    ),
    "transformers": Runtime(
        "llama", (*TORCH, "transformers"), f"{EXPORT} transformers", _llama, LLAMA
    ),
    "genai": Runtime(
        "genai",
        ("onnxruntime_genai",),
        "onnxruntime-genai",
        lambda folder, manifest: (folder / "genai_config.json").is_file(),
        f"{WITH_MASK} for an ONNX target",
        builds=False,
    ),
    **{
        name: Runtime(
            "llama_cpp",
            (*TORCH, "transformers", "gguf", "llama_cpp"),
            "posenc-export[export,gguf] transformers llama-cpp-python",
            _llama,
            LLAMA,
            quantizes=weights != "F32",
            options={"weights": weights},
        )
        for name, weights in LLAMA_CPP.items()
    },
    "openvino": Runtime(
        "open_vino",
        ("openvino",),
        "openvino",
        _openvino,
        f"{WITH_MASK} for target onnx",
        builds=False,
    ),
}
