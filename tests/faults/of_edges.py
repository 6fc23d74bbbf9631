"""Faults at edges far from the first position, planted in the stages of an export to target ort."""

import contextlib
import dataclasses
import functools
from typing import Any, Callable, ContextManager, Dict, Iterator, Tuple

import numpy as np
import onnx
from msgspec.structs import replace
from onnx import TensorProto, helper, numpy_helper

from posenc_export.export import TARGETS
from posenc_export.export.targets import ort_two_rotations
from posenc_export.models.config import StackConfig
from posenc_export.runtime.artefact import files
from tests import tiny

DATA = "model.onnx.data"
FURTHEST = 400  # distance from which T5 uses the last bucket
Change = Callable[[Any], None]  # changes a ModelProto in place


def seeing(sees: Any, config: StackConfig) -> StackConfig:
    """Return a stack whose layers see other keys."""
    layers = {
        name: replace(kind, attention=replace(kind.attention, sees=sees))
        for name, kind in config.layers.items()
    }
    return replace(config, layers=layers)


def encoded(spec: Any, **sizes: Any) -> StackConfig:
    """Return a decoder whose layers have another encoding."""
    config = tiny.decoder("rope", **sizes)
    layers = {
        name: replace(kind, attention=replace(kind.attention, encodings=(spec,)))
        for name, kind in config.layers.items()
    }
    return replace(config, layers=layers)


@contextlib.contextmanager
def _written(change: Change) -> Iterator[None]:
    """Context in which every graph of target ort is changed after it is written."""
    right = TARGETS["ort"]

    def write(*arguments: Any) -> Any:
        graph, folder = right.write(*arguments), arguments[2]
        model = onnx.load(folder / "model.onnx")
        change(model)
        (folder / DATA).unlink()
        onnx.save_model(
            model,
            folder / "model.onnx",
            save_as_external_data=True,
            location=DATA,
            size_threshold=1024,
        )
        written = {name: files.entry(folder / name) for name in graph.files}
        return dataclasses.replace(graph, files=written)

    TARGETS["ort"] = dataclasses.replace(right, write=write)
    try:
        yield
    finally:
        TARGETS["ort"] = right


@contextlib.contextmanager
def _second_cache_is_never_written() -> Iterator[None]:
    right = ort_two_rotations._scattered
    ort_two_rotations._scattered = lambda op, call, heads, slot: op.Identity(heads.past)
    try:
        yield
    finally:
        ort_two_rotations._scattered = right


def _window(change: Callable[[int], int]) -> Change:
    def edit(model: Any) -> None:
        attributes = [
            attribute
            for node in model.graph.node
            for attribute in node.attribute
            if attribute.name == "local_window_size"
        ]
        assert attributes, "expected windows, got none"
        for attribute in attributes:
            attribute.i = change(attribute.i)

    return edit


def _slot_one_early(depth: int) -> Change:
    """Let a step at `depth` cached tokens overwrite the last of them."""

    def edit(model: Any) -> None:
        graph = model.graph
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


def _clip(by: int) -> Change:
    def edit(model: Any) -> None:
        constants = {constant.name: constant for constant in model.graph.initializer}
        clips = [node for node in model.graph.node if node.op_type == "Clip"]
        assert clips, "expected clipped distances, got none"
        for index, node in enumerate(clips):
            least = numpy_helper.to_array(constants[node.input[1]])
            changed = numpy_helper.from_array((least + by).astype(least.dtype), f"least {index}")
            model.graph.initializer.append(changed)
            node.input[1] = changed.name

    return edit


def _border(by: int) -> Change:
    """Move the border of the last bucket, in the rows of biases by distance."""

    def edit(model: Any) -> None:
        (rows,) = (one for one in model.graph.initializer if list(one.dims[:1]) == [FURTHEST + 1])
        changed = numpy_helper.to_array(rows).copy()
        border = int((changed != changed[-1]).any(1).sum())
        if by > 0:
            changed[border] = changed[border - 1]
        else:
            changed[border - 1] = changed[border]
        rows.CopyFrom(numpy_helper.from_array(changed, rows.name))

    return edit


T5 = {"name": "t5", "max_distance": FURTHEST}
SHAW = {"name": "shaw", "left": 300}
WINDOW = seeing({"name": "window", "size": 1500}, tiny.decoder("rope", max_positions=2000))
FAULTS: Dict[str, Tuple[StackConfig, Callable[[], ContextManager[None]]]] = {
    **{
        f"window {what}": (WINDOW, functools.partial(_written, _window(change)))
        for what, change in (
            ("ignored", lambda size: -1),
            ("one long", lambda size: size + 1),
            ("one short", lambda size: size - 1),
        )
    },
    "second cache never written": (
        encoded({"name": "rope_longrope", "original_max_positions": 300}),
        _second_cache_is_never_written,
    ),
    "border of the last bucket one late": (
        encoded(T5),
        functools.partial(_written, _border(1)),
    ),
    "border of the last bucket one early": (
        encoded(T5),
        functools.partial(_written, _border(-1)),
    ),
    "clip distance one long": (encoded(SHAW), functools.partial(_written, _clip(-1))),
    "clip distance one short": (encoded(SHAW), functools.partial(_written, _clip(1))),
    **{
        f"slot shifted in a step at {depth} cached tokens": (
            tiny.decoder("rope"),
            functools.partial(_written, _slot_one_early(depth)),
        )
        for depth in (256, 300)
    },
}
