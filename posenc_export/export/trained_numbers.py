"""Trained numbers of encodings in an artefact, for pictures. Its graph may hold others that are
computed from them.
"""

from pathlib import Path
from typing import Any, Dict, Iterator, Tuple, Union

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from posenc_export.encodings import PositionEncoding, check_installed
from posenc_export.models.config_json import from_json
from posenc_export.models.placed import Described
from posenc_export.models.presets import MODELS, load_preset
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.shared.foreign import explained
from posenc_export.shared.preset_folders import is_preset

FILE_NAME = "encodings.safetensors"
AGAIN = "export it again with this version"


def store(model: Any, folder: Path) -> None:
    """Write the trained numbers of encodings, if there are any."""
    trained = {
        f"{name}.{key}": value.detach().cpu().clone().contiguous()
        for name, encoding in _encodings(model)
        for key, value in encoding.state_dict().items()
    }
    if trained:
        files.write(folder / FILE_NAME, save(trained))


def _encodings(model: Any) -> Iterator[Tuple[str, PositionEncoding]]:
    """Yield the encodings of a model by name, each once, without parts of combined ones."""
    last = ""
    for name, module in model.named_modules():
        if isinstance(module, PositionEncoding) and not (last and name.startswith(f"{last}.")):
            last = name
            yield name, module


def with_trained_encodings(folder: Union[str, Path]) -> Described:
    """Return the block or stack of an artefact with the trained numbers of its encodings, and
    without its other weights, which are on the device "meta". ValueError: not an artefact; an
    encoding that is not installed; trained numbers that the artefact does not have, because an
    earlier version wrote it.
    """
    folder = files.locate(folder)
    manifest = manifests.read(folder)
    if is_preset(folder):
        return load_preset(folder.name)
    check_installed(manifest.packages)
    config = from_json(manifest.config.get("inside", manifest.config))
    with torch.device("meta"):
        model: Described = MODELS[type(config)](config)
    numbers: Dict[str, Tensor] = {}
    if FILE_NAME in manifest.files:
        with explained(f"artefact {folder}: expected {FILE_NAME}", AGAIN, SafetensorError):
            numbers = load((folder / FILE_NAME).read_bytes())
    for name, encoding in _encodings(model):
        state = {key: (f"{name}.{key}", like) for key, like in encoding.state_dict().items()}
        for part, like in state.values():
            stored = numbers.get(part)
            if stored is None or stored.shape != like.shape:
                rule = f"the trained numbers {part} of an encoding with shape {list(like.shape)}"
                got = "none" if stored is None else list(stored.shape)
                raise ValueError(f"artefact {folder}: expected {rule}, got {got}; {AGAIN}")
        encoding.load_state_dict({key: numbers[part] for key, (part, _) in state.items()})
    return model
