"""The audit of a graph: inputs, cells, errors, and one sentence."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple, Union

import numpy as np

from posenc_export.auditing.answer import CAUSES, Answer, answer
from posenc_export.auditing.exact import Exact
from posenc_export.auditing.facts import Reference
from posenc_export.auditing.finding import interface
from posenc_export.auditing.graph import COUNTS_ROWS, Graph
from posenc_export.auditing.hypotheses import explained
from posenc_export.auditing.inputs import Interface, read_file
from posenc_export.auditing.observing import Observed, observe
from posenc_export.auditing.plan import LENGTH, ROWS, Plan, case_of, plan
from posenc_export.auditing.program import SUFFIX, Program
from posenc_export.auditing.reference import open_reference
from posenc_export.auditing.repeat import program
from posenc_export.auditing.session import ForeignSession
from posenc_export.auditing.slots import TAGS
from posenc_export.export.conditioning import TRIES
from posenc_export.runtime.verification.proof import Accuracy, rounded_up
from posenc_export.shared.numerics import (
    BFLOAT16_NOISE,
    FLOAT16_NOISE,
    LIMIT,
    PEAK,
    SAFETY,
    UNIT_ROUNDOFF,
    rounding_tolerance,
    worst_error,
)
from posenc_export.shared.progress import Progress, silent

# Allowed error per position: of angles that are computed in float32, as most libraries do.
ANGLES = 4 * UNIT_ROUNDOFF["float32"]
SHORT, NAMING = 8, 48  # tokens of sequences from which a fault is named
HALVES = {"float16": FLOAT16_NOISE, "bfloat16": BFLOAT16_NOISE}


@dataclass(frozen=True)
class AuditedCell:
    """One way to call the graph.

    Args:
        name: batch, start and scenario.
        status: "right", "wrong", "refused" if the graph failed, or "not possible" if its inputs
            cannot express the calls.
        error: largest error, relative to the largest output; 0 if nothing was compared.
        tolerance: largest error of a right graph.
        first: index of the first wrong token of a sequence; -1 if none is wrong.
        message: why it is refused or not possible.
    """

    name: str
    status: str
    error: float = 0.0
    tolerance: float = 0.0
    first: int = -1
    message: str = ""


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Args:
        verdict: "right", "wrong", or "refused" if the graph fails in a call that its inputs can
            express, and is right in all others.
        sentence: which calls are wrong, and what they have in common.
        cause: a key of answer.CAUSES, or a named fault; empty if nothing is wrong.
        cells: in the order in which they were measured.
        inputs: rows of the table of inputs: "name", "type", "meaning".
        unreached: edges of the reference that no cell reached, with the reason.
        observed: the error of each compared token.
        program: source of a program that repeats the first wrong token with onnxruntime and numpy;
            empty if none is wrong.
    """

    verdict: str
    sentence: str
    cause: str
    cells: Tuple[AuditedCell, ...]
    inputs: Tuple[Dict[str, str], ...]
    unreached: Mapping[str, str]
    observed: Observed
    program: str = ""

    @property
    def right(self) -> bool:
        """Whether every call that the inputs can express ran and is right."""
        return self.verdict == "right"

    def as_json(self) -> Dict[str, Any]:
        """Return everything but the errors of single tokens, for JSON."""
        cells = [asdict(cell) for cell in self.cells]
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "cause": self.cause,
            "cells": cells,
            "inputs": list(self.inputs),
            "unreached": dict(self.unreached),
        }


def audit(
    graph: Union[str, Path],
    reference: Any,
    inputs: Union[str, Path, Mapping[str, Any], None] = None,
    quick: bool = False,
    progress: Progress = silent,
) -> Audit:
    """Compare a graph that others exported with a reference, in every kind of call that its inputs
    can express.

    Args:
        graph: ONNX file of a decoder, an encoder or a block; or a program of torch.export (.pt2).
        reference: checkpoint folder, GGUF file or folder of an artefact; "transformers:FOLDER";
            "package.module:name" of a torch.nn.Module or of a function that returns one; or a
            module.
        inputs: what inputs mean whose names say nothing: a file, or its content (inputs.read_file).
        quick: run one scenario of each kind of call.
        progress: called with one line of text at each stage.

    Raises:
        ValueError: ONNX Runtime does not load the graph, an input has no clear meaning, or there is
            no such reference.
    """
    return Auditor(graph, reference, inputs, progress).run(quick)


class Auditor:
    """An audit with all that it opened, by which single cells can be repeated."""

    def __init__(self, graph: Any, reference: Any, inputs: Any, progress: Progress) -> None:
        self.path, self.say = Path(graph), progress
        self.graph = Program(self.path) if self.path.suffix == SUFFIX else Graph(self.path)
        given = inputs if isinstance(inputs, Mapping) else read_file(inputs) if inputs else {}
        counts = bool(self.graph.operators & COUNTS_ROWS)
        self.interface: Interface = interface(
            self.graph.inputs, self.graph.outputs, 0, given, counts, self.graph.unread
        )
        progress("audit: loading the reference")
        hidden, vocabulary, features = self._read()
        self.reference: Reference = open_reference(reference, hidden, vocabulary, features)
        width = self.interface.output.axes[-1]
        if isinstance(width, int) and width != self.reference.facts.width:  # the name says nothing
            self.reference = open_reference(reference, not hidden, vocabulary, features)
        facts, noise = self.reference.facts, HALVES.get(self.graph.precision, 0.0)
        self.accuracy = Accuracy(facts.tolerance)
        if self.graph.precision == "few bits":
            self.accuracy = Accuracy(LIMIT, LIMIT)
        elif noise:
            self.accuracy = Accuracy(rounding_tolerance(noise), noise)

    def _read(self) -> Tuple[bool, int, int]:
        """Return whether hidden states come out, and the vocabulary or width that goes in."""
        tokens, output = self.interface.tokens, self.interface.output
        hidden = "logits" not in output.name
        features = 0
        if "input_ids" not in self.interface.inputs:
            axis = tokens.axes[-1]
            features = axis if isinstance(axis, int) else 0
        return hidden, 0 if features else 32, features

    def session(self, keep: bool = False) -> ForeignSession:
        """Return an empty session on the graph."""
        window = self.reference.facts.window
        return ForeignSession(self.graph.run, self.interface, window, keep)

    def run(self, quick: bool) -> Audit:
        """Measure all cells."""
        self.say("audit: computing the outputs of the reference")
        planned = plan(self.interface, self.reference, quick)
        self.say(f"audit: running {len(planned.cells)} cells")
        width = self.reference.facts.width
        observed = observe(self.session(), planned.cells, self.accuracy, width)
        limit = self.limits(observed)
        reply = answer(observed, limit, self.reference.facts.edges)
        if reply.cause and _largest(observed, limit) < LIMIT:
            limit = np.minimum(limit * self._conditioned(), LIMIT)
            reply = answer(observed, limit, self.reference.facts.edges)
        reply = self._named(reply)
        cells = self._cells(planned, observed, limit)
        verdict, sentence = self._verdict(reply, cells)
        rows, repeated = tuple(self.interface.rows()), ""
        if reply.first >= 0 and isinstance(self.graph, Graph):
            columns = observed.columns
            numbers = (columns["row"], columns["index"], limit)
            cell = observed.names[int(columns["cell"][reply.first])]
            wrong = next(each for each in planned.cells if each.name == cell)
            token = [float(array[reply.first]) for array in numbers]
            repeated = program(self.session(keep=True), wrong, token, self.path)
        return Audit(
            verdict,
            sentence,
            reply.cause,
            tuple(cells),
            rows,
            planned.unreached,
            observed,
            repeated,
        )

    def _conditioned(self) -> float:
        """Return the factor, at least 1, by which the weights of the reference enlarge rounding
        errors (export/conditioning.py).
        """
        facts = self.reference.facts
        length = min(LENGTH, facts.positions, self.interface.length or LENGTH)
        case = case_of(self.reference, 1, length, 0)
        others = (self.reference.disturbed(seed) for seed in range(TRIES))
        change = max(
            worst_error(other.outputs(case.tokens), case.full) if other else 0.0 for other in others
        )
        return max(1.0, SAFETY * change / facts.tolerance)

    def _named(self, reply: Answer) -> Answer:
        """Return the answer with the fault, if the outputs of a full pass show which one it is."""
        if reply.features == ("row",):
            case = case_of(self.reference, ROWS, SHORT, 0)
            outputs = self.session().prefill(case.tokens)[..., :-TAGS]
            if np.array_equal(outputs[0], outputs[-1]):
                return reply.named("copied row", CAUSES["copied row"])
        if reply.features or not isinstance(self.reference, Exact) or not reply.cause:
            return reply
        most = min(self.reference.facts.positions, self.interface.capacity or NAMING)
        length = self.interface.length or min(NAMING, most)
        case = case_of(self.reference, self.interface.batch or 1, length, 0)
        outputs = self.session().prefill(case.tokens)[..., :-TAGS]
        tolerance = self.accuracy.tolerance
        fault = explained(self.reference, case.tokens, outputs, tolerance)
        return reply if fault is None else reply.named(fault.cause, fault.words)

    def limits(self, observed: Observed) -> np.ndarray:
        """Return the largest error of each token if the graph is right [N]."""
        columns, tolerance = observed.columns, self.accuracy.tolerance
        if self.accuracy.rounds:
            tolerance *= PEAK
        position = columns["start"] + columns["index"]
        allowed = tolerance + ANGLES * self.reference.facts.depth * position
        return np.minimum(allowed, max(LIMIT, tolerance)) / 1.05

    def _cells(self, planned: Plan, observed: Observed, limit: np.ndarray) -> List[AuditedCell]:
        """Return what became of each cell."""
        cells, columns = [], observed.columns
        place = {name: index for index, name in enumerate(observed.names)}
        for cell in planned.cells:
            name = cell.name
            if name in observed.impossible:
                cells.append(AuditedCell(name, "not possible", message=observed.impossible[name]))
            elif name in observed.failures:
                cells.append(AuditedCell(name, "refused", message=observed.failures[name]))
            else:
                own = columns["cell"] == place[name]
                errors, limits, index = columns["error"][own], limit[own], columns["index"][own]
                wrong = ~(errors <= limits)
                first = int(index[wrong].min()) if wrong.any() else -1
                status = "wrong" if wrong.any() else "right"
                error, bound = rounded_up(errors.max(initial=0)), float(limits.max(initial=0))
                cells.append(AuditedCell(name, status, error, bound, first))
        return cells

    def _verdict(self, reply: Answer, cells: List[AuditedCell]) -> Tuple[str, str]:
        """Return the verdict and its sentence."""
        counts = {
            status: [cell for cell in cells if cell.status == status]
            for status in ("right", "wrong", "refused", "not possible")
        }
        ran = len(counts["right"]) + len(counts["wrong"])
        if counts["wrong"]:
            return "wrong", f"{reply.sentence} ({len(counts['wrong'])} of {ran} cells)"
        if refused := counts["refused"]:
            message = refused[0].message.rpartition("Status Message: ")[2]  # of ONNX Runtime
            said = f"{len(refused)} of {ran + len(refused)}, such as '{refused[0].name}': {message}"
            return "refused", f"right in {ran} cells; the graph fails in {said}"
        more = ""
        if impossible := counts["not possible"]:
            reasons = sorted({cell.message for cell in impossible})
            more = f"; {len(impossible)} cells are not possible: {'; '.join(reasons)}"
        if not ran:
            return "refused", f"no cell is possible{more}"
        return "right", f"right in {ran} cells{more}"


def _largest(observed: Observed, limit: np.ndarray) -> float:
    """Return the largest error of a wrong token."""
    errors = observed.columns["error"]
    return float(errors[~(errors <= limit)].max(initial=0))
