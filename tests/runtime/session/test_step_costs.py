"""Costs of a step, as counts that do not depend on the load of the machine: nodes, operators,
Python calls, bindings, bytes.
"""

import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from posenc_export.runtime import Session, load
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.tiny import decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("rope")  # one worker, which traces the model once
LAYERS, VOCABULARY = 2, 61  # sizes of a decoder of tests.tiny
# Nodes of a layer on `ort`: GroupQueryAttention, 5 MatMul, 2 RMSNormalization, 2 Add, Sigmoid and 2
# Mul, none for the encoding.
LAYER = 13
ENCODINGS = [
    "rope",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("nope", "alibi")),
]
ATTENTION = "aten::scaled_dot_product_attention"
# Operators of torch in a step: before the first attention, from one attention to the next, after
# the last one with the conversion to numpy.
OPERATORS = {"torchscript": (41, 35, 21), "pt2": (43, 33, 21)}
# Python functions that a step calls. In torch, three of them and two built-in ones make a context
# of inference mode: sessions in several threads cannot share one.
PYTHON_CALLS = {"ort": 2, "onnx-static": 2, "onnx": 182, "torchscript": 11, "pt2": 105}
# Built-in functions that a step calls.
BUILT_IN_CALLS = {"ort": 6, "onnx-static": 6, "onnx": 100, "torchscript": 11, "pt2": 104}
COLD_CALLS = 60  # functions of the package that the first prefill of a session enters on ort
PASS_CALLS = 20  # Python functions that a pass of a few tokens calls on caches in place
SMALL = 1024  # most bytes of Python objects that a step allocates besides its output
IN_PLACE = ("ort", "onnx-static")


@pytest.fixture(scope="module")
def folders() -> Callable[..., Path]:
    """Return a function that gives the folder of an artefact."""
    return lambda target, encoding="rope": artefact(decoder(encoding), target)


def stepping(folder: Path, context: int = 20) -> Session:
    """Return a session after a prompt and its first steps."""
    session = load(folder, provider="cpu", threads=1).session()
    session.prefill(np.zeros((1, context), np.int64))
    for _ in range(3):
        session.step(np.zeros(1, np.int64))
    return session


def profiled(call: Callable[[], Any]) -> dict[str, int]:
    """Count the Python functions ("call") and built-in functions ("c_call") that a call enters."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    try:
        call()
    finally:
        sys.setprofile(None)
    return {
        "call": counts["call"] - 1,
        "c_call": counts["c_call"] - 1,
    }  # without `call` itself and sys.setprofile


def allocated(call: Callable[[], Any]) -> int:
    """Return the peak of additional bytes that Python and numpy allocate during a call, without
    the frame objects that a trace function, such as that of coverage, is given.
    """
    call()
    trace = sys.gettrace()
    sys.settrace(None)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        sys.settrace(trace)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_layer_has_few_nodes_on_ort(encoding: str, folders: Callable[..., Path]) -> None:
    graph = onnx.load(folders("ort", encoding) / "model.onnx", load_external_data=False).graph
    ends = [index for index, node in enumerate(graph.node) if node.op_type == "GroupQueryAttention"]
    assert len(ends) == LAYERS
    between = Counter(
        node.op_type for node in graph.node[ends[0] : ends[1]]
    )  # one layer lies between two attention nodes
    assert between.total() <= LAYER and between["GroupQueryAttention"] == 1


def operators(call: Callable[[], Any]) -> list[str]:
    """Return the operators of torch that a call runs, in order, without those that other
    operators call.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    outer = [
        event
        for event in profile.events()
        if event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")
    ]
    return [
        event.name
        for event in sorted(outer, key=lambda event: event.time_range.start)
        if event.name.startswith("aten::")
    ]


@pytest.mark.parametrize("target", OPERATORS)
def test_a_step_runs_few_operators_of_torch(target: str, folders: Callable[..., Path]) -> None:
    session, token = stepping(folders(target)), np.zeros(1, np.int64)
    result = operators(lambda: session.step(token))
    # Of the token, cosines and sines: layers share the look-up of table rows.
    assert result.count("aten::embedding") == 3
    first, last = (index for index, name in enumerate(result) if name == ATTENTION)
    assert all(
        count <= most
        for count, most in zip(
            (first, last - first, len(result) - last), OPERATORS[target], strict=True
        )
    )


@pytest.mark.parametrize("target", PYTHON_CALLS)
def test_a_step_enters_few_functions(target: str, folders: Callable[..., Path]) -> None:
    session, token = stepping(folders(target)), np.zeros(1, np.int64)
    result = profiled(lambda: session.step(token))
    assert result["call"] <= PYTHON_CALLS[target] and result["c_call"] <= BUILT_IN_CALLS[target]


@pytest.mark.parametrize("target", PYTHON_CALLS)
def test_the_functions_and_the_memory_of_a_step_do_not_grow_with_the_context(
    target: str, folders: Callable[..., Path]
) -> None:
    sessions = [stepping(folders(target), context) for context in (20, 200)]
    token = np.zeros(1, np.int64)
    short, long = (profiled(lambda one=session: one.step(token)) for session in sessions)  # type: ignore[misc]
    assert short == long
    few, many = (allocated(lambda one=session: one.step(token)) for session in sessions)  # type: ignore[misc]
    assert abs(many - few) <= SMALL


def test_the_first_prefill_of_a_session_enters_few_functions(folders: Callable[..., Path]) -> None:
    model, count = load(folders("ort"), provider="cpu", threads=1), 0
    session = model.session()

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and "posenc_export" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        session.prefill(np.zeros((1, 12), np.int64))
    finally:
        sys.setprofile(None)
    assert 0 < count <= COLD_CALLS


@pytest.mark.parametrize("target", IN_PLACE)
def test_steps_after_any_prefill_bind_nothing_again(
    target: str, folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, token = stepping(folders(target)), np.zeros((1, 1), np.int64)
    other = session.fork()
    session.prefill([[1, 2, 3, 4]], chunk=3)
    other.prefill([[1, 2, 3, 4]], chunk=3)
    expected = other.step(token[0])
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_input", None)
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_output", None)
    assert np.array_equal(session.step(token[0]), expected)


def test_a_graph_that_is_loaded_plans_the_memory_of_a_step_first(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, bind = [], OrtGraph._bind

    def note(graph: OrtGraph, feeds: Any, *rest: Any) -> Any:
        sizes.extend(array.shape for name, array in feeds.items() if name == "input_ids")
        return bind(graph, feeds, *rest)

    monkeypatch.setattr(OrtGraph, "_bind", note)
    load(folders("ort"), provider="cpu", threads=1)
    assert sizes == [(1, 1)]


@pytest.mark.parametrize("target", PYTHON_CALLS)
def test_a_prefill_of_one_token_is_a_step(target: str, folders: Callable[..., Path]) -> None:
    session, token = stepping(folders(target)), np.zeros((1, 1), np.int64)
    other = session.fork()
    session.prefill(token)
    result = profiled(lambda: session.prefill(token))
    assert result["call"] <= PYTHON_CALLS[target] + 6
    other.step(token[0])
    other.step(token[0])
    assert np.array_equal(session.prefill(token)[:, 0], other.step(token[0]))


@pytest.mark.parametrize("target", IN_PLACE)
def test_a_pass_of_a_few_tokens_is_bound_once(
    target: str, folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = stepping(folders(target))
    tokens = np.arange(4)[None]
    first = session.prefill(tokens)
    session.step(np.zeros(1, np.int64))
    session.rewind(5)
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_input", None)
    monkeypatch.setattr(onnxruntime.IOBinding, "bind_output", None)
    assert np.array_equal(session.prefill(tokens), first)
    result = profiled(lambda: session.prefill(tokens))
    assert result["call"] <= PASS_CALLS


@pytest.mark.parametrize("target", IN_PLACE)
def test_passes_of_a_few_tokens_between_steps_and_rewinds_give_what_one_prefill_gives(
    target: str, folders: Callable[..., Path]
) -> None:
    session = stepping(folders(target))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 40)
    session.rewind(int(session.length[0]))
    whole = session.fork().prefill(tokens[None])[0]
    session.prefill(tokens[None, :9])
    session.step(tokens[9:10])
    at = 10
    for count, back in ((3, 2), (8, 8), (3, 0), (1, 1), (2, 1), (8, 3), (5, 0)):
        output = (
            session.prefill(tokens[None, at : at + count])[0]
            if count > 1
            else session.step(tokens[at : at + 1])
        )
        assert worst_error(output, whole[at : at + count]) <= tolerance("float32", LAYERS, 64)
        session.rewind(back)
        at += count - back
    assert session.length[0] == at


def test_a_step_on_growing_caches_binds_each_input_and_output_once(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, bound = stepping(folders("onnx")), Counter()
    for name in ("bind_input", "bind_output"):
        original = getattr(onnxruntime.IOBinding, name)
        monkeypatch.setattr(
            onnxruntime.IOBinding,
            name,
            lambda *args, own=original: bound.update([args[1]]) or own(*args),
        )
    session.step(np.zeros(1, np.int64))
    manifest = session.manifest
    named = [value.name for value in (*manifest.inputs, *manifest.outputs)] + [
        name for state in manifest.states for name in (state.past, state.present)
    ]
    assert bound == Counter(named)


@pytest.mark.parametrize("target", IN_PLACE)
def test_a_step_makes_no_array_but_its_output(target: str, folders: Callable[..., Path]) -> None:
    session, token = stepping(folders(target)), np.zeros(1, np.int64)
    assert allocated(lambda: session.step(token)) <= 4 * VOCABULARY + SMALL
