"""A folder as transformers saves it: config.json, and tensors that are mapped into memory and read one by one. No object but tensors is unpickled."""

import json
import pickle
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Dict, List, Optional, Protocol, Tuple, Type, Union

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# Where weights stand, in the order transformers looks for them.
WHOLE, SHARDED = ("model.safetensors", "pytorch_model.bin"), ("model.safetensors.index.json", "pytorch_model.bin.index.json")
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Endings as TensorFlow named them, in the first files of BERT, RoFormer and others: ours.
OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# What stands beside tokenizer.json: how a conversation is written, names of special tokens, how ids are chosen.
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "generation_config.json")
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
        ValueError: not such a file.
    """

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path = path
        try:
            self._file: Any = opened.enter_context(safe_open(_found(path), framework="pt"))
        except SafetensorError as error:
            raise ValueError(f"checkpoint: {path.name} is a whole safetensors file, got one that cannot be read ({error}); fetch it again") from None

    def names(self) -> List[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> Shape:
        return tuple(self._file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """float32, whatever the file holds.

        Raises:
            ValueError: another dtype than float32, float16 and bfloat16.
        """
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise ValueError(_dtype_line(name, dtype))
        return self._file.get_tensor(name).float()


class TorchFile:
    """A dictionary of tensors as torch.save writes it, read without unpickling anything else.

    Raises:
        ValueError: not such a file, or one that holds other objects.
    """

    def __init__(self, path: Path, _: ExitStack) -> None:
        self.path = path
        try:
            held = torch.load(_found(path), map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            why = str(error).partition("\n")[0]
            raise ValueError(f"checkpoint: {path.name} holds tensors only, in the format of torch 1.6, got another file ({why}); save it as safetensors") from None
        if not isinstance(held, dict) or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in held.items()):
            raise ValueError(f"checkpoint: {path.name} is a dictionary of tensors by name, got other objects; save it as safetensors")
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
    """The tensors of a folder by name, whatever file they stand in. A context manager: files are closed at its end.

    Args:
        folder: with model.safetensors or pytorch_model.bin, or their index.json and the files it names.

    Raises:
        ValueError: no weights, a file that is missing or cannot be read, an index that does not fit its files.
    """

    def __init__(self, folder: Path) -> None:
        self._homes: Dict[str, Tuple[TensorFile, str]] = {}  # the file, and the name in it
        with ExitStack() as opened:
            for path, promised in _files(folder).items():
                self._add(OPENERS[path.suffix](path, opened), promised)
            self._opened = opened.pop_all()

    def _add(self, file: TensorFile, promised: List[str]) -> None:
        names = file.names()
        added = {_current(name): (file, name) for name in names}
        absent, again = sorted(set(promised) - set(names)), sorted(set(added) & set(self._homes))
        if absent:
            raise ValueError(f"checkpoint: {file.path.name} holds what the index says, got no {_some(absent)}; fetch it again")
        if again:
            raise ValueError(f"checkpoint: a tensor stands in one file, got {_some(again)} in {self._homes[again[0]][0].path.name} and {file.path.name}; remove one")
        self._homes.update(added)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self._homes.clear()
        self._opened.close()

    def names(self) -> List[str]:
        """Of all tensors."""
        return list(self._homes)

    def forget(self, names: List[str]) -> None:
        """As if these were not there."""
        for name in names:
            del self._homes[name]

    def check(self, shapes: Dict[str, Shape]) -> None:
        """Refuse tensors that are missing, too many or of other shapes than these.

        Raises:
            ValueError: such a difference.
        """
        missing, extra = sorted(set(shapes) - set(self._homes)), sorted(set(self._homes) - set(shapes))
        if missing:
            raise ValueError(f"checkpoint: {len(shapes)} tensors are needed, got no {_some(missing)}; the config describes another model than the weights")
        if extra:
            raise ValueError(f"checkpoint: every tensor is used, got {_some(extra)} beside them; the config describes another model than the weights")
        for name, shape in shapes.items():
            file, written = self._homes[name]
            if file.shape(written) != shape:
                raise ValueError(f"checkpoint: {name} has shape {list(shape)} by the config, got {list(file.shape(written))}; one of them is of another model")

    def tensor(self, name: str) -> Tensor:
        """One tensor, float32.

        Raises:
            ValueError: another dtype than float32, float16 and bfloat16.
        """
        file, written = self._homes[name]
        return file.tensor(written)


def read_config(folder: Path) -> Dict[str, Any]:
    """config.json.

    Raises:
        ValueError: no folder, no such file, no JSON object.
    """
    if not folder.is_dir():
        raise ValueError(f"checkpoint: the path is a folder with config.json and weights, got {str(folder)!r}; give a folder on this machine")
    return _json(folder / "config.json")


def read_tokenizer(folder: Path) -> bytes:
    """tokenizer.json as it is; empty where there is none."""
    path = folder / "tokenizer.json"
    return path.read_bytes() if path.is_file() else b""


def read_beside(folder: Path) -> Dict[str, bytes]:
    """The files in BESIDE that are there, by name, as they are."""
    return {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).is_file()}


def read_ids(folder: Path, key: str, vocabulary: int) -> Tuple[int, ...]:
    """The ids of a key of generation_config.json, or of config.json where that does not say. Ids beyond the vocabulary are left out.

    Args:
        key: eos_token_id, ids that end a text, or decoder_start_token_id, the first id of a decoder that reads an encoder.

    Raises:
        ValueError: no whole numbers of 0 or more.
    """
    given = None
    for name in ("generation_config.json", "config.json"):
        if given is None and (folder / name).is_file():
            given = _json(folder / name).get(key)
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError(f"checkpoint: {key} is null, a whole number of 0 or more, or a list of these, got {given!r}; correct generation_config.json")
    return tuple(one for one in ids if one < vocabulary)


def read_tensors(path: Path) -> Dict[str, Tensor]:
    """All tensors of one .safetensors file, float32.

    Raises:
        ValueError: not such a file, another dtype than float32, float16 and bfloat16.
    """
    with ExitStack() as opened:
        file = SafetensorsFile(path, opened)
        return {name: file.tensor(name) for name in file.names()}


def _files(folder: Path) -> Dict[Path, List[str]]:
    """The files with weights, and the names that an index promises for each."""
    for whole, index in zip(WHOLE, SHARDED, strict=True):
        if (folder / whole).is_file():
            return {folder / whole: []}
        if (folder / index).is_file():
            return _sharded(folder, index)
    raise ValueError(f"checkpoint: a folder holds one of {', '.join((*WHOLE, *SHARDED))}, got none in {str(folder)!r}; give another folder")


def _sharded(folder: Path, index: str) -> Dict[Path, List[str]]:
    places = _json(folder / index).get("weight_map")
    suffix = Path(index.removesuffix(".index.json")).suffix
    if not isinstance(places, dict) or not places:
        raise ValueError(f"checkpoint: weight_map of {index} says in what file each tensor stands, got {type(places).__name__}; fetch it again")
    files: Dict[Path, List[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != suffix:
            raise ValueError(f"checkpoint: {index} names {suffix} files in its own folder, got {file!r}; fetch it again")
        files.setdefault(folder / file, []).append(name)
    return files


def _json(path: Path) -> Dict[str, Any]:
    try:
        values = json.loads(_found(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        if str(error).startswith("checkpoint: "):
            raise
        raise ValueError(f"checkpoint: {path.name} is JSON, got text that is none ({error}); fetch it again") from None
    if not isinstance(values, dict):
        raise ValueError(f"checkpoint: {path.name} is a JSON object, got {type(values).__name__}; fetch it again")
    return values


def _found(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"checkpoint: {path.name} is a file in {str(path.parent)!r}, got none; fetch it")
    return path


def _current(name: str) -> str:
    """The name without an old ending."""
    old = next((ending for ending in OLD_ENDINGS if name.endswith(ending)), None)
    return name if old is None else name.removesuffix(old) + OLD_ENDINGS[old]


def _some(names: List[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _dtype_line(name: str, dtype: str) -> str:
    return f"checkpoint: tensors are float32, float16 or bfloat16, got {dtype} in {name}; save the model in one of these"
