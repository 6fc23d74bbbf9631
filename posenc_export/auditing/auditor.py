"""The audit of a graph: inputs, cells, errors, and one sentence."""

import contextlib
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from posenc_export.auditing import confined, repeat
from posenc_export.auditing.answer import (
    CAUSES,
    Answer,
    Audit,
    AuditedCell,
    Columns,
    Observed,
    answer,
    observe,
)
from posenc_export.auditing.confined import SECONDS
from posenc_export.auditing.facts import Claim, Reference
from posenc_export.auditing.graph import COUNTS_ROWS
from posenc_export.auditing.inputs import Interface, NotPossible, NotUnrounded, given, interface_of
from posenc_export.auditing.plan import LENGTH, ROWS, case_of, not_causal, of_call, plan
from posenc_export.auditing.reference import Exact, open_reference
from posenc_export.auditing.rounding import Loss, Rounding, accuracy_of, loss, rounding_of
from posenc_export.auditing.session import TAGS, ForeignSession
from posenc_export.export.expected import TRIES, disturbed
from posenc_export.export.hypotheses import NEAR, Hypothesis, explained
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification.checks import SOLVER
from posenc_export.runtime.verification.proof import Accuracy, check_tolerance
from posenc_export.runtime.verification.scenarios import Cell
from posenc_export.shared import numerics
from posenc_export.shared.numerics import LIMIT
from posenc_export.shared.progress import Progress, silent
from posenc_export.shared.refusal import refusal
from posenc_export.shared.tables import counted

LARGEST = 1 << 30  # numbers of the outputs of one call
# Allowed error per position: of angles that are computed in float32, as most libraries do.
ANGLES = 4 * numerics.UNIT_ROUNDOFF["float32"]
MOST_SHIFT = 2  # of positions that is tried
# What is shown of the call of a counterexample, in words.
SHOWN = {"S": "new tokens", "P": "cached tokens", "padding": "padding", "start": "start"}
STATUS = ("proved", "refuted", "not proved")  # of claims
SHORT, NAMING = 8, 48  # tokens of sequences from which a fault is named


def audit(
    graph: str | Path,
    reference: Any,
    inputs: str | Path | Mapping[str, Any] | None = None,
    quick: bool = False,
    progress: Progress = silent,
    seconds: float = SECONDS,
    tolerance: float | None = None,
) -> Audit:
    """Compare a graph that others exported with a reference, in every kind of call that its inputs
    can express.

    Args:
        graph: ONNX file of a decoder, an encoder or a block; a program of torch.export (.pt2); or
            the folder that an exporter wrote.
        reference: checkpoint folder or GGUF file; a module, or a function of token ids or hidden
            states.
        inputs: what inputs mean whose names say nothing: a file, or its content (inputs.Given).
        quick: run one scenario of each kind of call.
        progress: called with one line of text at each stage.
        seconds: that the process which runs the graph of a file may take for all calls
            (confined.py).
        tolerance: error that is accepted in the graph's own precision, relative to the largest
            output; by default, what its format explains.

    Raises:
        ValueError: the graph is not loaded, its process ends or takes longer, an input has no clear
            meaning, or there is no such reference.
    """
    check_tolerance(tolerance)
    return Auditor(graph, reference, inputs, progress, seconds, tolerance).run(quick)


class Auditor:
    """An audit with all that it opened, by which single cells can be repeated."""

    def __init__(
        self,
        graph: Any,
        reference: Any,
        inputs: Any,
        progress: Progress,
        seconds: float = SECONDS,
        tolerance: float | None = None,
    ) -> None:
        self.say, self.tolerance = progress, tolerance
        self.cells: list[AuditedCell] = []  # measured so far
        self.program = ""  # of Audit
        self.path, self.graph = confined.opened(graph, seconds)
        self.interface: Interface
        self.reference: Reference
        self.rounding: Rounding | None = None
        self.joined = ""  # why structure and rounding are not apart
        self._read_graph(reference, inputs)
        self.accuracy = accuracy_of(self.graph.precision, self.reference.facts.tolerance)
        if self.graph.rounded:
            self.say("audit: looking for the numbers of the graph in the reference")
            try:
                self.rounding = rounding_of(self.graph, self.reference)
            except NotUnrounded as reason:
                self.joined = f"; structure and rounding are not apart: {reason}"
            else:
                self.reference = self.rounding.reference
                exact = self.reference.facts.tolerance
                self.accuracy = accuracy_of(self.rounding.compared, exact)
        if self.tolerance is not None and self.rounding is None:
            self.accuracy = Accuracy(self.tolerance, fixed=True)

    def _read_graph(self, reference: Any, inputs: Any) -> None:
        """Find out what the inputs of a graph mean, and open the reference."""
        graph, counts, said = self.graph, bool(self.graph.operators & COUNTS_ROWS), given(inputs)
        self.interface = interface_of(graph.inputs, graph.outputs, said, counts, graph.unread)
        self.say("audit: loading the reference")
        hidden = "logits" not in self.interface.output.name
        ids = "input_ids" in self.interface.inputs
        axis = self.interface.tokens.axes[-1]
        reads = (32 if ids else 0, axis if isinstance(axis, int) and not ids else 0)
        self.reference = open_reference(reference, hidden, *reads)
        if self.interface.caches and not self.reference.facts.causal:
            got = "one whose earlier outputs change with later tokens, for a graph with caches"
            raise not_causal(got)
        first, width = self.reference.facts.width, (None, *self.interface.output.axes)[-1]
        tokens = (self.interface.batch or 1) * max(self.interface.length, LENGTH)
        if tokens * first > LARGEST:
            rule = f"calls with at most {LARGEST // first:,} tokens of the reference"
            raise refusal("audit", rule, f"{tokens:,}", "export it with smaller or open axes")
        if not isinstance(width, int):
            try:
                width = self._full_pass(self.interface.batch or 1, SHORT)[1].shape[-1]
            except (GraphError, NotPossible):  # the cells will say so
                width = first
        if width != first:  # the name of the output says nothing
            self.reference = open_reference(reference, not hidden, *reads)
        if width != self.reference.facts.width:
            rule = f"a graph with {first} numbers for a token, as the reference has"
            got = f"{self.interface.output.name} with {width}"
            raise refusal("audit", rule, got, "give the reference of this graph")

    def _full_pass(self, rows: int, most: int, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens of rows of at most some length, or the fixed one, and outputs of a call."""
        length = self.interface.length or min(self.interface.capacity or most, most)
        tokens = case_of(self.reference, rows, length, 0).tokens
        return tokens, self.session().prefill(tokens, start=start)[..., :-TAGS]

    def session(self, keep: bool = False, own: bool = False) -> ForeignSession:
        """Return an empty session on the graph: its float32 form, if it has one, unless `own`."""
        if own or self.rounding is None:
            return ForeignSession(self.graph.run, self.interface, keep)
        return ForeignSession(self.rounding.form.run, self.interface.wide(), keep)

    def _compared(self, cells: Sequence[Cell], accuracy: Accuracy, own: bool = False) -> Observed:
        """Measure cells. own: as of `session`."""
        return observe(self.session(own=own), cells, partial(self.limits, accuracy))

    def run(self, quick: bool) -> Audit:
        """Measure all cells."""
        self.say("audit: computing the outputs of the reference")
        cells, unreached = plan(self.interface, self.reference, quick)
        self.say(f"audit: running {len(cells)} cells")
        compared, lost = self._compared(cells, self.accuracy), None
        worst = compared.columns["error"][compared.wrong].max(initial=0)
        if 0 < worst < LIMIT and not self.accuracy.fixed:
            limit = np.minimum(compared.limit * self._conditioned(), LIMIT)
            compared = replace(compared, limit=limit)
        own, edges = compared, self.reference.facts.edges
        reply = answer(compared, edges)
        if fault := self._fault(reply):
            reply = replace(reply, cause=fault.cause, words=fault.words)
        self.cells += compared.audited()
        (verdict, sentence), cause = verdict_of(reply, self.cells), reply.cause
        sentence += self.joined
        if verdict == "right" and self._ignores_positions():
            sentence += f"; {CAUSES['positions ignored']}: right for consecutive positions only"
        if (rounding := self.rounding) is not None:
            self.say("audit: running the cells in the graph's own precision")
            own, of_own, lost = self._in_own_precision(rounding, cells, quick)
            self.cells += of_own
            reply = answer(own, edges)
            if verdict == "wrong" and rounding.strange:
                cause, sentence = "weights", f"wrong: {rounding.strange}"
            elif verdict == "right":
                (verdict, said), cause = verdict_of(reply, of_own), reply.cause
                rounded = f"structure {sentence}; {rounding.words}: {lost}"
                apart = f"structure right; in its own precision {said}"
                sentence = rounded if verdict == "right" else apart
        self.program = self._repeated(own, reply.first)
        claims = self._claims()
        found, rows = self._with_claims(verdict, sentence, cause, claims), self.interface.rows()
        return Audit(*found, self.cells, rows, unreached, compared, lost, claims, self.program)

    def _claims(self) -> list[Claim]:
        """Return what is proved of an ONNX graph at every length, refuted by a call that runs here
        and is wrong, or neither.
        """
        if find_spec(SOLVER) is None:
            how = f"{SOLVER} is not installed here; pip install 'posenc-export[prove]'"
            return [Claim("calls", "not proved", how)]
        self.say("audit: proving positions and masks at every length")
        try:
            claims = self.graph.prove(self.interface, self.reference.facts)
        except ValueError as error:  # the graph's process ended
            return [Claim("calls", "not proved", str(error))]
        doubts: dict[str, str] = {}  # by call
        for index, claim in enumerate(claims):
            if claim.status == "refuted":
                call = str([claim.call[name] for name in ("S", "P", "padding", "end", "start")])
                if call not in doubts:
                    doubts[call] = self._doubt(claim.call)
                if doubts[call]:
                    text = f"{claim.text}, but {doubts[call]}"
                    claims[index] = replace(claim, status="not proved", text=text)
        return list(claims)

    def _doubt(self, call: Mapping[str, int]) -> str:
        """Run the call that refutes a claim. Return why it does not, or empty."""
        cell = of_call(self.interface, self.reference, call)
        if cell is None:
            return "the call is too long to run here"
        compared = self._compared([cell], self.accuracy)
        if (shorter := self._error_before(call)) > 0:  # as a shorter call is right
            exact = max(self.accuracy.tolerance, numerics.SAFETY * shorter)
            compared = replace(compared, limit=np.minimum(compared.limit, exact))
        (own,), wrong = compared.audited(), compared.wrong
        self.cells.append(own)
        if own.status not in ("wrong", "refused"):
            return f"the call shows no error ({own.error:.1e})"
        first = int(np.argmax(wrong)) if wrong.any() else -1  # none if the graph fails
        self.program = self._repeated(compared, first) or self.program
        return ""

    def _error_before(self, call: Mapping[str, int]) -> float:
        """Return the largest error of one call of all tokens but the last of a counterexample; 0 if
        there is none.
        """
        count = call["P"] + call["S"] - 1
        if count <= call["padding"] or self.interface.length:
            return 0.0
        before = {**call, "S": count, "P": 0, "end": min(call["end"], count)}
        cell = of_call(self.interface, self.reference, before)
        assert cell is not None  # shorter than one that is run
        errors = self._compared([cell], self.accuracy).columns["error"]
        return float(errors.max(initial=0.0))

    def _with_claims(
        self, verdict: str, sentence: str, cause: str, claims: list[Claim]
    ) -> tuple[str, str, str]:
        """Return verdict, sentence and cause with what the solver says."""
        by = {status: [c for c in claims if c.status == status] for status in STATUS}
        if refuted := by["refuted"]:
            first, call = refuted[0], refuted[0].call
            sizes = ", ".join(f"{words} {call[n]}" for n, words in SHOWN.items() if call[n])
            where = f"in the call with {sizes}, {first.text}"
            of_mask = first.name.startswith("keys")
            if verdict == "wrong":
                # Modules declare no windows: a claim on keys may name another fault.
                if self.reference.facts.sees or not of_mask:
                    sentence = f"{sentence}; the smallest wrong call: {where}"
                return verdict, sentence, cause
            said = f"wrong {where}, although {sentence}"
            return "wrong", said, "visibility" if of_mask else "positions"
        if verdict == "wrong" or not claims:
            return verdict, sentence, cause
        if proved := len(by["proved"]):
            most = self.reference.facts.positions
            of = counted(len(claims), "claim")
            of = f"{proved} of {of}" if by["not proved"] else of
            sentence += f"; {of} on masks and positions proved for all calls of up to {most} tokens"
        if by["not proved"]:
            reasons = dict.fromkeys(f"{c.name}: {c.text}" for c in by["not proved"])
            sentence += f"; not proved: {'; '.join(reasons)}"
        return verdict, sentence, cause

    def _in_own_precision(
        self, rounding: Rounding, planned: Sequence[Cell], quick: bool
    ) -> tuple[Observed, list[AuditedCell], Loss | None]:
        """Return what was compared of the graph as it is, and the loss."""
        accuracy = accuracy_of(self.graph.precision, self.reference.facts.tolerance)
        if self.tolerance is not None:
            planned, _ = plan(self.interface, rounding.original, quick)
            accuracy = Accuracy(self.tolerance, fixed=True)
        compared, kind = self._compared(planned, accuracy, own=True), rounding.format
        cells = [replace(cell, name=f"in {kind}, {cell.name}") for cell in compared.audited()]
        length = self.interface.length or min(LENGTH, self.interface.capacity or LENGTH)
        case = case_of(rounding.original, self.interface.batch or ROWS, length, 0)
        error, logits = max(cell.error for cell in cells), "logits" in self.interface.output.name
        with contextlib.suppress(GraphError, NotPossible):  # the cells say so
            outputs = self.session(own=True).prefill(case.tokens)[..., :-TAGS]
            return compared, cells, loss(outputs, case.full, logits, kind, error)
        return compared, cells, None

    def _repeated(self, compared: Observed, first: int) -> str:
        """Return the program that repeats the first wrong token, or empty."""
        numbers = compared.columns["cell"]
        if first < 0 or not len(numbers):
            return ""
        begin = int(np.argmax(numbers == numbers[first]))
        wrong = compared.cells[int(numbers[first])]
        again, limit = self.session(keep=True, own=True), float(compared.limit[first])
        return repeat.program(again, wrong, first - begin, limit, self.path, self.graph)

    def _conditioned(self) -> float:
        """Return the factor by which the reference's weights enlarge rounding errors, or 1."""
        facts = self.reference.facts
        length = min(LENGTH, facts.positions, self.interface.length or LENGTH)
        case = case_of(self.reference, 1, length, 0)
        factors = [1.0]
        for seed in range(TRIES) if self.reference.model is not None else ():
            other = self.reference.changed(partial(disturbed, seed=seed))
            change = numerics.worst_error(other.outputs(case.tokens), case.full)
            factors.append(numerics.SAFETY * change / facts.tolerance)
        return max(factors)

    def _fault(self, reply: Answer) -> Hypothesis | None:
        """Return the fault, if the outputs of a full pass show which one it is."""
        if reply.features == ("row",):
            _, outputs = self._full_pass(self.interface.batch or ROWS, SHORT)
            if np.array_equal(outputs[0], outputs[-1]):
                return Hypothesis("copied row", CAUSES["copied row"])
        if reply.features and self._counts_slots():
            return Hypothesis("positions ignored", CAUSES["positions ignored"])
        if reply.features or not reply.cause:
            return None
        if shift := self._shift():
            return Hypothesis("positions shifted", f"all positions are {shift} too large")
        if not isinstance(self.reference, Exact):
            return None
        most = min(self.reference.facts.positions, NAMING)
        try:
            tokens, outputs = self._full_pass(self.interface.batch or 1, most)
        except NotPossible:
            return None
        models, expected = self.reference.faulty(tokens.shape[1]), self.reference.outputs(tokens)
        return explained(models, expected, tokens, outputs, self.accuracy.tolerance)

    def _shift(self) -> int:
        """Return by how much all positions are too large, if that explains the outputs of a full
        pass; otherwise 0.
        """
        facts, most = self.reference.facts, NEAR * self.accuracy.tolerance
        with contextlib.suppress(GraphError, NotPossible):
            tokens, outputs = self._full_pass(self.interface.batch or 1, SHORT)
            last = min(MOST_SHIFT, facts.positions - tokens.shape[1])
            if facts.starts and outputs.shape[1] == tokens.shape[1]:
                for shift in range(last + 1):
                    if numerics.worst_error(outputs, self.reference.outputs(tokens, shift)) <= most:
                        return shift
        return 0

    def _counts_slots(self) -> bool:
        """Return whether the graph gives equal outputs for position_ids from two starts, although
        the outputs of the reference differ. If the reference has biases, which are rounded
        differently at each start, only a difference above the tolerance counts.
        """
        if "position_ids" not in self.interface.inputs:
            return False
        rows, starts = self.interface.batch or 1, (0, self.interface.length or SHORT)
        (tokens, first), (_, moved) = (self._full_pass(rows, SHORT, start) for start in starts)
        right, other = (self.reference.outputs(tokens, start) for start in starts)
        least = self.accuracy.tolerance if self.reference.facts.biased else 0.0
        return np.array_equal(first, moved) and numerics.worst_error(right, other) > least

    def _ignores_positions(self) -> bool:
        """Return whether position_ids in reverse give the same outputs."""
        if "position_ids" not in self.interface.inputs:
            return False
        session, name = self.session(), self.interface.inputs["position_ids"].name
        turned = ForeignSession(
            lambda f: session.run({**f, name: f[name][..., ::-1].copy()}), session.interface
        )
        with contextlib.suppress(GraphError, NotPossible):
            tokens, outputs = self._full_pass(self.interface.batch or 1, SHORT)
            other = turned.prefill(tokens)[..., :-TAGS]
            return tokens.shape[1] > 1 and np.array_equal(outputs, other)
        return False

    def limits(self, accuracy: Accuracy, columns: Columns) -> np.ndarray:
        """Return the largest error of each token if the graph is right [N]."""
        tolerance = accuracy.tolerance
        if accuracy.fixed:
            return np.full(len(columns["error"]), tolerance)
        if accuracy.rounds:
            tolerance *= numerics.PEAK
        position = columns["start"] + columns["index"]
        allowed = tolerance + ANGLES * self.reference.facts.depth * position
        return np.minimum(allowed, max(LIMIT, tolerance)) / 1.05


def verdict_of(reply: Answer, cells: list[AuditedCell]) -> tuple[str, str]:
    """Return the verdict on cells, and its sentence."""
    status = ("right", "wrong", "refused", "not possible")
    counts = {name: [cell for cell in cells if cell.status == name] for name in status}
    ran = len(counts["right"]) + len(counts["wrong"])
    if counts["wrong"]:
        return "wrong", f"{reply.sentence} ({len(counts['wrong'])} of {counted(ran, 'cell')})"
    if refused := counts["refused"]:
        message = refused[0].message.rpartition("Status Message: ")[2]  # of ONNX Runtime
        said = f"{len(refused)} of {ran + len(refused)}, such as '{refused[0].name}': {message}"
        right = f"right in {counted(ran, 'cell')}" if ran else "could not be compared"
        return "refused", f"{right}; the graph fails in {said}"
    more = ""
    if impossible := counts["not possible"]:
        reasons = sorted({cell.message for cell in impossible})
        count = len(impossible)
        verb = "is" if count == 1 else "are"
        more = f"; {counted(count, 'cell')} {verb} not possible: {'; '.join(reasons)}"
    if not ran:
        return "refused", f"could not be compared: no cell is possible{more}"
    return "right", f"right in {counted(ran, 'cell')}{more}"
