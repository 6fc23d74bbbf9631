"""Ruins of stages that bench.ruins plants by replacing one of their functions, but for those that
would give the graphs of bench.ruined_graphs.

A stage is the encoding's tables, the packer of weights, a lowering to the target's operators, or
the runtime, which gives the graph its inputs.
"""

import contextlib
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Iterator
from unittest import mock

import numpy as np
import torch

from bench.ruined_graphs import BLOCKED, FEW_BITS, FORMATS, NATIVE, ORIGINAL, WEIGHT
from posenc_export.encodings.rope_longrope import RoPELongRoPE
from posenc_export.export.targets import cached_attention, ort, weights
from posenc_export.export.targets.builder import Builder
from posenc_export.ops import graph
from posenc_export.runtime.artefact import graph_inputs

# Formats of target ort; other targets have lowering tables of their own.
ONE_TABLE = tuple(name for name in FORMATS if name not in ("float16", *NATIVE))
STORED_BLOCKS = ("int8-32", "int4", "int4-128", "keep")  # formats whose codes are packed in blocks


@dataclass(frozen=True)
class StageRuin:
    """A wrong stage."""

    name: str  # the stage and what is wrong
    model: str  # the decoder that is exported, a key of ruins.MODELS
    # Returns a context in which the stage is wrong for the given module.
    plant: Callable[[Any], ContextManager[Any]]
    formats: tuple[str, ...] = FORMATS  # formats in which it can be planted
    verifies: bool = False  # the stage runs when a published artefact is verified, too


def _results(owner: Any, name: str, change: Callable[..., Any]) -> Any:
    """Return a plant that changes the results of a function; `change` also gets its arguments."""

    def plant(_: Any) -> Any:
        right = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args: change(right(*args), *args))

    return plant


def _stored(suffix: str, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Change the arrays that the packer stores under names with a suffix."""
    right = Builder.weight

    def wrong(op: Any, name: str, array: Callable[[], np.ndarray], *dtype: Any) -> Any:
        if not name.endswith(suffix):
            return right(op, name, array, *dtype)
        return right(op, name, lambda: np.ascontiguousarray(change(array())), *dtype)

    return lambda _: mock.patch.object(Builder, "weight", wrong)


def _high_nibble_first(packed: np.ndarray, codes: np.ndarray, grid: Any) -> np.ndarray:
    return packed if grid.bits == 8 else packed >> 4 | (packed & 15) << 4


def _first_output_zero(packed: np.ndarray, codes: np.ndarray, grid: Any) -> np.ndarray:
    array = packed.copy()
    array[0] = 128 if grid.bits == 8 else 0x88
    return array


@contextlib.contextmanager
def _pairs_interleaved(module: Any) -> Iterator[None]:
    """Pair other entries in the rotations inside the attention operators."""

    def turned(node: Any) -> Any:
        kept = {name: getattr(node, name) for name in ("cos", "sin", "x")}
        return SimpleNamespace(**kept, interleaved=not node.interleaved)

    def of_both(nodes: Any, *_: Any) -> Any:
        return nodes and (turned(nodes[0]), turned(nodes[1]), nodes[2])

    with _results(cached_attention, "_rotation", of_both)(module):
        yield


def _without_far(rotated: Any, _: Any, q: Any, k: Any, positions: Any) -> Any:
    """Cache zeros in place of the entries of keys for queries beyond the original length."""
    near, far = rotated[1].tensor_split([k.size(3)], dim=3)
    return (rotated[0], torch.cat((near, far - far), dim=3)) if graph.emitting() else rotated


far_keys_unwritten = _results(RoPELongRoPE, "rotate", _without_far)


def _distances_short(distances: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """Let distances of more than 300 tokens be one shorter."""

    def wrong(op: Builder, node: Any) -> Any:
        steps = distances(op, node)
        return op.Add(steps, op.Cast(op.Less(steps, op.constant(-300, "float32")), to=1))

    return {graph.Distances: wrong}


def _input(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Change a graph input of the calls of a session, but not of its repeated steps."""
    row = graph_inputs.AFTER_TOKENS[name]

    def fill(tokens: graph_inputs.PaddedTokens) -> np.ndarray:
        assert row.fill is not None
        values = row.fill(tokens)
        return change(values).astype(values.dtype)

    changed = {name: replace(row, fill=fill)}
    return lambda _: mock.patch.dict(graph_inputs.AFTER_TOKENS, changed)


@contextlib.contextmanager
def _in_module(module: Any, suffix: str, change: Callable[[Any], None]) -> Iterator[None]:
    """Change a fixed number of the module itself, which is exported and compared."""
    tensors = [tensor for name, tensor in module.named_buffers() if name.endswith(suffix)]
    assert tensors, f"expected a buffer {suffix}"
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        change(tensor)
    try:
        yield
    finally:
        for tensor, numbers in zip(tensors, before, strict=True):
            tensor.copy_(numbers)


STAGE_RUINS = (
    StageRuin("tables: rows 400 to 431 of cos zero", "rope",
              lambda module: _in_module(module, "cos.rows", lambda t: t[400:432].zero_())),
    StageRuin("tables: slope of one head halved", "alibi",
              lambda module: _in_module(module, "slopes.rows", lambda t: t.view(-1)[1].div_(2))),
    StageRuin("packer: scales rolled by one output", "rope",
              _stored(f"{WEIGHT}.scales", lambda scales: np.roll(scales, 1, 0)), FEW_BITS),
    StageRuin("packer: zero points one lower", "rope",
              _stored(f"{BLOCKED}.zeros", lambda zeros: zeros ^ 1), ("int4", "int4-128")),
    StageRuin("packer: high nibble first", "rope",
              _results(weights, "packed_codes", _high_nibble_first),
              ("int4", "int4-128", "keep")),
    StageRuin("packer: first output of every weight zero", "rope",
              _results(weights, "packed_codes", _first_output_zero), STORED_BLOCKS),
    StageRuin("lowering: pairs interleaved", "rope",
              _pairs_interleaved),
    StageRuin("lowering: distances past 300 one shorter", "alibi",
              lambda _: mock.patch.dict(ort.LOWERING[0], _distances_short(ort.distances)),
              ONE_TABLE),
    StageRuin("lowering: long factors of keys never written", "longrope",
              far_keys_unwritten, ONE_TABLE),
    StageRuin("runtime: slots shifted from 300 cached tokens on", "rope",
              _input("seqlens_k", lambda last: last - (last > 300)), verifies=True),
    StageRuin("runtime: logits of the token before", "rope",
              _input("logits_index", lambda column: np.maximum(column - 1, 0)), verifies=True),
    StageRuin("runtime: other factors of LongRoPE a token late", "longrope",
              _input("position_ids", lambda place: place - (place == ORIGINAL)), verifies=True),
)  # fmt: skip
