"""Files of tensors: safetensors, and dictionaries of torch.save. Only tensors are unpickled."""

import pickle
import pickletools
import re
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Type, Union

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from posenc_export.models.folder_files import AGAIN, LONGEST, WHERE
from posenc_export.shared.foreign import FOREIGN, brief
from posenc_export.shared.refusal import refusal

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Keys under which training loops save the weights beside other values.
NESTED = ("state_dict", "model_state_dict", "model")
SAVE = "save the state_dict of the model, or save it as safetensors"
# Exceptions of torch.load for a damaged file: those of its pickle reader, too.
DAMAGED: Tuple[Type[Exception], ...] = (*FOREIGN, pickle.UnpicklingError, zipfile.BadZipFile)
# What a pickle of dense tensors names. torch's own list has more, such as bytearray, of any size.
PICKLED = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v2)?|parameter(_with_state)?)|"
    r"torch\._tensor _rebuild_from_type_v2|torch\.nn\.parameter Parameter|torch \w+Storage|"
    r"torch\.storage \w+Storage|torch (Size|Tensor|device|b?float\d+|int\d+)"
)
Shape = Tuple[int, ...]


class SafetensorsFile:
    """A .safetensors file. ValueError: it is missing or cannot be read."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path = path
        try:
            self._file: Any = opened.enter_context(safe_open(existing(path), framework="pt"))
        except SafetensorError as error:
            rule = f"{path.name} to be a complete safetensors file"
            raise refusal(WHERE, rule, f"an error ({brief(error)})", AGAIN) from None
        _check_names(self)

    def names(self) -> List[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> Shape:
        return tuple(self._file.get_slice(name).get_shape())

    def raw(self, name: str) -> Tensor:
        """Return a tensor in its own dtype, also after the checkpoint was closed."""
        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(name)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as float32. ValueError: its dtype is not among DTYPES."""
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in DTYPES:
            raise _other_dtype(name, dtype)
        return self._file.get_tensor(name).float()


class TorchFile:
    """A dictionary of tensors as torch.save writes it, or one below a key of NESTED.

    Raises:
        ValueError: the file is missing, cannot be read or holds other objects.
    """

    def __init__(self, path: Path, _: ExitStack) -> None:
        self.path = existing(path)
        if not zipfile.is_zipfile(path):
            rule = "be a file of torch.save, in the zip format of torch 1.6 and later"
            raise self._refusal(rule, "a file in another format")
        rule = "hold only tensors, in the zip format of torch 1.6 and later"
        try:
            other = _foreign(path)
            if other is None:
                stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except DAMAGED as error:
            raise self._refusal(rule, f"an error ({brief(error)})") from None
        if other is not None:
            raise self._refusal(rule, other)
        if isinstance(stored, dict):
            nested = (stored[key] for key in NESTED if isinstance(stored.get(key), dict))
            stored = next(nested, stored)
        if not isinstance(stored, dict) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in stored.items()
        ):
            raise self._refusal("be a dictionary of tensors by name", "other objects")
        for name, value in stored.items():
            if not _is_plain(value):
                got = f"{name[:80]} with layout {value.layout} on {value.device}"
                rule = "hold dense tensors with all their numbers"
                raise self._refusal(rule, got, "save the model as safetensors")
        self._tensors: Dict[str, Tensor] = stored
        _check_names(self)

    def _refusal(self, rule: str, got: str, remedy: str = SAVE) -> ValueError:
        return refusal(WHERE, f"{self.path.name} to {rule}", got, remedy)

    def names(self) -> List[str]:
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        return tuple(self._tensors[name].shape)

    def raw(self, name: str) -> Tensor:
        """As SafetensorsFile.raw."""
        return self._tensors[name].detach()

    def tensor(self, name: str) -> Tensor:
        """As SafetensorsFile.tensor."""
        tensor = self.raw(name)
        if tensor.dtype not in DTYPES.values():
            raise _other_dtype(name, str(tensor.dtype).removeprefix("torch."))
        return tensor.float()


OPENERS: Dict[str, Type[Union[SafetensorsFile, TorchFile]]] = {
    ".safetensors": SafetensorsFile,
    ".bin": TorchFile,
}


def existing(path: Path) -> Path:
    """Return the path of a file. ValueError: there is none."""
    if not path.is_file():
        rule = f"a file {path.name} in {str(path.parent)!r}"
        raise refusal(WHERE, rule, "none", "check the path")
    return path


def _check_names(file: Union[SafetensorsFile, TorchFile]) -> None:
    """Check names of tensors, which messages show in a terminal."""
    if other := [name for name in file.names() if not name.isprintable()]:
        rule = f"{file.path.name} to name tensors in printable characters"
        raise refusal(WHERE, rule, f"{other[0]!r:.120}", AGAIN)


def _foreign(path: Path) -> Optional[str]:
    """What a zip archive of torch.save holds beside tensors, or None. Nothing is unpickled."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                return f"{entry.filename!r:.80}, which is compressed"
            if not entry.filename.endswith(".pkl"):
                continue
            if entry.file_size > LONGEST:
                return f"{entry.filename!r:.80} of {entry.file_size} bytes"
            for code, value, _ in pickletools.genops(archive.read(entry)):
                if code.name == "PROTO" and value != 2:  # which torch.load does not read
                    return f"a pickle of protocol {value}"
                if code.name in ("GLOBAL", "INST") and not PICKLED.fullmatch(str(value)):
                    return f"an object of {str(value).replace(' ', '.')!s:.200}"
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, on the CPU, and no larger than its memory."""
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return dense and tensor.nbytes <= tensor.untyped_storage().nbytes()


def _other_dtype(name: str, dtype: str) -> ValueError:
    rule, remedy = "tensors in float32, float16 or bfloat16", "save the model in one of these"
    return refusal(WHERE, rule, f"{dtype} in {name}", remedy)
