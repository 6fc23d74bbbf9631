"""Which calls of a graph are compared: cases, and the scenarios of each.

Shapes: B rows, L tokens of a sequence.
"""

import functools
import itertools
from typing import Iterator, Mapping

import numpy as np

from posenc_export.auditing.facts import Reference
from posenc_export.auditing.inputs import Interface
from posenc_export.runtime.verification.grid_inputs import numbers, uniform
from posenc_export.runtime.verification.scenarios import (
    Calls,
    Case,
    Cell,
    Pairs,
    Scenario,
    chunked,
    of_caches,
    padded_around,
    split,
    stepped_from,
)
from posenc_export.shared.numerics import worst_error
from posenc_export.shared.refusal import refusal

LENGTH, ROWS = 36, 3
FULL_PASS = "full pass"
FAR = 1000  # start of sequences that do not begin at position 0
BEYOND = 5  # tokens behind an edge
LONGEST = 4096  # tokens of a sequence that reaches an edge
WORK = 1 << 38  # pairs of queries and keys, times model width


def plan(
    interface: Interface, reference: Reference, quick: bool
) -> tuple[list[Cell], dict[str, str]]:
    """Return the cells of an audit, kinds of calls alone first, then those of several rows; and the
    edges that none of them reaches, by name, with the reason.
    """
    facts = reference.facts
    most = min(facts.positions, interface.capacity or facts.positions)
    length = interface.length if interface.length > 1 else LENGTH
    length = min(length, most)
    cells: list[Cell] = []
    lengths = [length] if length <= facts.whole or not facts.whole else [facts.whole, length]
    batches = (interface.batch,) if interface.batch else (1, ROWS)
    for size, rows in itertools.product(lengths, batches):
        cells += _cells(case_of(reference, rows, size, 0), interface, reference, quick)
    rows = interface.batch or 1
    if "position_ids" in interface.inputs and facts.causal and facts.starts:
        chosen = (FULL_PASS, "past middle, new 1", "steps", "left padding")
        last = facts.positions - length
        for start in sorted({1, min(FAR, last)}):  # within one range of positions
            if 0 < start <= last and not start < facts.whole < start + length:
                every = _cells(case_of(reference, rows, length, start), interface, reference, quick)
                cells += [cell for cell in every if cell.name.rpartition(": ")[2] in chosen]
    at_edges, unreached = _edges(interface, reference, rows, length, most)
    return cells + at_edges, unreached


def not_causal(got: str) -> ValueError:
    """Return the error for a reference that is not causal."""
    remedy = "add its causal mask, or give the model of this graph"
    return refusal("audit", "a causal reference", got, remedy)


def case_of(reference: Reference, rows: int, length: int, start: int) -> Case:
    """Return rows of tokens with the outputs of the reference, and another ending of both."""
    fork_at = length // 2
    tokens = _tokens(reference, (rows, length), "tokens")
    other = tokens.copy()
    other[:, fork_at:] = _tokens(reference, (rows, length - fork_at), "another ending")
    full, other_full = (reference.outputs(each, start) for each in (tokens, other))
    if not np.isfinite(full).all():
        got = f"NaN or infinity at {(~np.isfinite(full).all(-1)).sum()} of {rows * length} tokens"
        raise refusal("audit", "a reference with finite outputs", got, "check its weights")
    change = worst_error(other_full[:, :fork_at], full[:, :fork_at])
    if reference.facts.causal and change > reference.facts.tolerance:
        raise not_causal(f"one whose earlier outputs change by {change:.1e} with later tokens")
    return Case(tokens, full, [start] * rows, fork_at, other, other_full)


def of_call(interface: Interface, reference: Reference, call: Mapping[str, int]) -> Cell | None:
    """Return the cell of a counterexample (facts.Claim); None if it is too long to run."""
    count, past, length = call["S"], call["P"], call["end"] - call["padding"]
    facts, rows = reference.facts, interface.batch or 1
    if length > facts.positions or length**2 * facts.width > WORK:
        return None
    case = case_of(reference, rows, length, call["start"])
    tokens = np.zeros((rows, past + count, *case.tokens.shape[2:]), case.tokens.dtype)
    mask = np.zeros(tokens.shape[:2], np.int64)
    own = slice(call["padding"], call["end"])
    tokens[:, own], mask[:, own] = case.tokens, 1
    new = min(length, call["end"] - past)

    def run(session: Calls) -> Pairs:
        outputs = np.zeros(0)
        for part in (slice(0, past), slice(past, None))[past == 0 :]:
            how = {"attention_mask": mask[:, part], **case.beginning()}
            outputs = session.prefill(tokens[:, part], **how)
        last = call["end"] - past
        yield outputs[:, last - new : last], case.full[:, length - new :]

    words = {"tokens": count, "slots": past, "of padding": call["padding"], "start": call["start"]}
    return Cell("call of " + ", ".join(f"{name} {n}" for name, n in words.items()), run)


def _tokens(reference: Reference, shape: tuple[int, int], name: str) -> np.ndarray:
    facts = reference.facts
    if facts.vocabulary:
        return numbers(shape, name, facts.vocabulary)
    return uniform((*shape, facts.features), name).astype(np.float32)


def _cells(case: Case, interface: Interface, reference: Reference, quick: bool) -> Iterator[Cell]:
    (rows, length), start = case.tokens.shape[:2], case.starts[0]
    scenarios = [Scenario(FULL_PASS, split(0, length))]
    crosses = reference.facts.whole and start + length > reference.facts.whole
    if not reference.facts.causal or crosses:
        if rows == 1 or not crosses:  # rows on both sides of the edge share one set of angles
            alone = functools.partial(padded_behind, reference=reference)
            scenarios += [Scenario("rows padded behind", alone)]
        if "position_ids" in interface.inputs and not crosses:
            scenarios += [Scenario("left padding", padded_around)]
    else:
        if interface.caches:
            if rows == (interface.batch or 1) and not quick:
                scenarios += _of_lengths(length)
            scenarios += of_caches(length)
        else:
            for new in () if quick else (1, 2, length // 3, length - 1):
                scenarios.append(Scenario(f"prompt of {new}", split(0, new)))
            scenarios.append(Scenario("left padding", padded_around))
        scenarios.append(Scenario("rows padded behind", padded_behind))
    name = f"batch {rows}, start {start}"
    if length == reference.facts.whole:
        name = f"batch {rows}, {length} tokens"
    for scenario in scenarios:
        yield Cell(f"{name}: {scenario.name}", functools.partial(scenario.run, case=case))


def _of_lengths(length: int) -> Iterator[Scenario]:
    """Yield calls with several numbers of cached and new tokens: more than our own artefacts need,
    whose integer parts are proved.
    """
    for name, past in (("0", 0), ("1", 1), ("middle", length // 2)):
        for new in (1, 2, length // 3):
            if 0 < new <= length - past and (name, new) != ("middle", 1):
                yield Scenario(f"past {name}, new {new}", split(past, new))
    if length > 1:
        yield Scenario("past last, new 1", split(length - 1, 1))
    yield Scenario("chunks of 1", chunked(1))


def padded_behind(session: Calls, case: Case, reference: Reference | None = None) -> Pairs:
    """Prefill rows of different lengths with padding behind them; with a reference, compare with
    its outputs for each row alone.
    """
    rows, total = case.tokens.shape[:2]
    lengths = [max(1, total // 2 - 3 * row) for row in range(rows)]
    size = lengths[0] + 2
    mask = (np.arange(size) < np.array(lengths)[:, None]).astype(np.int64)
    outputs = session.prefill(case.tokens[:, :size], attention_mask=mask, **case.beginning())
    for row, length in enumerate(lengths):
        expected = case.full[row, :length]
        if reference is not None:
            tokens = case.tokens[row : row + 1, :length]
            expected = reference.outputs(tokens, case.starts[row])[0]
        yield outputs[row, :length], expected


def _edges(
    interface: Interface, reference: Reference, rows: int, reached: int, most: int
) -> tuple[list[Cell], dict[str, str]]:
    """Return the cells at edges beyond shorter sequences, and the edges that are too far."""
    facts, cells, unreached = reference.facts, [], {}
    edges = dict(facts.edges)
    if interface.capacity:
        edges[f"capacity {interface.capacity}"] = interface.capacity
    for name, at in edges.items():
        length = min(at + BEYOND, most)
        if at < reached - 2 or interface.length > 1:
            continue
        if length > LONGEST or length**2 * facts.width > WORK:
            unreached[name] = f"{length:,} tokens"
            continue
        case = case_of(reference, rows, length, 0)
        title, past = f"batch {rows}, {name}", max(1, at - 2)
        runs = {FULL_PASS: split(0, length), f"prompt of {at}": split(0, min(at, length))}
        if interface.caches and facts.causal and not facts.whole:
            runs |= {
                "steps across it": stepped_from(past),
                "a call across it": split(past, length - past),
                "chunks of 64": chunked(64),
            }
        for kind, run in runs.items():
            cells.append(Cell(f"{title}: {kind}", functools.partial(run, case=case)))
    return cells, unreached
