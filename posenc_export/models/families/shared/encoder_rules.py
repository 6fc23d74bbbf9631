"""Further rules for weight tables of encoders and of encoder-decoder models."""

from dataclasses import dataclass
from typing import Dict, List, Tuple

import torch
from torch import Tensor

from posenc_export.models.config import AttentionConfig
from posenc_export.models.families.shared.rules import Shape


@dataclass(frozen=True)
class PlusRow:
    """A table with a row vector added to each row, for models with a single token type (RoBERTa).

    Args:
        module: module of the table in the checkpoint.
        row: module of the table with one row.
    """

    module: str
    row: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape, f"{self.row}.{kind}": (1, *shape[1:])}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0] + tensors[1]


@dataclass(frozen=True)
class Biases:
    """Bias of a packed projection from separate biases of queries and values; keys get 0 (DeBERTa).

    Args:
        q, v: full names of the tensors in the checkpoint.
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
    """A table of zeros, for models without that table.

    Args:
        rows, columns: sizes of the table.
    """

    rows: int
    columns: int

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.zeros(self.rows, self.columns)


@dataclass(frozen=True)
class NoBias:
    """A bias of zeros over all query heads, for models without that bias."""

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return torch.zeros(config.heads * config.head_size)


@dataclass(frozen=True)
class NormalisedRows:
    """A table after LayerNorm over each row, for models that normalise rows when they read them (DeBERTa-v2).

    Args:
        table, norm: names of the modules in the checkpoint.
        epsilon: epsilon of the norm.
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
    """Concatenation of projections of queries, keys and values from tensors [E,heads,D] (XLNet).

    Args:
        q, k, v: full names of the tensors in the checkpoint.
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
    """An output projection from a tensor [E,heads,D] (XLNet).

    Args:
        name: full name of the tensor in the checkpoint.
    """

    name: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: (shape[0], config.heads, config.head_size)}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].flatten(1)


@dataclass(frozen=True)
class Permuted:
    """A tensor with permuted axes.

    Args:
        name: full name of the tensor in the checkpoint.
        axes: axes of that tensor in our order, as for torch.permute.
    """

    name: str
    axes: Tuple[int, ...]

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {self.name: tuple(shape[self.axes.index(axis)] for axis in range(len(shape)))}

    def form(self, tensors: List[Tensor], config: AttentionConfig) -> Tensor:
        return tensors[0].permute(self.axes).contiguous()


@dataclass(frozen=True)
class KeysAndValues:
    """Concatenation of the cross-attention projections of all layers of a decoder: keys and values of the first layer, of the second, and so on.

    Args:
        k, v: names of the modules in the checkpoint; `{row}` is replaced by the layer of the decoder.
        layers: number of layers of the decoder.
        biases: which of k and v have a bias; a missing bias is 0.
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
