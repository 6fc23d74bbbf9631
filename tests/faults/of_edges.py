"""Faults at edges far from the first position, planted in the stages of an export to target ort."""

import functools
from typing import Any, Callable, ContextManager

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from bench.ruined_graphs import Graph, attention
from bench.ruined_stages import far_keys_unwritten
from bench.ruins import exporting
from posenc_export.models.config import StackConfig
from tests import tiny

FURTHEST = 150  # distance from which T5 uses the last bucket


def _slot_one_early(depth: int) -> Callable[[Graph], None]:
    """Let a step at `depth` cached tokens overwrite the last of them."""

    def edit(graph: Graph) -> None:
        graph.initializer.append(numpy_helper.from_array(np.array(depth, np.int32), "depth"))
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                node.input[5] = "shifted"
        for node in (
            helper.make_node("Sub", ["seqlens_k", "one"], ["shifted"]),
            helper.make_node("Cast", ["at_depth"], ["one"], to=TensorProto.INT32),
            helper.make_node("Equal", ["seqlens_k", "depth"], ["at_depth"]),
        ):
            graph.node.insert(0, node)

    return edit


def _clip(by: int) -> Callable[[Graph], None]:
    def edit(graph: Graph) -> None:
        constants = {constant.name: constant for constant in graph.initializer}
        clips = [node for node in graph.node if node.op_type == "Clip"]
        assert clips, "expected clipped distances, got none"
        for index, node in enumerate(clips):
            least = numpy_helper.to_array(constants[node.input[1]])
            changed = numpy_helper.from_array((least + by).astype(least.dtype), f"least {index}")
            graph.initializer.append(changed)
            node.input[1] = changed.name

    return edit


def _border(by: int) -> Callable[[Graph], None]:
    """Move the border of the last bucket, in the rows of biases by distance."""

    def edit(graph: Graph) -> None:
        (rows,) = (one for one in graph.initializer if list(one.dims[:1]) == [FURTHEST + 1])
        changed = numpy_helper.to_array(rows).copy()
        border = int((changed != changed[-1]).any(1).sum())
        if by > 0:
            changed[border] = changed[border - 1]
        else:
            changed[border - 1] = changed[border]
        rows.CopyFrom(numpy_helper.from_array(changed, rows.name))

    return edit


def _exporting(plant: Callable[[Graph], None]) -> Callable[[], ContextManager[None]]:
    return functools.partial(exporting, "ort", plant)


def encoded(name: str, **parameters: Any) -> StackConfig:
    """Return a decoder whose layers have this encoding."""
    return tiny.attending(tiny.decoder("rope"), encodings=({"name": name, **parameters},))


T5, SHAW = encoded("t5", max_distance=FURTHEST), encoded("shaw", left=120)
LONG = tiny.decoder("rope", max_positions=1000)
WINDOW = tiny.attending(LONG, sees={"name": "window", "size": 700})
FAULTS: dict[str, tuple[StackConfig, Callable[[], ContextManager[None]]]] = {
    **{
        f"window {what}": (WINDOW, _exporting(attention("local_window_size", change)))
        for what, change in (
            ("ignored", lambda _: None),
            ("one long", lambda size: size + 1),
            ("one short", lambda size: size - 1),
        )
    },
    "long factors of keys never written": (
        encoded("rope_longrope", original_max_positions=150),
        lambda: far_keys_unwritten(None),
    ),
    "border of the last bucket one late": (T5, _exporting(_border(1))),
    "border of the last bucket one early": (T5, _exporting(_border(-1))),
    "clip distance one long": (SHAW, _exporting(_clip(-1))),
    "clip distance one short": (SHAW, _exporting(_clip(1))),
    **{
        f"slot shifted in a step at {depth} cached tokens": (
            tiny.decoder("rope"),
            _exporting(_slot_one_early(depth)),
        )
        for depth in (256, 300)
    },
}
