"""How a parameter of ours is made of tensors of a checkpoint: the rules that tables of families are written in.

A rule has `shapes`, what the checkpoint must hold for one parameter, and `form`, the parameter from it. `{layer}` in a name stands for the layer.
"""

from dataclasses import dataclass
from typing import Dict, List, Mapping, Protocol, Tuple

import torch
from torch import Tensor

from posenc_export.models.config import AttentionConfig

Shape = Tuple[int, ...]


class Rule(Protocol):
    """One line of a table."""

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        """Names and shapes in the checkpoint for our parameter of `kind` "weight" or "bias" and this shape, in a layer with that attention."""

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        """Our parameter, from tensors in the order of `shapes`."""


Table = Mapping[str, Rule]


@dataclass(frozen=True)
class Same:
    """Another name.

    Args:
        module: in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class Whole:
    """A tensor that is no weight or bias of a module.

    Args:
        name: in the checkpoint, of the tensor itself.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0]


@dataclass(frozen=True)
class Joined:
    """Projections of queries, keys and values, one behind the other.

    Args:
        q, k, v: modules in the checkpoint.
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
    """A packed projection in which each group of query heads stands before its key head and its value head (GPT-NeoX, Bloom, Falcon).

    Args:
        module: in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        groups = tensors[0].unflatten(0, (config.kv_heads, -1, config.head_size))
        return torch.cat([part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])])


@dataclass(frozen=True)
class Part:
    """One of several equal parts of a packed projection.

    Args:
        module: in the checkpoint.
        index: of the part, from 0.
        parts: how many there are.
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
    """A weight whose rows are inputs, as GPT-2's Conv1D has it.

    Args:
        module: in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape[::-1]}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].t()


@dataclass(frozen=True)
class OnePlus:
    """Factors of a norm that are saved less 1 (Gemma).

    Args:
        module: in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0] + 1.0


@dataclass(frozen=True)
class From:
    """Rows of a table from one on: those before it stand for padding (OPT, RoBERTa).

    Args:
        module: in the checkpoint.
        row: the first that is kept.
    """

    module: str
    row: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": (shape[0] + self.row, *shape[1:])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0][self.row :]


@dataclass(frozen=True)
class Rows:
    """A tensor for each row of ours: of heads that have norms of their own, of experts.

    Args:
        name: in the checkpoint, of the tensors themselves; `{row}` stands for the row.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name.replace("{row}", str(row)): shape[1:] for row in range(shape[0])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.stack(tensors)


@dataclass(frozen=True)
class Linears:
    """A linear layer for each expert, as one tensor [experts, inputs, outputs].

    Args:
        name: of their weights in the checkpoint; `{row}` stands for the expert.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name.replace("{row}", str(row)): (shape[2], shape[1]) for row in range(shape[0])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.stack([tensor.t() for tensor in tensors])


@dataclass(frozen=True)
class Half:
    """One half of the last axis: gates before what they act on (Llama 4).

    Args:
        name: in the checkpoint, of the tensor itself.
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
    """Every other entry of the last axis: gates in turn with what they act on (gpt-oss).

    Args:
        name: in the checkpoint, of the tensor itself.
        first: 0 or 1.
    """

    name: str
    first: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: (*shape[:-1], 2 * shape[-1])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0][..., self.first :: 2].contiguous()


@dataclass(frozen=True)
class TurningFirst:
    """Queries of which the last entries of a head turn: ours are the first (DeepSeek).

    Args:
        module: in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].unflatten(0, (config.heads, config.head_size)).roll(config.projection["rotary"], 1).flatten(0, 1)


@dataclass(frozen=True)
class KeysThenValues:
    """Keys and values of each head in turn: ours are the keys of all heads before their values (DeepSeek).

    Args:
        module: in the checkpoint.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        heads = tensors[0].unflatten(0, (config.heads, -1))
        own = config.head_size - config.projection["rotary"]
        return torch.cat((heads[:, :own].flatten(0, 1), heads[:, own:].flatten(0, 1)))
