"""Faults of artefacts of target ort: in the inputs and outputs of the graph, and in its file, those
of bench.ruined_graphs among them.
"""

from typing import Any, Callable, Sequence

import numpy as np

from bench.ruined_graphs import FEW_BITS, NATIVE, RUINS, Ruin, attention, constants, slopes
from posenc_export.runtime.session.caches import Feeds, StateMemory
from tests.faults.planting import Fault

ChangeInputs = Callable[[Feeds], Feeds]
ChangeOutput = Callable[[np.ndarray], np.ndarray]
ChangeGraph = Callable[[Any], Any]


class ChangedGraph:
    """A graph whose inputs and outputs are changed at every call
    (runtime.session.caches.Graph).
    """

    def __init__(self, graph: Any, inputs: ChangeInputs, output: ChangeOutput) -> None:
        self.graph, self.inputs, self.output = graph, inputs, output
        self.manifest, self.provider, self.device = graph.manifest, graph.provider, graph.device

    def bind(
        self, feeds: Feeds, states: Sequence[StateMemory], outputs: Feeds, once: bool = False
    ) -> Callable[[], object]:
        def run() -> None:
            changed = {
                name: np.ascontiguousarray(array)
                for name, array in self.inputs(dict(feeds)).items()
            }
            self.graph.bind(changed, states, outputs, once)()
            for result in outputs.values():
                result[...] = self.output(result)

        return run


def _inputs(change: ChangeInputs) -> ChangeGraph:
    return lambda graph: ChangedGraph(graph, change, lambda output: output)


def _output(change: ChangeOutput) -> ChangeGraph:
    return lambda graph: ChangedGraph(graph, lambda feeds: feeds, change)


def _later_by_one(feeds: Feeds) -> Feeds:
    """Later calls see one key less: the last cached token is overwritten."""
    if feeds["input_ids"].shape[1] == 1:
        feeds["seqlens_k"] = np.maximum(feeds["seqlens_k"] - 1, 0)
    return feeds


def _logits_of_the_token_before(feeds: Feeds) -> Feeds:
    feeds["logits_index"] = np.maximum(feeds["logits_index"] - 1, 0)
    return feeds


def _lengths_of_the_first_row(feeds: Feeds) -> Feeds:
    feeds["seqlens_k"] = np.full_like(feeds["seqlens_k"], feeds["seqlens_k"][0])
    return feeds


def _one_nan(output: np.ndarray) -> np.ndarray:
    result = output.copy()
    result[-1, ..., -1] = np.nan
    return result


def _off(rows: np.ndarray) -> np.ndarray:
    """sin table [M,D/2] with the second frequency 1 % too high."""
    result = rows.copy()
    angles = np.arange(len(rows)) * 1.01 * 10000.0 ** (-1 / rows.shape[1])
    result[:, 1] = np.sin(angles)
    return result


def _of_model(ruin: Ruin) -> Callable[[Any], None]:
    return lambda model: ruin.plant(model.graph)


UNSEEN = (  # outputs do not show these, or a range of 96 tokens does not reach them
    "one weight off by one unit in the last place",
    "cache scale of one channel doubled",
    "rows 400 to 431 of the cos table zero",
    "slots shifted from 256 cached tokens on",
    "slots shifted from 300 cached tokens on",
    "long factors of keys never written",
)
GRAPHS: dict[str, ChangeGraph] = {
    "the last cached token is overwritten": _inputs(_later_by_one),
    "logits of the token before": _inputs(_logits_of_the_token_before),
    "all rows have the length of the first": _inputs(_lengths_of_the_first_row),
    "zeros": _output(np.zeros_like),
    "one number is NaN": _output(_one_nan),
}
FILES = (
    Ruin("rotation reversed", "rope", constants("sin.rows", np.negative)),
    Ruin("one frequency 1 % off", "rope", constants("sin.rows", _off)),
    Ruin("other layout of rotary pairs", "rope", attention("rotary_interleaved", lambda _: 1)),
    Ruin("keys and queries not rotated", "rope", attention("do_rotary", lambda _: 0)),
    Ruin("scores scaled twice", "rope", attention("scale", lambda scale: scale**2)),
    Ruin("slopes doubled", "alibi", slopes(lambda rows: 2 * rows)),
    Ruin("slopes of the heads exchanged", "alibi", slopes(lambda rows: rows[::-1])),
    Ruin("scales 10 % too large", "rope", constants(".scales", lambda x: 1.1 * x), FEW_BITS),
    *(ruin for ruin in RUINS if ruin.name not in UNSEEN and ruin.formats != NATIVE),
)
FORMATS = {ruin.name: ruin.formats for ruin in FILES}
FAULTS = {
    **{name: Fault(name, "graph", plant, "rope", "ort") for name, plant in GRAPHS.items()},
    **{ruin.name: Fault(ruin.name, "file", _of_model(ruin), ruin.model, "ort") for ruin in FILES},
}
