"""How a module's weight and bias are made of those of a checkpoint: the rules that tables of families are written in.

A rule has `shapes`, what the checkpoint must hold for one parameter, and `form`, the parameter from it.
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
        """Names and shapes in the checkpoint for our parameter of `kind` "weight" or "bias" and this shape."""

    def form(self, tensors: List[Tensor]) -> Tensor:
        """Our parameter, from tensors in the order of `shapes`."""


Table = Mapping[str, Rule]


@dataclass(frozen=True)
class Same:
    """Another name.

    Args:
        module: in the checkpoint; {layer} stands for the layer.
    """

    module: str

    def shapes(self, kind: str, shape: Shape, config: AttentionConfig) -> Dict[str, Shape]:
        return {f"{self.module}.{kind}": shape}

    def form(self, tensors: List[Tensor]) -> Tensor:
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

    def form(self, tensors: List[Tensor]) -> Tensor:
        return torch.cat(tensors)


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

    def form(self, tensors: List[Tensor]) -> Tensor:
        return tensors[0].chunk(self.parts)[self.index]
