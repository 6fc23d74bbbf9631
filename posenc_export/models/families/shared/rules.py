"""Rules that form parameters of our models from tensors of a checkpoint.

A rule is given names of modules in the checkpoint, to which the last component of our parameter's
name is added ("weight" or "bias"). `{layer}` in a name is replaced by the index of the layer.
"""

from dataclasses import dataclass
from typing import Callable, Dict, List, Mapping

import torch
from torch import Tensor

from posenc_export.models.config import AttentionConfig
from posenc_export.models.tensor_files import Shape

# Our names of the modules of a layer.
OURS = "layers.{layer}."
QKV = OURS + "attention.projection.qkv"
Shapes = Callable[[str, Shape, AttentionConfig], Dict[str, Shape]]


@dataclass(frozen=True)
class Rule:
    """An entry of the weight table of a family."""

    # Names and shapes of the tensors that the checkpoint must hold, from the last component of our
    # parameter's name, the parameter's shape and the attention of its layer.
    shapes: Shapes
    # Our parameter, from tensors in the order of `shapes` and the attention of the layer.
    form: Callable[[List[Tensor], AttentionConfig], Tensor] = lambda tensors, attention: tensors[0]


Table = Mapping[str, Rule]


def _of_module(module: str) -> Shapes:
    return lambda kind, shape, attention: {f"{module}.{kind}": shape}


def same(module: str) -> Rule:
    """The same tensor in a module of another name."""
    return Rule(_of_module(module))


def joined(q: str, k: str, v: str) -> Rule:
    """Concatenation of separate projections of queries, keys and values."""

    def shapes(kind: str, shape: Shape, attention: AttentionConfig) -> Dict[str, Shape]:
        of_queries = (attention.heads * attention.head_size, *shape[1:])
        of_keys = (attention.kv_heads * attention.head_size, *shape[1:])
        return {f"{q}.{kind}": of_queries, f"{k}.{kind}": of_keys, f"{v}.{kind}": of_keys}

    return Rule(shapes, lambda tensors, attention: torch.cat(tensors))
