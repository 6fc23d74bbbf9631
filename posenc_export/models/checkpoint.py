"""Reader of checkpoint folders of transformers. Tensors are mapped and read one at a time. Pickles
of torch.save are not read, whatever they hold.
"""

import math
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, Mapping

from safetensors import SafetensorError, safe_open
from torch import Tensor

from posenc_export.models.folder_files import AGAIN, WHERE, content, inside
from posenc_export.models.packed import PackedTensor, Source, unpacked
from posenc_export.models.weight_blocks import Matrix
from posenc_export.shared.foreign import brief, json_of
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import download

SUFFIX = ".safetensors"
WHOLE, SHARDED = f"model{SUFFIX}", f"model{SUFFIX}.index.json"
CONVERT = "write them with safetensors.torch.save_file, or with save_pretrained of transformers"
TOKENIZER = "tokenizer.json"  # the file name of the tokenizers library
GENERATION = "generation_config.json"
# Files that accompany tokenizer.json: special tokens, chat template, generation.
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
)
DTYPES = ("F32", "F16", "BF16")
BELONGS = "use the config.json that belongs to the weights"
# transformers' name of the output head; a tied one may be saved as a copy of the token table.
HEAD = "lm_head.weight"
ADAPTER, MERGE = "adapter_config.json", "save the model that merge_and_unload of peft returns"
# Parts of names that a wrapper of a model adds, with the wrapper and the module to save in place.
WRAPPERS = {
    "_orig_mod": ("torch.compile", "model._orig_mod"),
    "module": ("DataParallel or DistributedDataParallel", "model.module"),
    "_fsdp_wrapped_module": ("FSDP", "the whole model, gathered"),
    "base_model": ("peft", "model.merge_and_unload()"),
}


class SafetensorsFile:
    """A .safetensors file. ValueError: as `inside`, or it cannot be read."""

    def __init__(self, path: Path, opened: ExitStack) -> None:
        self.path = inside(path)
        try:
            self._file: Any = opened.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            rule = f"{path.name} to be a complete safetensors file"
            raise refusal(WHERE, rule, f"an error ({brief(error)})", AGAIN) from None
        if other := [name for name in self.names() if not name.isprintable()]:
            rule = f"{path.name} to name tensors in printable characters"
            raise refusal(WHERE, rule, f"{other[0]!r:.120}", AGAIN)

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
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


class Checkpoint:
    """The tensors of a checkpoint folder, by name; a context manager, which closes the files.
    Several threads may read tensors; closing waits for the one that is being read.

    Args:
        folder: holds model.safetensors, or an index.json with the files that it names.
        config: contents of config.json (read_config).

    Attributes:
        files: the bytes of tokenizer.json and TOKENIZER_FILES, by name, as far as they exist.

    Raises:
        ValueError: no weights, a file that is missing or cannot be read, a tensor in two files.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.config = config
        kept = [name for name in (TOKENIZER, *TOKENIZER_FILES) if (folder / name).exists()]
        self.files = {name: content(folder / name) for name in kept}
        self._sources: dict[str, Source] = {}
        self._reading = Lock()
        with ExitStack() as opened:
            for path in _files(folder):
                file = SafetensorsFile(path, opened)
                for name in file.names():
                    if name in self._sources:
                        got = f"{name} in {self._sources[name][0].path.name} and {path.name}"
                        raise refusal(WHERE, "each tensor in one file", got, "remove one")
                    self._sources[name] = (file, name)
            if config.get("quantization_config") is not None:
                self._sources = unpacked(config["quantization_config"], self._sources)
            self._opened = opened.pop_all()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        with self._reading:
            self._sources.clear()
            self._opened.close()

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._sources)

    def matrix(self, name: str) -> Matrix | None:
        """Return a quantized matrix; None for other tensors."""
        file, written = self._sources[name]
        packed = isinstance(file, PackedTensor) and len(file.shape(written)) == 2
        return file if packed else None

    def sizes(self) -> list[int]:
        """Return the number of entries of each tensor."""
        return [math.prod(file.shape(written)) for file, written in self._sources.values()]

    def check_names(self, missing: set[str], extra: set[str], count: int) -> None:
        """Raise ValueError if one of a model's `count` tensors is missing or there are others."""
        if missing or extra:
            rule = f"the {count} tensors of the model that config.json describes, no others"
            got = list[str]()
            for word, names in (("no", sorted(missing)), ("also", sorted(extra))):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                got += [f"{word} {names[0]}{more}"] if names else []
            raise refusal(WHERE, rule, " and ".join(got), self._remedy(missing, extra))

    def _remedy(self, missing: set[str], extra: set[str]) -> str:
        """Return what to do with a checkpoint that lacks tensors or has others."""
        named = str(self.config.get("architectures"))
        parts = {part: name for name in sorted(extra) for part in name.split(".")}
        if part := next((part for part in WRAPPERS if part in parts), None):
            wrapper, inner = WRAPPERS[part]
            return f"{wrapper} adds {part!r} to names: save the state_dict of {inner}"
        if any("lora_" in name for name in extra):
            return f"lora_ are tensors of an adapter: {MERGE}"
        if missing <= {HEAD} and not extra:
            remedy = "set tie_word_embeddings to true if the head is the token table"
            return f"{remedy}, or export hidden states without a head (--no-head)"
        if "For" in named and not missing:
            remedy = "save the model that AutoModel.from_pretrained loads, without its head"
            return f"if they are a head of {named:.80}, which is not read, {remedy}"
        return BELONGS

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as float32. ValueError: stored as no float32, float16 or bfloat16."""
        with self._reading:
            file, written = self._sources[name]
            return file.tensor(written)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json. ValueError: there is no such folder or file, it is no JSON object, or an
    adapter of peft stands beside it.
    """
    if not folder.is_dir():
        remedy = download(folder) or "download the model first"
        rule = "a local folder with config.json and weights"
        raise refusal(WHERE, rule, repr(str(folder)), remedy)
    if (folder / ADAPTER).exists():
        raise refusal(WHERE, "a model without an adapter beside it", ADAPTER, MERGE)
    return _json(folder / "config.json")


def object_of(name: str, content: bytes) -> dict[str, Any]:
    """Return a JSON object of a checkpoint. ValueError: it is none."""
    values: dict[str, Any] = json_of(WHERE, name, content, AGAIN)
    return values


def _files(folder: Path) -> list[Path]:
    """Return the weight files: one, or those that an index lists."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / SHARDED).is_file():
        got = f"none in {str(folder)!r}"
        raise refusal(WHERE, f"{WHOLE} or {SHARDED}", got, f"if it has other files, {CONVERT}")
    places = _json(folder / SHARDED).get("weight_map")
    if not isinstance(places, dict) or not places:
        rule = f"weight_map of {SHARDED} to map tensor names to files"
        raise refusal(WHERE, rule, type(places).__name__, AGAIN)
    for file in places.values():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != SUFFIX:
            rule = f"{SHARDED} to name {SUFFIX} files in its own folder"
            raise refusal(WHERE, rule, repr(file), AGAIN)
    return [folder / file for file in dict.fromkeys(places.values())]


def _json(path: Path) -> dict[str, Any]:
    return object_of(path.name, content(path))
