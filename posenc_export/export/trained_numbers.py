"""Trained numbers of encodings in an artefact, for pictures.

A graph keeps many of them unchanged in its weights; the manifest records where. Others, such as
logarithms whose exponentials became constants, and tensors below 1 kB, which stand inside
model.onnx, are written to encodings.bin.
"""

from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple, Union

import numpy as np
import onnx
import torch
from torch import Tensor

from posenc_export.encodings import PositionEncoding, check_installed
from posenc_export.export.describe import Model
from posenc_export.models.config_json import from_json
from posenc_export.models.placed import Described
from posenc_export.models.presets import MODELS, load_preset
from posenc_export.runtime.artefact import archive, files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Numbers
from posenc_export.runtime.artefact.rules import WEIGHTS, graph_file
from posenc_export.shared.preset_folders import is_preset

FILE_NAME = "encodings.bin"
Regions = Dict[int, List[Tuple[str, int]]]  # file and offset of tensors, by number of bytes


def store(model: Model, manifest: Manifest, folder: Path) -> Dict[str, Numbers]:
    """Return the places of trained numbers of encodings by name; write those not in the graph."""
    trained = {
        f"{name}.{key}": value
        for name, encoding in _encodings(model)
        for key, value in encoding.state_dict().items()
    }
    regions = _regions(folder, manifest) if trained else {}
    places = {name: _in_graph(tensor, regions, folder) for name, tensor in trained.items()}
    others = {name: tensor for name, tensor in trained.items() if places[name] is None}
    if others:
        with files.writing(folder / FILE_NAME) as stream:
            for name, tensor in others.items():
                places[name] = _numbers(tensor, FILE_NAME, stream.bytes)
                stream.write(_content(tensor).data)
    return {name: numbers for name, numbers in places.items() if numbers is not None}


def _numbers(tensor: Tensor, file: str, offset: int, transposed: bool = False) -> Numbers:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Numbers(file, offset, dtype, tuple(tensor.shape), transposed)


def _in_graph(tensor: Tensor, regions: Regions, folder: Path) -> Optional[Numbers]:
    """Return where the files of a graph hold a tensor or its transpose; None if they do not."""
    if tensor.nbytes not in regions:
        return None
    for transposed in (False, True) if tensor.dim() == 2 else (False,):
        place = _held(_content(tensor.T if transposed else tensor), regions, folder)
        if place is not None:
            return _numbers(tensor, *place, transposed)
    return None


def _content(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor in row-major order."""
    content: np.ndarray = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return content


def _encodings(model: Model) -> Iterator[Tuple[str, PositionEncoding]]:
    """Yield the encodings of a model by name, each once, without parts of combined ones."""
    last = ""
    for name, module in model.named_modules():
        if isinstance(module, PositionEncoding) and not (last and name.startswith(f"{last}.")):
            last = name
            yield name, module


def _regions(folder: Path, manifest: Manifest) -> Regions:
    regions: Regions = {}
    name = graph_file(manifest)
    if name == "model.onnx":
        for tensor in onnx.load(str(folder / name), load_external_data=False).graph.initializer:
            place = {entry.key: entry.value for entry in tensor.external_data}
            if place:
                regions.setdefault(int(place["length"]), []).append((WEIGHTS, int(place["offset"])))
        return regions
    with (folder / name).open("rb") as stream:
        for entry in archive.read_most(stream, lambda _: True).values():
            if isinstance(entry, archive.Stored):
                regions.setdefault(entry.size, []).append((name, entry.offset))
    return regions


def _held(content: np.ndarray, regions: Regions, folder: Path) -> Optional[Tuple[str, int]]:
    """Return file and offset of a tensor with this content; None if there is none."""
    for name, offset in regions[len(content)]:
        stored = np.memmap(folder / name, np.uint8, "r", offset, content.shape)
        if np.array_equal(stored, content):
            return name, offset
    return None


def with_trained_encodings(folder: Union[str, Path]) -> Described:
    """Return the block or stack of an artefact with the trained numbers of its encodings, and
    without its other weights, which are on the device "meta". ValueError: not an artefact; an
    encoding that is not installed; trained numbers that the artefact does not have, because an
    earlier version wrote it.
    """
    folder = files.locate(folder)
    manifest = manifests.read(folder)
    if not manifest.encodings and is_preset(folder):
        return load_preset(folder.name)
    check_installed(manifest.packages)
    config = from_json(manifest.config.get("inside", manifest.config))
    with torch.device("meta"):
        model: Described = MODELS[type(config)](config)
    for name, encoding in _encodings(model):
        state = encoding.state_dict().items()
        stored = {key: _read(folder, manifest, f"{name}.{key}", value) for key, value in state}
        encoding.load_state_dict(stored)
    return model


def _read(folder: Path, manifest: Manifest, name: str, like: Tensor) -> Tensor:
    """Return the numbers of a name, of the shape of `like`."""
    numbers = manifest.encodings.get(name)
    if numbers is None or numbers.shape != tuple(like.shape):
        what = f"the trained numbers {name} of an encoding with shape {list(like.shape)}"
        rule = f"artefact {folder}: expected {what}"
        remedy = "export it again with this version"
        got = "none" if numbers is None else list(numbers.shape)
        raise ValueError(f"{rule}, got {got}; {remedy}")
    with (folder / numbers.file).open("rb") as stream:
        stream.seek(numbers.offset)
        content = bytearray(stream.read(numbers.bytes))
    dtype = getattr(torch, numbers.dtype)
    shape = numbers.shape[::-1] if numbers.transposed else numbers.shape
    stored = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    tensor = stored.reshape(shape)
    return tensor.T if numbers.transposed else tensor
