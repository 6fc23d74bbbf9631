"""Exports and loads leave the state of the process as it was: generators, loggers, filters of
warnings, threads of torch, models in other threads.
"""

import concurrent.futures
import logging
import threading
import warnings
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch

from posenc_export.encodings import Geometry, build
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.randomness import drawn_from
from posenc_export.models.short_forms import block_config
from posenc_export.ops.graph import semantic_graph
from posenc_export.runtime import load
from posenc_export.runtime.graphs.quiet import quiet
from posenc_export.runtime.graphs.torch_graph import limited

BLOCK = block_config(16, 2, 32, encoding={"name": "alibi"})


@pytest.fixture(autouse=True)
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def state() -> dict[str, Any]:
    """Return the state of the process that torch shares between its users."""
    levels = {
        name: logger.level
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {
        "levels": levels,
        "filters": list(warnings.filters),
        "threads": torch.get_num_threads(),
        "generator": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("target", ["ort", "torchscript", "pt2"])
def test_an_export_and_a_verified_load_leave_the_process_as_it_was(
    target: str, tmp_path: Path
) -> None:
    before = state()
    export(seeded(BLOCK), target, tmp_path / "artefact", verify=False)
    session = load(tmp_path / "artefact", provider="cpu", threads=1).session()
    session.prefill(np.zeros((1, 3, 16), np.float32))
    session.step(np.zeros((1, 16), np.float32))
    assert state() == before


def test_seeded_weights_are_those_after_manual_seed_and_leave_the_generator_as_it_was() -> None:
    torch.manual_seed(5)
    wanted, following = type(seeded(BLOCK))(BLOCK).state_dict(), torch.rand(3)
    torch.manual_seed(5)
    result = seeded(BLOCK, 5).state_dict()
    assert all(torch.equal(result[name], wanted[name]) for name in wanted)
    type(seeded(BLOCK))(BLOCK)
    assert torch.equal(torch.rand(3), following)


def test_an_eager_model_computes_while_another_thread_traces() -> None:
    rope = build({"name": "rope"}, Geometry(16, 2, 8, 32))
    heads = torch.randn(2, 1, 4, 2, 8)
    places = torch.arange(4)[None]
    expected = rope.rotate(*heads, places)
    with semantic_graph(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(rope.rotate, *heads, places).result()
    assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))


def in_turn(context: Callable[[], Any]) -> None:
    """Let two threads enter a context one after the other, and leave it in the same order, if it
    lets both in.
    """
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with context():
            first_in.set()
            second_in.wait(0.05)
        first_out.set()

    def second() -> None:
        first_in.wait()
        with context():
            second_in.set()
            first_out.wait()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(first), pool.submit(second)]:
            one.result()


def test_two_threads_that_silence_torch_restore_the_filters_and_levels() -> None:
    before = state()
    in_turn(lambda: quiet(Warning, logger="torch.onnx"))
    assert state() == before


def test_two_threads_that_build_seeded_weights_restore_the_generator() -> None:
    before = state()
    in_turn(lambda: drawn_from(1))
    assert state() == before


def test_a_graph_with_one_thread_leaves_those_of_a_thread_that_began_meanwhile() -> None:
    inside, leave = threading.Event(), threading.Event()
    slow = limited(lambda: (inside.set(), leave.wait()), 1)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as one,
        concurrent.futures.ThreadPoolExecutor(1) as other,
    ):
        running = one.submit(slow)
        inside.wait()
        assert other.submit(limited(torch.get_num_threads, 1)).result() == 1
        leave.set()
        running.result()
        assert [pool.submit(torch.get_num_threads).result() for pool in (one, other)] == [2, 2]
    assert torch.get_num_threads() == 2
