"""Reader of checkpoint folders as transformers saves them. Tensors are memory-mapped and read one at a time; only tensors are unpickled."""

import json
import math
import pickle
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, List, Optional, Protocol, Tuple, Type, Union

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# Names of weight files, in the order in which transformers looks for them.
WHOLE, SHARDED = ("model.safetensors", "pytorch_model.bin"), ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# TensorFlow's name endings, in early checkpoints of BERT, RoFormer and others, to current ones.
OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Files that accompany tokenizer.json: chat template, special tokens, generation settings.
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "generation_config.json")
# Exceptions of torch.load for a damaged file: its own, and those of its pickle reader.
DAMAGED = (RuntimeError, pickle.UnpicklingError, EOFError, AssertionError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError)
Shape = Tuple[int, ...]


class TensorFile(Protocol):
    """A file of named tensors."""

    path: Path

    def names(self) -> List[str]: ...

    def shape(self, name: str) -> Shape: ...

    def tensor(self, name: str) -> Tensor: ...


class SafetensorsFile:
    """A .safetensors file.

    Raises:
        ValueError: the file is missing or cannot be read.
    """

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path = path
        try:
            self._file: Any = opened.enter_context(safe_open(_found(path), framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"checkpoint: expected {path.name} to be a complete safetensors file, got an error ({error}); download it again") from None

    def names(self) -> List[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> Shape:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as float32.

        Raises:
            ValueError: the stored dtype is not float32, float16 or bfloat16.
        """
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(_dtype_line(name, dtype))
        return self._file.get_tensor(name).float()


class TorchFile:
    """A dictionary of tensors as torch.save writes it. Nothing but tensors is unpickled.

    Raises:
        ValueError: the file is missing, cannot be read or holds other objects.
    """

    def __init__(self, path: Path, _: ExitStack) -> None:
        self.path = _found(path)
        try:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except DAMAGED as error:
            why = str(error).partition("\n")[0][:200]
            rule = f"checkpoint: expected {path.name} to hold only tensors, in the zip format of torch 1.6 and later"
            raise ValueError(f"{rule}, got an error ({why}); save it as safetensors") from None
        if not isinstance(held, dict) or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in held.items()):
            raise ValueError(f"checkpoint: expected {path.name} to be a dictionary of tensors by name, got other objects; save it as safetensors")
        for name, value in held.items():
            if not _is_plain(value):
                rule = f"checkpoint: expected {path.name} to hold dense tensors with all their numbers"
                raise ValueError(f"{rule}, got {name[:80]} with layout {value.layout} on {value.device}; save the model as safetensors")
        self._held: Dict[str, Tensor] = held

    def names(self) -> List[str]:
        return list(self._held)

    def shape(self, name: str) -> Shape:
        return tuple(self._held[name].shape)

    def tensor(self, name: str) -> Tensor:
        """As SafetensorsFile.tensor."""
        if self._held[name].dtype not in DTYPES.values():
            raise ValueError(_dtype_line(name, str(self._held[name].dtype).removeprefix("torch.")))
        return self._held[name].detach().float()


OPENERS: Dict[str, Type[Union[SafetensorsFile, TorchFile]]] = {".safetensors": SafetensorsFile, ".bin": TorchFile}


class Checkpoint:
    """The tensors of a checkpoint folder, by name. Use as a context manager, which closes the files.

    Args:
        folder: holds model.safetensors or pytorch_model.bin, or an index.json with the files that it names.

    Raises:
        ValueError: no weights, a file that is missing or cannot be read, an index that does not match its files.
    """

    def __init__(self, folder: Path) -> None:
        self._sources: Dict[str, Tuple[TensorFile, str]] = {}  # tensor name to file and name in that file
        with ExitStack() as opened:
            for path, listed in _files(folder).items():
                self._add(OPENERS[path.suffix](path, opened), listed)
            self._opened = opened.pop_all()

    def _add(self, file: TensorFile, listed: List[str]) -> None:
        names = file.names()
        added = {_current(name): (file, name) for name in names}
        missing, repeated = sorted(set(listed) - set(names)), sorted(set(added) & set(self._sources))
        if missing:
            raise ValueError(f"checkpoint: expected {file.path.name} to hold the tensors that the index lists, got no {_some(missing)}; download it again")
        if repeated:
            first = self._sources[repeated[0]][0].path.name
            raise ValueError(f"checkpoint: expected each tensor in one file, got {_some(repeated)} in {first} and {file.path.name}; remove one")
        self._sources.update(added)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self._sources.clear()
        self._opened.close()

    def names(self) -> List[str]:
        """Return the names of all tensors."""
        return list(self._sources)

    def sizes(self) -> List[int]:
        """Return the number of entries of each tensor."""
        return [math.prod(file.shape(written)) for file, written in self._sources.values()]

    def forget(self, names: List[str]) -> None:
        """Ignore these tensors from now on."""
        for name in names:
            del self._sources[name]

    def check(self, shapes: Dict[str, Shape]) -> None:
        """Check that the checkpoint holds exactly these tensors with these shapes.

        Raises:
            ValueError: a tensor is missing, unknown or has another shape.
        """
        missing, extra = sorted(set(shapes) - set(self._sources)), sorted(set(self._sources) - set(shapes))
        remedy = "use the config.json that belongs to the weights"
        if missing:
            raise ValueError(f"checkpoint: expected the {len(shapes)} tensors of the model that config.json describes, got no {_some(missing)}; {remedy}")
        if extra:
            raise ValueError(f"checkpoint: expected only tensors of the model that config.json describes, got also {_some(extra)}; {remedy}")
        for name, shape in shapes.items():
            file, written = self._sources[name]
            if file.shape(written) != shape:
                raise ValueError(f"checkpoint: expected {name} with shape {list(shape)} by config.json, got {list(file.shape(written))}; {remedy}")

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as float32.

        Raises:
            ValueError: the stored dtype is not float32, float16 or bfloat16.
        """
        file, written = self._sources[name]
        return file.tensor(written)


def read_config(folder: Path) -> Dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        ValueError: the folder or config.json does not exist, or config.json is not a JSON object.
    """
    if not folder.is_dir():
        raise ValueError(f"checkpoint: expected a local folder with config.json and weights, got {str(folder)!r}; download the model first")
    return _json(folder / "config.json")


def read_tokenizer(folder: Path) -> bytes:
    """Return the bytes of tokenizer.json, empty if there is none."""
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""


def read_tokenizer_files(folder: Path) -> Dict[str, bytes]:
    """Return the bytes of the existing TOKENIZER_FILES, by name."""
    return {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}


def read_ids(folder: Path, key: str, vocabulary: int) -> Tuple[int, ...]:
    """Return the token ids under a key of generation_config.json, or else of config.json. Ids beyond the vocabulary are dropped.

    Args:
        key: eos_token_id, the ids that end a text, or decoder_start_token_id, the first id of a decoder that reads an encoder.

    Raises:
        ValueError: the value is not null, an integer of 0 or more, or a list of such integers.
    """
    given = None
    for name in ("generation_config.json", "config.json"):
        if given is None and (folder / name).is_file():
            given = _json(folder / name).get(key)
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(one) is int and one >= 0 for one in ids):
        rule = f"expected {key} to be null, an integer of 0 or more, or a list of these"
        raise ValueError(f"checkpoint: {rule}, got {given!r}; correct generation_config.json")
    return tuple(one for one in ids if one < vocabulary)


def read_tensors(path: Path) -> Dict[str, Tensor]:
    """Return all tensors of one .safetensors file as float32.

    Raises:
        ValueError: the file cannot be read, or a stored dtype is not float32, float16 or bfloat16.
    """
    with ExitStack() as opened:
        file = SafetensorsFile(path, opened)
        return {name: file.tensor(name) for name in file.names()}


def _files(folder: Path) -> Dict[Path, List[str]]:
    """Return the weight files, each with the tensor names that an index lists for it."""
    for whole, index in zip(WHOLE, SHARDED, strict=True):
        if (folder / whole).is_file():
            return {folder / whole: []}
        if (folder / index).is_file():
            return _sharded(folder, index)
    raise ValueError(f"checkpoint: expected one of {', '.join((*WHOLE, *SHARDED))}, got none in {str(folder)!r}; give another folder")


def _sharded(folder: Path, index: str) -> Dict[Path, List[str]]:
    places = _json(folder / index).get("weight_map")
    suffix = Path(index.removesuffix(".index.json")).suffix
    if not isinstance(places, dict) or not places:
        raise ValueError(f"checkpoint: expected weight_map of {index} to map tensor names to files, got {type(places).__name__}; download it again")
    files: Dict[Path, List[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != suffix:
            raise ValueError(f"checkpoint: expected {index} to name {suffix} files in its own folder, got {file!r}; download it again")
        files.setdefault(folder / file, []).append(name)
    return files


def _json(path: Path) -> Dict[str, Any]:
    try:
        values = json.loads(_found(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        if str(error).startswith("checkpoint: "):
            raise
        raise ValueError(f"checkpoint: expected {path.name} to be JSON, got an error ({error}); download it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"checkpoint: expected {path.name} to be a JSON object, got {type(values).__name__}; download it again")
    return values


def _found(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"checkpoint: expected a file {path.name} in {str(path.parent)!r}, got none; check the path")
    return path


def _current(name: str) -> str:
    """Return the name with a TensorFlow ending replaced by the current one."""
    old = next((ending for ending in OLD_ENDINGS if name.endswith(ending)), None)
    return name if old is None else name.removesuffix(old) + OLD_ENDINGS[old]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is not sparse, nested, without memory, or larger than its memory, as an expanded one is."""
    return not tensor.is_nested and tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _some(names: List[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _dtype_line(name: str, dtype: str) -> str:
    return f"checkpoint: expected tensors in float32, float16 or bfloat16, got {dtype} in {name}; save the model in one of these"
