"""Files of tensors: safetensors. Pickles of torch.save are not read, whatever they hold."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, List, Tuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from posenc_export.models.folder_files import AGAIN, WHERE
from posenc_export.shared.foreign import brief
from posenc_export.shared.refusal import refusal

DTYPES = ("F32", "F16", "BF16")
SUFFIX = ".safetensors"
CONVERT = "write them with safetensors.torch.save_file, or with save_pretrained of transformers"
Shape = Tuple[int, ...]


class SafetensorsFile:
    """A .safetensors file. ValueError: it is missing or cannot be read."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path = path
        if not path.is_file():
            rule = f"a file {path.name} in {str(path.parent)!r}"
            raise refusal(WHERE, rule, "none", "check the path")
        if path.suffix != SUFFIX:
            raise refusal(WHERE, f"weights in a file {SUFFIX}", path.name, CONVERT)
        try:
            self._file: Any = opened.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            rule = f"{path.name} to be a complete safetensors file"
            raise refusal(WHERE, rule, f"an error ({brief(error)})", AGAIN) from None
        if other := [name for name in self.names() if not name.isprintable()]:
            rule = f"{path.name} to name tensors in printable characters"
            raise refusal(WHERE, rule, f"{other[0]!r:.120}", AGAIN)

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
            rule = "tensors in float32, float16 or bfloat16"
            raise refusal(WHERE, rule, f"{dtype} in {name}", "save the model in one of these")
        return self._file.get_tensor(name).float()
