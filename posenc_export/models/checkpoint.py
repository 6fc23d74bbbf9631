"""Reader of checkpoint folders of transformers. Tensors are mapped and read one at a time."""

import math
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from torch import Tensor

from posenc_export.models.blocks import Numbered
from posenc_export.models.packed import PackedTensor, unpacked
from posenc_export.models.tensor_files import OPENERS, Shape, TensorFile, existing
from posenc_export.shared.foreign import json_of
from posenc_export.shared.suggestion import download

# Names of weight files, in the order in which transformers looks for them.
WHOLE = ("model.safetensors", "pytorch_model.bin")
SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# TensorFlow's name endings, in early checkpoints of BERT, RoFormer and others, to current ones.
OLD_ENDINGS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Files that accompany tokenizer.json: chat template, special tokens, generation settings, settings
# of processors.
TOKENIZER = "tokenizer.json"  # the file name of the tokenizers library
GENERATION = "generation_config.json"
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
)  # of features, such as the spectrogram of speech
TOKENIZER_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    GENERATION,
    *PROCESSORS,
)


class Checkpoint:
    """The tensors of a checkpoint folder, by name. Use as a context manager, which closes the
    files.

    Args:
        folder: holds model.safetensors or pytorch_model.bin, or an index.json with the files that
            it names.
        config: contents of config.json (read_config).

    Attributes:
        config: the argument.
        files: the bytes of tokenizer.json and TOKENIZER_FILES, by name, as far as they exist.

    Raises:
        ValueError: no weights, a file that is missing or cannot be read, an index that does not
            match its files.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.config = config
        self.files = {
            name: (folder / name).read_bytes()
            for name in (TOKENIZER, *TOKENIZER_FILES)
            if (folder / name).is_file()
        }
        # Tensor name to file and name in that file.
        self._sources: Dict[str, Tuple[TensorFile, str]] = {}
        with ExitStack() as opened:
            for path, listed in _files(folder).items():
                self._add(OPENERS[path.suffix](path, opened), listed)
            if config.get("quantization_config") is not None:
                self._sources = unpacked(config["quantization_config"], self._sources)
            self._opened = opened.pop_all()

    def _add(self, file: TensorFile, listed: List[str]) -> None:
        names = file.names()
        added = {_current(name): (file, name) for name in names}
        missing = sorted(set(listed) - set(names))
        repeated = sorted(set(added) & set(self._sources))
        if missing:
            raise ValueError(
                f"checkpoint: expected {file.path.name} to hold the tensors that the index "
                f"lists, got no {_some(missing)}; download it again"
            )
        if repeated:
            first = self._sources[repeated[0]][0].path.name
            raise ValueError(
                f"checkpoint: expected each tensor in one file, got {_some(repeated)} in "
                f"{first} and {file.path.name}; remove one"
            )
        self._sources.update(added)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._sources.clear()
        self._opened.close()

    def names(self) -> List[str]:
        """Return the names of all tensors."""
        return list(self._sources)

    def base(self, bases: Sequence[str]) -> str:
        """Return the first prefix with which names begin."""
        return next(
            base
            for base in bases
            if any(name.startswith(base) for name in self._sources) or not base
        )

    def matrix(self, name: str) -> Optional[Numbered]:
        """Return a quantized matrix, with the indices of its rows [N,1]; None for other tensors."""
        file, written = self._sources[name]
        if not isinstance(file, PackedTensor) or len(file.shape(written)) != 2:
            return None
        return file, np.arange(file.rows)[:, None]

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
        missing = sorted(set(shapes) - set(self._sources))
        extra = sorted(set(self._sources) - set(shapes))
        remedy = "use the config.json that belongs to the weights"
        if missing:
            raise ValueError(
                f"checkpoint: expected the {len(shapes)} tensors of the model that "
                f"config.json describes, got no {_some(missing)}; {remedy}"
            )
        if extra:
            raise ValueError(
                "checkpoint: expected only tensors of the model that config.json describes, "
                f"got also {_some(extra)}; {remedy}"
            )
        for name, shape in shapes.items():
            file, written = self._sources[name]
            if file.shape(written) != shape:
                raise ValueError(
                    f"checkpoint: expected {name} with shape {list(shape)} by config.json, "
                    f"got {list(file.shape(written))}; {remedy}"
                )

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
        remedy = download(folder) or "download the model first"
        raise ValueError(
            "checkpoint: expected a local folder with config.json and weights, got "
            f"{str(folder)!r}; {remedy}"
        )
    return _json(folder / "config.json")


def read_ids(
    files: Mapping[str, bytes], config: Mapping[str, Any], key: str, vocabulary: int
) -> Tuple[int, ...]:
    """Return the token ids under a key of generation_config.json, or else of config.json. Ids
    beyond the vocabulary are dropped.

    Args:
        files: the files of the checkpoint by name.
        key: such as eos_token_id, the ids that end a text, or decoder_start_token_id, the first id
            of a decoder that reads an encoder.

    Raises:
        ValueError: generation_config.json is not a JSON object, or the value is not null, an
            integer of 0 or more, or a list of such integers.
    """
    value = object_of(GENERATION, files.get(GENERATION, b"{}")).get(key)
    value = config.get(key) if value is None else value
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        rule = f"expected {key} to be null, an integer of 0 or more, or a list of these"
        raise ValueError(f"checkpoint: {rule}, got {value!r}; correct {GENERATION}")
    return tuple(number for number in ids if number < vocabulary)


def object_of(name: str, content: bytes) -> Dict[str, Any]:
    """Return a JSON object of a checkpoint. Raise ValueError if it is none."""
    values: Dict[str, Any] = json_of("checkpoint", name, content, "download it again")
    return values


def _files(folder: Path) -> Dict[Path, List[str]]:
    """Return the weight files, each with the tensor names that an index lists for it."""
    for whole, index in zip(WHOLE, SHARDED, strict=True):
        if (folder / whole).is_file():
            return {folder / whole: []}
        if (folder / index).is_file():
            return _sharded(folder, index)
    raise ValueError(
        f"checkpoint: expected one of {', '.join((*WHOLE, *SHARDED))}, got none in "
        f"{str(folder)!r}; give another folder"
    )


def _sharded(folder: Path, index: str) -> Dict[Path, List[str]]:
    places = _json(folder / index).get("weight_map")
    suffix = Path(index.removesuffix(".index.json")).suffix
    if not isinstance(places, dict) or not places:
        raise ValueError(
            f"checkpoint: expected weight_map of {index} to map tensor names to files, got "
            f"{type(places).__name__}; download it again"
        )
    files: Dict[Path, List[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix != suffix:
            raise ValueError(
                f"checkpoint: expected {index} to name {suffix} files in its own folder, got "
                f"{file!r}; download it again"
            )
        files.setdefault(folder / file, []).append(name)
    return files


def _json(path: Path) -> Dict[str, Any]:
    return object_of(path.name, existing(path).read_bytes())


def _current(name: str) -> str:
    """Return the name with a TensorFlow ending replaced by the current one."""
    old = next((ending for ending in OLD_ENDINGS if name.endswith(ending)), None)
    return name if old is None else name.removesuffix(old) + OLD_ENDINGS[old]


def _some(names: List[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
