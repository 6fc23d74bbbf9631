"""Semantic graphs. Inside `semantic_graph()`, each operation of ops.py emits one node of the `posenc` domain instead of computing."""

import contextlib
from typing import Dict, Iterator, List, Optional

import torch
from torch import Tensor

DOMAIN = "posenc"
_emitting = [False]


@contextlib.contextmanager
def semantic_graph() -> Iterator[None]:
    """Make the operations of ops.py emit nodes within the context."""
    _emitting[0] = True
    try:
        yield
    finally:
        _emitting[0] = False


@torch.jit.unused
def emitting() -> bool:
    """Return whether operations emit nodes."""
    return _emitting[0]


@torch.jit.unused
def node(name: str, inputs: List[Optional[Tensor]], attributes: Dict[str, float], like: Tensor, shape: List[int]) -> Tensor:
    """Emit a node and return its output, with the dtype of `like`."""
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", inputs, {**attributes}, dtype=like.dtype, shape=shape, version=1)
