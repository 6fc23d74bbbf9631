"""A GGUF file as a checkpoint (compare models/checkpoint.py)."""

import functools
import math
from pathlib import Path
from typing import Any, Mapping

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.folder_files import content
from posenc_export.models.gguf import text
from posenc_export.models.gguf.blocks import UNQUANTIZED, GGUFMatrix
from posenc_export.models.gguf.config import AGAIN, config_of, undone
from posenc_export.models.gguf.file import read_gguf
from posenc_export.models.weight_blocks import Matrix
from posenc_export.shared.refusal import refusal

# Experts that transformers holds in one tensor [experts,2H,E], and GGUF in two.
GATES_AND_UPS, HALVES = ".experts.gate_up_proj", (".experts.gate_proj", ".experts.up_proj")
# Tensors that no parameter of transformers is: factors of rotations, which are read with the
# config, and the head of a model that is read without it.
UNPLACED = ("rope_", "output.")


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
        self._path, file = path, read_gguf(path)
        self._values, self._tensors = file
        self.config, self._undo = config_of(file)
        # Names of the tensors of the file that are joined along their second axis, most often one.
        self._places: dict[str, list[str]] = {}

    @functools.cached_property
    def files(self) -> dict[str, bytes]:
        """Tokenizer files by name. A tokenizer.json beside the file takes the place of its
        vocabulary. ValueError: it cannot be read. ModuleNotFoundError: no tokenizers.
        """
        beside = self._path.parent / "tokenizer.json"
        return text.files_of(self._values, content(beside) if beside.exists() else None)

    def __enter__(self) -> "GGUFCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self._tensors = {}

    def names(self) -> list[str]:
        """Return those that `place` found, none before it."""
        return list(self._places)

    def sizes(self) -> list[int]:
        """Return the number of entries of each tensor."""
        return [math.prod(tensor.shape) for tensor in self._tensors.values()]

    def place(self, shapes: Mapping[str, tuple[int, ...]], base: str) -> None:
        """Find the tensors of a model.

        Args:
            shapes: of all parameters, by transformers' names.
            base: prefix of names of whole models.

        Raises:
            ValueError: the file has others, or they have other sizes.
        """
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        architecture = self._values["general.architecture"]
        number = next(one for one, name in MODEL_ARCH_NAMES.items() if name == architecture)
        table = get_tensor_name_map(number, self.config["num_hidden_layers"])
        for name in shapes:
            halves = HALVES if name.endswith(GATES_AND_UPS) else (GATES_AND_UPS,)
            own = [name.replace(GATES_AND_UPS, half) for half in halves]
            self._places[name] = [_place(one, table, base) for one in own]
        used = {place: name for name, places in self._places.items() for place in places}
        missing = [f"no {place} ({used[place]})" for place in used if place not in self._tensors]
        others = [name for name in self._tensors if name not in used]
        extra = [f"also {name}" for name in others if not name.startswith(UNPLACED)]
        if missing or extra:
            rule = f"the {len(used)} tensors of {architecture} that the metadata describe"
            raise refusal("gguf", rule, [*missing, *extra][0], AGAIN)
        for name, shape in shapes.items():
            first, *rest = (self._tensors[place].shape for place in self._places[name])
            stored = (*first[:1], *(size * (1 + len(rest)) for size in first[1:2]), *first[2:])
            if stored != shape:
                rule = f"{self._places[name][0]} with sizes {list(shape)} by the metadata"
                raise refusal("gguf", rule, list(first), AGAIN)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as float32, as it was before its conversion to GGUF. ValueError: the
        library gguf cannot read its type.
        """
        places = self._places[name]
        parts = [self._tensors[place].numbers() for place in places]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        return torch.from_numpy(np.array(undone(places[0], whole, self._undo, self.config)))

    def matrix(self, name: str) -> Matrix | None:
        """Return a quantized matrix; None for other tensors."""
        place = self._places[name][0]
        tensor = self._tensors[place]
        if len(tensor.shape) != 2 or tensor.kind.name in UNQUANTIZED:
            return None
        rows = undone(place, np.arange(tensor.shape[0])[:, None], self._undo, self.config)
        return GGUFMatrix(tensor, rows.flatten())


def _place(name: str, table: Any, base: str) -> str:
    """Return the name in the file of a tensor of transformers, whose models without a head, or the
    library gguf, may leave out the base.
    """
    module, _, kind = name.rpartition(".")
    if module.endswith(".experts"):  # a parameter of a module with several
        module, kind = name, "weight"
    spelled = (module, module.removeprefix(base), f"{base}{module}")
    theirs = next(filter(None, map(table.get_name, spelled)), None)
    return f"{theirs}.{kind}" if theirs else name
