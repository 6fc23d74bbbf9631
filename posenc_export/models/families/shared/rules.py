"""Rules that form parameters of our models from tensors of a checkpoint. The weight table of a family consists of such rules.

`shapes` gives the tensors that the checkpoint must hold for one parameter, and `form` computes the parameter. `{layer}` in a name is replaced by the
index of the layer.
"""

from dataclasses import dataclass
from typing import Dict, List, Mapping, Protocol, Tuple

import torch
from torch import Tensor

from posenc_export.models.config import AttentionConfig

Shape = Tuple[int, ...]


class Rule(Protocol):
    """One entry of a weight table."""

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        """Return names and shapes of the tensors in the checkpoint.

        Args:
            kind: last component of our parameter's name, such as "weight" or "bias".
            shape: shape of our parameter.
            config: attention of the layer.
        """

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        """Return our parameter, from tensors in the order of `shapes`."""


Table = Mapping[str, Rule]


@dataclass(frozen=True)
class Same:
    """The same tensor under another name.

    Args:
        module: name of the module in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class Whole:
    """The same tensor, given by its full name.

    Args:
        name: full name of the tensor in the checkpoint.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class Joined:
    """Concatenation of separate projections of queries, keys and values.

    Args:
        q, k, v: names of the modules in the checkpoint.
    """

    q: str
    k: str
    v: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        heads = {self.q: config.heads, self.k: config.kv_heads, self.v: config.kv_heads}
        return {f"{module}.{kind}": (count * config.head_size, *shape[1:]) for module, count in heads.items()}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.cat(tensors)


@dataclass(frozen=True)
class Grouped:
    """A packed projection with a block for each kv head: the group's query heads, the key head, the value head (GPT-NeoX, Bloom, Falcon).

    Args:
        module: name of the module in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        groups = tensors[0].unflatten(0, (config.kv_heads, -1, config.head_size))
        return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])


@dataclass(frozen=True)
class Part:
    """One of several parts of equal size of a packed projection.

    Args:
        module: name of the module in the checkpoint.
        index: index of the part, from 0.
        parts: number of parts.
    """

    module: str
    index: int
    parts: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": (self.parts * shape[0], *shape[1:])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].chunk(self.parts)[self.index]


@dataclass(frozen=True)
class Transposed:
    """The transpose of a weight [inputs, outputs], as in GPT-2's Conv1D.

    Args:
        module: name of the module in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape[::-1]}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].t()


@dataclass(frozen=True)
class OnePlus:
    """The weight of a norm plus 1 (Gemma saves w - 1).

    Args:
        module: name of the module in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0] + 1.0


@dataclass(frozen=True)
class RowsFrom:
    """A table without its first rows, which no position uses (OPT).

    Args:
        module: name of the module in the checkpoint.
        row: index of the first row to keep.
    """

    module: str
    row: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": (shape[0] + self.row, *shape[1:])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0][self.row :]


@dataclass(frozen=True)
class Rows:
    """A stack of tensors along a new first axis, one for each head or expert.

    Args:
        name: full name of the tensors in the checkpoint; `{row}` is replaced by the index.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name.replace("{row}", str(row)): shape[1:] for row in range(shape[0])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.stack(tensors)


@dataclass(frozen=True)
class Linears:
    """A stack of the linear layers of experts, as one tensor [experts, inputs, outputs].

    Args:
        name: full name of the weights [outputs, inputs] in the checkpoint; `{row}` is replaced by the index of the expert.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name.replace("{row}", str(row)): (shape[2], shape[1]) for row in range(shape[0])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.stack([tensor.t() for tensor in tensors])


@dataclass(frozen=True)
class Half:
    """One half of the last axis of a tensor that holds all gate entries, then all up entries (Llama 4).

    Args:
        name: full name of the tensor in the checkpoint.
        index: 0 for the first half, 1 for the second.
    """

    name: str
    index: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: (*shape[:-1], 2 * shape[-1])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].chunk(2, dim=-1)[self.index]


@dataclass(frozen=True)
class EveryOther:
    """Every second entry of the last axis of a tensor in which gate and up entries alternate (gpt-oss).

    Args:
        name: full name of the tensor in the checkpoint.
        first: index of the first entry, 0 or 1.
    """

    name: str
    first: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: (*shape[:-1], 2 * shape[-1])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0][..., self.first :: 2].contiguous()


@dataclass(frozen=True)
class TurningFirst:
    """Queries with the rotated entries of each head moved from the end to the beginning (DeepSeek).

    Args:
        module: name of the module in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].unflatten(0, (config.heads, config.head_size)).roll(config.projection["rotary"], 1).flatten(0, 1)


@dataclass(frozen=True)
class KeysThenValues:
    """Keys of all heads, then values of all heads, from a tensor with key and value of each head in turn (DeepSeek).

    Args:
        module: name of the module in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        heads = tensors[0].unflatten(0, (config.heads, -1))
        own = config.head_size - config.projection["rotary"]
        return torch.cat((heads[:, :own].flatten(0, 1), heads[:, own:].flatten(0, 1)))
