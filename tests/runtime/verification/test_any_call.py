"""The calls that a proof is about: sessions make no others, whatever was called before."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.runtime import load
from posenc_export.runtime.session.prefixes import Prefixes
from posenc_export.runtime.verification.any_call import AnyCall
from tests.cases import combinations
from tests.runtime.verification.test_indices import MASKS
from tests.tiny import attending, decoder
from tests.traces import exported

TOKENS = np.arange(1, 13)[None]


class Recorded:
    """A graph that keeps the inputs of each call."""

    def __init__(self, graph: Any) -> None:
        self.graph, self.inputs = graph, list[dict[str, np.ndarray]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)

    def bind(self, feeds: Any, states: Any, *rest: Any, **named: Any) -> Any:
        once = self.graph.bind(feeds, states, *rest, **named)

        def step() -> None:
            self._keep(feeds, states)
            once()

        return step

    def _keep(self, feeds: Any, states: Any) -> None:
        given = {name: np.array(array) for name, array in feeds.items()}
        past = {
            memory.state.past: memory.past.array[: math.prod(memory.before)].reshape(memory.before)
            if memory.state.grows
            else memory.past.array[memory.first : memory.first + memory.before[0]]
            for memory in states
        }
        past = {name: np.array(array) for name, array in past.items()}
        self.inputs.append(given | past)


def promised(call: AnyCall, inputs: dict[str, np.ndarray]) -> bool:
    """Return whether a proof is about a call with some inputs."""
    facts: list[Any] = []
    for name, array in inputs.items():
        tensor = call.tensors[name]
        facts += [size == n for size, n in zip(tensor.shape, array.shape, strict=True)]
        if name in call.integers:
            places = np.ndindex(array.shape)
            facts += [tensor.made(index) == array[index].item() for index in places]
    with call.solver.apart():
        return call.solver.model(*facts) is not None


@pytest.mark.parametrize(
    ("target", "signature", "mask"),
    combinations(["onnx", "onnx-static", "ort"], ["positions", "mask"], list(MASKS)),
)
def test_calls_of_sessions_are_among_those_of_a_proof(
    target: str, signature: str, mask: str, tmp_path: Path
) -> None:
    config = attending(decoder("rope", max_positions=80), sees=MASKS[mask])
    exported(tmp_path / "a", config, target, signature=signature)
    model = load(tmp_path / "a", threads=1)
    graph = model.graph = Recorded(model.graph)  # type: ignore[misc, assignment]
    session, prefixes = model.session(), Prefixes(graph, 8, size=4)
    session.prefill(TOKENS[:, :9])
    if not model.manifest.by_columns:
        session.share(0, TOKENS[0, :8].tolist(), prefixes)
        session.admit(TOKENS[:, :11], prefix=prefixes.find(TOKENS[0, :11].tolist()))
        assert prefixes.hits == 1
    rows = len(session.length)
    session.step(np.full(rows, 3))
    session.rewind(2)
    session.prefill(np.repeat(TOKENS[:, :5], rows, 0))
    assert len(graph.inputs) >= 3
    for inputs in graph.inputs:
        assert promised(AnyCall(model.manifest), inputs)
        inputs[next(name for name in inputs if name in AnyCall(model.manifest).integers)][...] = 99
        assert not promised(AnyCall(model.manifest), inputs)
