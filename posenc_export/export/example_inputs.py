"""Example inputs for tracing, and their dynamic axes."""

from typing import Any, Dict, Tuple

import torch
from torch import Tensor

from posenc_export.runtime.artefact.graph_inputs import B, M, P, Q, R, S, T
from posenc_export.runtime.artefact.manifest import Axis, Manifest

# No 0 or 1, which torch.export would fix; T = P + S columns fit into M slots.
SIZES = {B: 2, S: 5, P: 3, T: 8, M: 9, Q: 6, R: 4}


def trace_inputs(manifest: Manifest, slots: str = P) -> Tuple[Tuple[Any, ...], Tuple[Any, ...]]:
    """Return example arguments of the signature's forward and their dynamic axes. Encoder inputs
    follow the caches. slots: the axis of caches, for every target. Semantic operations append to
    caches with axis P.
    """
    values = [(_own(manifest, value.dtype), value.axes) for value in manifest.inputs]
    states = []
    for state in manifest.states:
        states.append((state.dtype, tuple(slots if axis == M else axis for axis in state.axes)))
    if any(state.past == "past_positions" for state in manifest.states):
        values.append(states.pop(0))
    states += [(_own(manifest, value.dtype), value.axes) for value in manifest.encoder]
    arguments, shapes = ([part(*value) for value in values] for part in (_example, _dynamic))
    caches, dynamic = ([part(*state) for state in states] for part in (_example, _dynamic))
    return (*arguments, caches), (*shapes, dynamic)


def _own(manifest: Manifest, dtype: str) -> str:
    """Return the dtype of the module itself; a graph may be passed another one."""
    return manifest.dtype if dtype == manifest.passed_dtype else dtype


def _example(dtype: str, axes: Tuple[Axis, ...]) -> Tensor:
    sizes = [SIZES[axis] if isinstance(axis, str) else axis for axis in axes]
    return torch.ones(sizes, dtype=getattr(torch, dtype))


def _dynamic(_: str, axes: Tuple[Axis, ...]) -> Dict[int, str]:
    return {index: axis for index, axis in enumerate(axes) if isinstance(axis, str)}
