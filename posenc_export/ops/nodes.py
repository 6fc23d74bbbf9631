"""Semantic graphs. Inside `semantic_graph()`, each operation of core.py emits one node of the `posenc` domain instead of computing."""

import contextlib
from contextvars import ContextVar
from typing import Dict, Iterator, List, Optional

import torch
from torch import Tensor

DOMAIN = "posenc"
_emitting = ContextVar("emitting", default=False)  # not a global, so that models that run in other threads compute during an export


@contextlib.contextmanager
def semantic_graph() -> Iterator[None]:
    """Make the operations of core.py emit nodes within the context, in this thread."""
    token = _emitting.set(True)
    try:
        yield
    finally:
        _emitting.reset(token)


@torch.jit.unused
def emitting() -> bool:
    """Return whether operations emit nodes in this thread."""
    return _emitting.get()


@torch.jit.unused
def node(name: str, inputs: List[Optional[Tensor]], attributes: Dict[str, float], like: Tensor, shape: List[int]) -> Tensor:
    """Emit a node and return its output, with the dtype of `like`."""
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{name}", inputs, {**attributes}, dtype=like.dtype, shape=shape, version=1)
