"""Files of tensors: safetensors, and dictionaries of torch.save. Only tensors are unpickled."""

import pickle
import re
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, List, Protocol, Tuple, Type, Union

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from posenc_export.shared.foreign import FOREIGN

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NESTED = (
    "state_dict",
    "model_state_dict",
    "model",
)  # keys under which training loops save the weights beside other values
SAVE = "save the state_dict of the model, or save it as safetensors"
# Exceptions of torch.load for a damaged file: those of its pickle reader, too.
DAMAGED: Tuple[Type[Exception], ...] = (*FOREIGN, pickle.UnpicklingError)
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
            self._file: Any = opened.enter_context(safe_open(existing(path), framework="pt"))
        except SafetensorError as error:
            raise ValueError(
                f"checkpoint: expected {path.name} to be a complete safetensors file, got an "
                f"error ({error}); download it again"
            ) from None

    def names(self) -> List[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> Shape:
        return tuple(self._file.get_slice(name).get_shape())

    def raw(self, name: str) -> Tensor:
        """Return a tensor in its own dtype, also after the checkpoint was closed."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)

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
    """A dictionary of tensors as torch.save writes it, or one below a key of NESTED. Nothing but
    tensors is unpickled.

    Raises:
        ValueError: the file is missing, cannot be read or holds other objects.
    """

    def __init__(self, path: Path, _: ExitStack) -> None:
        self.path = existing(path)
        expected = f"checkpoint: expected {path.name} to"
        if not zipfile.is_zipfile(path):
            rule = "be a file of torch.save, in the zip format of torch 1.6 and later"
            raise ValueError(f"{expected} {rule}, got a file in another format; {SAVE}")
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except DAMAGED as error:
            rule = "hold only tensors, in the zip format of torch 1.6 and later"
            raise ValueError(f"{expected} {rule}, got {_reason(error)}; {SAVE}") from None
        if isinstance(stored, dict):
            inside = [stored[key] for key in NESTED if isinstance(stored.get(key), dict)]
            stored = inside[0] if inside else stored
        if not isinstance(stored, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in stored.items()
        ):
            rule = "be a dictionary of tensors by name"
            raise ValueError(f"{expected} {rule}, got other objects; {SAVE}")
        for name, value in stored.items():
            if not _is_plain(value):
                got = f"{name[:80]} with layout {value.layout} on {value.device}"
                rule = f"{expected} hold dense tensors with all their numbers"
                raise ValueError(f"{rule}, got {got}; save the model as safetensors")
        self._held: Dict[str, Tensor] = stored

    def names(self) -> List[str]:
        return list(self._held)

    def shape(self, name: str) -> Shape:
        return tuple(self._held[name].shape)

    def raw(self, name: str) -> Tensor:
        """As SafetensorsFile.raw."""
        return self._held[name].detach()

    def tensor(self, name: str) -> Tensor:
        """As SafetensorsFile.tensor."""
        if self._held[name].dtype not in DTYPES.values():
            raise ValueError(_dtype_line(name, str(self._held[name].dtype).removeprefix("torch.")))
        return self._held[name].detach().float()


def _reason(error: Exception) -> str:
    """What torch.load found, in one line: the class of another object, or its error."""
    other = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    return (
        f"an object of {other[1][:200]}"
        if other
        else f"an error ({str(error).partition(chr(10))[0][:200]})"
    )


OPENERS: Dict[str, Type[Union[SafetensorsFile, TorchFile]]] = {
    ".safetensors": SafetensorsFile,
    ".bin": TorchFile,
}


def existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(
            f"checkpoint: expected a file {path.name} in {str(path.parent)!r}, got none; "
            "check the path"
        )
    return path


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, on the CPU, and no larger than its memory."""
    return (
        not tensor.is_nested
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes <= tensor.untyped_storage().nbytes()
    )


def _dtype_line(name: str, dtype: str) -> str:
    return (
        f"checkpoint: expected tensors in float32, float16 or bfloat16, got {dtype} in {name}; "
        "save the model in one of these"
    )
