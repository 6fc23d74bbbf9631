"""Rules of weight tables that encoders alone need (rules.py has those of all families)."""

from dataclasses import dataclass
from typing import Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export.models.config import AttentionConfig
from posenc_export.models.families.rules import Shape


@dataclass(frozen=True)
class PlusRow:
    """A table with the one row of another added to each of its rows: a model with a single token type (RoBERTa).

    Args:
        module: in the checkpoint.
        row: module of the table of one row.
    """

    module: str
    row: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape, f"{self.row}.{kind}": (1, *shape[1:])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0] + tensors[1]


@dataclass(frozen=True)
class Biases:
    """Biases of queries and values that are saved by themselves, beside keys that have none (DeBERTa).

    Args:
        q, v: names in the checkpoint, of the tensors themselves.
    """

    q: str
    v: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.q: (config.heads * config.head_size,), self.v: (config.kv_heads * config.head_size,)}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        q, v = tensors
        return torch.cat((q, torch.zeros_like(v), v))


@dataclass(frozen=True)
class NoTable:
    """Zeros for a table that the family has not.

    Args:
        rows, columns: its sizes.
    """

    rows: int
    columns: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.zeros(self.rows, self.columns)


@dataclass(frozen=True)
class NoBias:
    """Zeros for a bias over all query heads that the family has not."""

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.zeros(config.heads * config.head_size)


@dataclass(frozen=True)
class NormalisedRows:
    """A table whose rows are read through a LayerNorm, which is taken once (DeBERTa-v2).

    Args:
        table, norm: modules in the checkpoint.
        epsilon: of the norm.
    """

    table: str
    norm: str
    epsilon: float

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.table}.weight": shape, f"{self.norm}.weight": shape[1:], f"{self.norm}.bias": shape[1:]}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        rows, weight, bias = tensors
        return torch.nn.functional.layer_norm(rows, rows.shape[1:], weight, bias, self.epsilon)


@dataclass(frozen=True)
class JoinedHeads:
    """Projections of queries, keys and values by tensors [E,heads,D], one behind the other (XLNet).

    Args:
        q, k, v: names in the checkpoint, of the tensors themselves.
    """

    q: str
    k: str
    v: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        heads = {self.q: config.heads, self.k: config.kv_heads, self.v: config.kv_heads}
        return {name: (shape[1], count, config.head_size) for name, count in heads.items()}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.cat([part.flatten(1).t() for part in tensors])


@dataclass(frozen=True)
class FlatHeads:
    """A projection of mixed heads by a tensor [E,heads,D] (XLNet).

    Args:
        name: in the checkpoint, of the tensor itself.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: (shape[0], config.heads, config.head_size)}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].flatten(1)


@dataclass(frozen=True)
class Permuted:
    """A tensor whose axes stand in another order.

    Args:
        name: in the checkpoint, of the tensor itself.
        axes: of that tensor, in our order.
    """

    name: str
    axes: Tuple[int, ...]

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].permute(self.axes).contiguous()


@dataclass(frozen=True)
class KeysAndValues:
    """What a decoder makes of an encoder, for all its layers: keys of the first, values of the first, keys of the second, and so on. A bias that is not there is 0.

    Args:
        k, v: modules in the checkpoint; `{row}` stands for the layer of the decoder.
        layers: of the decoder.
        biases: which of the two have a bias.
    """

    k: str
    v: str
    layers: int
    biases: Tuple[str, ...] = ()

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        size = shape[0] // (2 * self.layers)
        given = [module for module in (self.k, self.v) if kind == "weight" or module in self.biases]
        return {f"{module.replace('{row}', str(row))}.{kind}": (size, *shape[1:]) for row in range(self.layers) for module in given}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        if len(tensors) == 2 * self.layers:
            return torch.cat(tensors)
        absent_first = self.k not in self.biases
        return torch.cat([part for tensor in tensors for part in ((torch.zeros_like(tensor), tensor) if absent_first else (tensor, torch.zeros_like(tensor)))])
