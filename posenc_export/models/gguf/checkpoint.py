"""A GGUF file as a checkpoint (compare models/checkpoint.py)."""

import functools
import math
import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.folder_files import content
from posenc_export.models.gguf import text
from posenc_export.models.gguf.architectures import config_of
from posenc_export.models.gguf.blocks import GGUFMatrix
from posenc_export.models.gguf.conversion import undone
from posenc_export.models.gguf.file import GGUFFile, GGUFTensor, dequantized, read
from posenc_export.models.gguf.metadata import AGAIN, Metadata
from posenc_export.models.gguf.vocabulary import vocabulary_of
from posenc_export.models.weight_blocks import Numbered
from posenc_export.shared.refusal import refusal

# Of files into which llama.cpp splits a model, NAME-00001-of-00003.gguf and those that follow it.
PART = re.compile(r"-(\d{5})-of-(\d{5})$")  # end of the name of a file that was split
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
# Read with the config.
OF_ROTATION = re.compile(r"^rope_(freqs|factors_short|factors_long)\.weight$")
# Tensors that GGUF stacks along a new first axis: transformers' name of one of them, the index in
# it, and what replaces it.
STACKED = ((re.compile(r"\.experts\.(\d+)\."), ".experts."), (re.compile(r"\.norms\.(\d+)\."), "."))
HEAD = "lm_head"
# Experts that transformers holds in one tensor [experts,2H,E], and GGUF in two.
GATES_AND_UPS = re.compile(r"\.experts\.gate_up_proj$")
# Names of the tensors of the file that are joined along their second axis, most often one, and the
# entry of their first axis that is meant.
Place = Tuple[Tuple[str, ...], Optional[int]]


def is_gguf(path: Path) -> bool:
    """Whether a path names a file in place of a folder, and is that of a GGUF file by its name."""
    return path.suffix == ".gguf" and not path.is_dir()


class GGUFCheckpoint:
    """The tensors of a GGUF file, by transformers' names, mapped and read one at a time; a context
    manager, as Checkpoint. `config` is the contents of config.json.

    Args:
        path: the file, or the first of the files that it was split into.

    Raises:
        ValueError: a file that is missing or damaged, an architecture or a key that cannot be read.
        ModuleNotFoundError: gguf is not installed.
    """

    def __init__(self, path: Path) -> None:
        parts = read_parts(path)
        self._tensors: Dict[str, GGUFTensor] = tensors_of(parts)
        self._path, self._values = path, parts[0].values
        metadata = Metadata(self._values, self._tensors)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.config, kind = config_of(metadata, shapes, self._read)
        self._undo = kind.undo
        self._places: Dict[str, Place] = {}
        self._shapes: Mapping[str, Tuple[int, ...]] = {}
        self._architecture, self._base = str(metadata.architecture), ""

    @functools.cached_property
    def files(self) -> Dict[str, bytes]:
        """Tokenizer files by name. A tokenizer.json beside the file takes the place of its
        vocabulary. ValueError: it cannot be read. ModuleNotFoundError: no tokenizers.
        """
        beside = self._path.parent / "tokenizer.json"
        vocabulary = vocabulary_of(self._values)
        if beside.exists():
            return {**text.settings_of(vocabulary), beside.name: content(beside)}
        return text.files_of(vocabulary)

    def __enter__(self) -> "GGUFCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def names(self) -> List[str]:
        """Return those that `check` asked for; before, those of a head."""
        if self._places:
            return list(self._places)
        kinds = ("weight", "bias")
        return [f"{HEAD}.{kind}" for kind in kinds if f"output.{kind}" in self._tensors]

    def sizes(self) -> List[int]:
        """Return the number of entries of each tensor."""
        return [math.prod(tensor.shape) for tensor in self._tensors.values()]

    def forget(self, names: List[str]) -> None:
        """Ignore these tensors of a head from now on."""
        for name in names:
            del self._tensors[name.replace(HEAD, "output")]

    def base(self, bases: Sequence[str]) -> str:
        """Return the prefix of names of whole models, the last of `bases` but the empty one."""
        self._base = bases[-2]
        return self._base

    def check(self, shapes: Mapping[str, Tuple[int, ...]]) -> None:
        """Check that the tensors are exactly these, with these sizes; ValueError otherwise."""
        self._places = self._placed(list(shapes))
        self._shapes = shapes
        used = {name: theirs for theirs, (names, _) in self._places.items() for name in names}
        missing = [f"no {name} ({used[name]})" for name in used if name not in self._tensors]
        extra = sorted(name for name in {*self._tensors} - {*used} if not OF_ROTATION.match(name))
        if missing or extra:
            rule = f"the {len(used)} tensors of {self._architecture} that the metadata describe"
            got = missing[0] if missing else f"also {extra[0]}"
            raise refusal("gguf", rule, got, f"{AGAIN}, or to safetensors")
        for name, shape in shapes.items():
            places, row = self._places[name]
            stored = list(self._tensors[places[0]].shape)
            if len(places) > 1:
                stored[1] *= len(places)
            if sorted(stored if row is None else stored[1:]) != sorted(shape):
                raise self._other_shape(name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as float32, as it was before its conversion to GGUF. ValueError: the
        library gguf cannot read its type, or its axes have another order.
        """
        places, row = self._places[name]
        which = None if row is None else slice(row, row + 1)
        parts = [dequantized(self._tensors[place], which) for place in places]
        numbers = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        numbers = undone(places[0], numbers, self._undo, self.config) if row is None else numbers[0]
        if numbers.shape != self._shapes[name]:
            raise self._other_shape(name)
        return torch.from_numpy(np.array(numbers, np.float32))

    def _other_shape(self, name: str) -> ValueError:
        place = self._places[name][0][0]
        rule = f"{place} with sizes {list(self._shapes[name])} by the metadata"
        return refusal("gguf", rule, list(self._tensors[place].shape), AGAIN)

    def matrix(self, name: str) -> Optional[Numbered]:
        """Return a matrix and the index [N,1] of each row in it; None for other tensors."""
        (place, *_), row = self._places[name]
        tensor = self._tensors[place]
        if row is not None or len(tensor.shape) != 2:
            return None
        rows = np.arange(len(tensor.data))[:, None]
        return GGUFMatrix(tensor), undone(place, rows, self._undo, self.config)

    def _read(self, name: str) -> np.ndarray:
        return dequantized(self._tensors[name])

    def _placed(self, names: List[str]) -> Dict[str, Place]:
        """Return the places of tensors by transformers' names, from gguf's table."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        layers = self.config["num_hidden_layers"]
        table, places = get_tensor_name_map(numbers[self._architecture], layers), {}
        for name in names:
            row, plain = None, name
            for pattern, plainly in STACKED:
                if (index := pattern.search(name)) is not None:
                    row, plain = int(index[1]), pattern.sub(plainly, name)
            kinds = ("gate", "up") if GATES_AND_UPS.search(plain) else ("",)
            own = [GATES_AND_UPS.sub(f".experts.{kind}_proj", plain) for kind in kinds]
            places[name] = (tuple(self._place(one, table) for one in own), row)
        return places

    def _place(self, name: str, table: Any) -> str:
        """Return the name in the file of a tensor of transformers, whose models without a head, or
        the library gguf, may leave out the base.
        """
        module, _, kind = name.rpartition(".")
        if module.endswith(".experts"):  # a parameter of a module with several
            module, kind = name, "weight"
        spelled = (module, module.removeprefix(self._base), f"{self._base}{module}")
        theirs = next(filter(None, map(table.get_name, spelled)), None)
        return f"{theirs}.{kind}" if theirs else name


def read_parts(path: Path) -> List[GGUFFile]:
    """Return a file, or all the files that it was split into, the first first. Errors as for
    `read`; ValueError, too, if a part is missing, or says that it is another part.
    """
    first = read(path)
    count = _whole(first, COUNT, 1)
    if count < 2:
        return [first]
    name = PART.search(path.stem)
    if name is None or int(name[1]) != 1 or int(name[2]) != count:
        rule = f"the first of {count} files, NAME-00001-of-{count:05}.gguf"
        remedy = "give the first, with the others beside it"
        raise refusal("checkpoint", rule, path.name, remedy)
    stem = path.stem[: name.start()]
    names = [f"{stem}-{part:05}-of-{count:05}.gguf" for part in range(2, count + 1)]
    files = [first, *(read(path.with_name(other)) for other in names)]
    for index, file in enumerate(files):
        for key, wanted in ((NUMBER, index), (COUNT, count)):
            if (number := _whole(file, key, wanted)) != wanted:
                raise _refusal(file, f"{key} to be {wanted}", number)
    tensors = sum(len(file.tensors) for file in files)
    if (number := _whole(first, TENSORS, tensors)) != tensors:
        raise _refusal(first, f"{TENSORS} to be {tensors}, as many as the files have", number)
    return files


def tensors_of(files: List[GGUFFile]) -> Dict[str, GGUFTensor]:
    """Return the tensors of all parts by name. ValueError: two parts have one."""
    tensors: Dict[str, GGUFTensor] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise _refusal(file, "tensors that no other part has", tensor.name)
            tensors[tensor.name] = tensor
    return tensors


def _whole(file: GGUFFile, key: str, default: int) -> int:
    number = file.values.get(key, default)
    if type(number) is not int or number < 0:
        raise _refusal(file, f"{key} to be a whole number", f"{number!r:.80}")
    return number


def _refusal(file: GGUFFile, rule: str, got: Any) -> ValueError:
    return refusal(f"gguf {file.path.name}", rule, got, "download the files again")
