"""What an audit finds: errors of single tokens, with the call in which each was read, and one
sentence from them: which calls are wrong, from where on, and what that has in common.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import msgspec
import numpy as np

from posenc_export.auditing.facts import LIMITED, Claim
from posenc_export.auditing.inputs import NotPossible
from posenc_export.auditing.rounding import Loss
from posenc_export.auditing.session import TAGS, ForeignSession
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification.proof import rounded_up
from posenc_export.runtime.verification.scenarios import Cell

# What is known of each compared token, one number each.
COLUMNS = (
    "cell", "row", "rows", "index", "start", "new", "past", "before", "padding", "behind", "error",
)  # fmt: skip
# What distinguishes a call from one full pass of a row alone from position 0, in the order in which
# causes are looked for: a column of which more than a number says so, words for such calls in a
# sentence ("calls that ...").
FEATURES = {
    "row": ("rows", 1, "have several rows"),
    "cache": ("before", 0, "read a cache"),
    "behind": ("behind", 0, "have padding behind the tokens"),
    "padding": ("padding", 0, "have padding before the tokens"),
    "offset": ("start", 0, "do not start at position 0"),
}
# Causes, by the feature that all wrong calls have; without one, by the first wrong token.
CAUSES = {
    "row": "a row of a batch differs from the same row alone",
    "cache": "tokens read from the cache differ from those of a full pass",
    "behind": "padding behind the tokens of a row changes their outputs",
    "mask": "padding changes the outputs of tokens, before them and behind them",
    "padding": "padding before the tokens of a row changes their outputs: it is seen, or counted",
    "offset": "the position of the first token changes outputs by rotation, mask or bias otherwise "
    "than in the reference",
    "positions ignored": "position_ids change nothing",
    "copied row": "a row is a copy of the first row of the batch",
    "window": "the graph differs where a window of the reference ends",
    "length": "the graph differs where the computation of the reference changes",
    "capacity": "tokens read from the cache differ from this length on, as if it held no more",
    "angles": "small errors behind the first tokens, as of angles in float16 or float32",
    "half precision": "errors of the size of float16, the first token included",
    "attention": "attention differs, as by another rotation, layout, theta or scale",
    "everywhere": "the first token is wrong, too, as by other weights, norms or embeddings",
    "position": "something that depends on the position or the length",
    "not finite": "outputs are NaN or infinite",
}
OTHERS = 0.02  # part of right tokens that may be beyond a threshold, right by chance
WRITTEN = "verdict sentence cause cells inputs unreached claims loss".split()  # as JSON
SMALL = 2e-2  # largest error that rounding to half precision explains
SUDDEN = 30  # times the error of the token before, of the first wrong one
Columns = dict[str, np.ndarray]  # numbers of COLUMNS [N] by token


@dataclass(frozen=True)
class AuditedCell:
    """One way to call the graph."""

    name: str  # batch, start and scenario
    # "right", "wrong", "refused" if the graph failed, "not possible" if inputs cannot express it
    status: str
    error: float = 0.0  # largest error, relative to the largest output; 0 if nothing was compared
    tolerance: float = 0.0  # largest error of a right graph
    first: int = -1  # index of the first wrong token of a sequence; -1 if none is wrong
    message: str = ""  # why it is refused or not possible


@dataclass(frozen=True)
class Observed:
    """The compared tokens of cells."""

    cells: Sequence[Cell]
    columns: Columns  # "cell" counts `cells`
    failures: dict[str, str]  # message of the graph for each cell in which it failed
    impossible: dict[str, str]  # what the inputs of the graph cannot express, by cell
    limit: np.ndarray  # largest error of each token if the graph is right [N]

    @property
    def wrong(self) -> np.ndarray:
        """Which tokens are wrong [N]."""
        return ~(self.columns["error"] <= self.limit)

    def audited(self) -> list[AuditedCell]:
        """Return what was found of each cell."""
        return [self._audited(number, cell.name) for number, cell in enumerate(self.cells)]

    def _audited(self, number: int, name: str) -> AuditedCell:
        own = self.columns["cell"] == number
        if name in self.failures:
            return AuditedCell(name, "refused", message=self.failures[name])
        if name in self.impossible or not own.any():
            why = self.impossible.get(name, "no output was compared")
            return AuditedCell(name, "not possible", message=why)
        wrong = self.columns["index"][own & self.wrong]
        status, first = ("wrong", int(wrong.min())) if len(wrong) else ("right", -1)
        error, limit = self.columns["error"][own].max(), float(self.limit[own].max())
        return AuditedCell(name, status, rounded_up(error), limit, first)


def observe(
    session: ForeignSession, cells: Sequence[Cell], limits: Callable[[Columns], np.ndarray]
) -> Observed:
    """Run cells, and keep each token's error relative to the largest output of the reference.
    limits: gives Observed.limit.
    """
    parts: list[np.ndarray] = []
    failures, impossible = dict[str, str](), dict[str, str]()
    for number, cell in enumerate(cells):
        session.reset()
        try:
            for actual, expected in cell.pairs(session):
                parts.append(_tokens(session, number, actual, expected))
        except NotPossible as error:
            impossible[cell.name] = str(error)
        except GraphError as error:
            failures[cell.name] = str(error)
    table = np.concatenate([np.zeros((len(COLUMNS), 0)), *parts], axis=1)
    table = table[:, [cells[int(number)].name not in impossible for number in table[0]]]
    columns = dict(zip(COLUMNS, table, strict=True))
    return Observed(cells, columns, failures, impossible, limits(columns))


def _tokens(
    session: ForeignSession, cell: int, actual: np.ndarray, expected: np.ndarray
) -> np.ndarray:
    """Return COLUMNS [11,n] of the tokens of a pair."""
    values, tags = actual[..., :-TAGS], actual[..., -TAGS:].reshape(-1, TAGS).astype(np.int64)
    scale = float(np.abs(expected).max(initial=0)) or 1.0
    difference = np.abs(values.astype(np.float64) - expected[..., : values.shape[-1]])
    errors = np.nan_to_num(difference.max(-1).ravel() / scale, nan=np.inf, posinf=np.inf)
    table = np.zeros((len(COLUMNS), len(tags)))
    for column, ((row, index, number), error) in enumerate(zip(tags, errors, strict=True)):
        call, at = session.calls[number], row if row < session.calls[number].rows else 0
        table[:, column] = (
            cell, row, call.rows, index, call.start[at], call.new, call.past, call.before[at],
            call.padding[at], call.behind[at], error,
        )  # fmt: skip
    return table


@dataclass(frozen=True)
class Answer:
    """What the errors of a graph have in common."""

    where: str = "right"  # or which calls are wrong, from where on
    cause: str = ""  # a key of CAUSES, or of a hypothesis; empty if the graph is right
    first: int = -1  # place of the first wrong token among the compared ones; -1 if none is wrong
    features: tuple[str, ...] = ()  # of the calls that are wrong
    words: str = ""  # of a hypothesis

    @property
    def sentence(self) -> str:
        return f"{self.where}: {self.words or CAUSES[self.cause]}" if self.cause else self.where


def answer(observed: Observed, edges: Mapping[str, int]) -> Answer:
    """Return what is wrong. edges: of the reference, by name."""
    table, wrong = observed.columns, observed.wrong
    if not wrong.any():
        return Answer()
    # What every call has, such as several rows in a graph of two rows, explains nothing.
    has = {name: table[column] > least for name, (column, least, _) in FEATURES.items()}
    has = {name: flags for name, flags in has.items() if not flags.all()}
    chosen, features = _simplest(has, wrong)
    group = {name: numbers[chosen] for name, numbers in table.items()}
    bad = wrong[chosen]
    cause = _cause(features, group, bad, _threshold(group, bad)[1], edges)
    if features == ("behind",) and "padding" in has and _kind(has, ("padding",))[wrong].any():
        cause = "mask"
    # Of all calls with these features, as the cells are: others of them may be wrong earlier.
    with_them = np.all([np.ones(len(wrong), bool), *(has[name] for name in features)], axis=0)
    covered = {name: numbers[with_them] for name, numbers in table.items()}
    where, _ = _threshold(covered, wrong[with_them])
    rest, others = wrong & ~with_them, "; right in all others"
    if features:
        calls = "calls that " + " and ".join(FEATURES[name][2] for name in features)
        if rest.any():
            others = f" and from position {int(table['index'][rest].min())} on in other calls"
    else:
        reach = table["index"] >= table["index"][wrong].min()
        every = {*table["cell"][reach]} == {*table["cell"][wrong]}
        calls, others = "every call" if every else "some calls, the simplest among them", ""
    first = int(np.argmax(chosen & wrong))
    return Answer(f"wrong {where} in {calls}{others}", cause, first, features)


def _simplest(
    has: Mapping[str, np.ndarray], wrong: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the tokens of the simplest kind of call that is wrong, and its features."""
    for count in range(len(has) + 1):
        for features in itertools.combinations(has, count):
            kind = _kind(has, features)
            if (kind & wrong).any():
                return kind, features
    raise AssertionError("a wrong token has some features")


def _kind(has: Mapping[str, np.ndarray], features: Sequence[str]) -> np.ndarray:
    """Return which tokens have these features and no others."""
    kinds = [flags == (name in features) for name, flags in has.items()]
    return np.asarray(np.all(kinds, axis=0))


def _threshold(group: Mapping[str, np.ndarray], bad: np.ndarray) -> tuple[str, dict[str, int]]:
    """Return words for where the wrong tokens of a group begin, and the numbers in them."""
    total, position = group["past"] + group["new"], group["start"] + group["index"]
    of = " of a sequence" if group["start"].any() else ""
    known = {
        "index": (group["index"], f"from position {{}}{of} on"),
        "new": (group["new"], "in calls of {} or more tokens"),
        "total": (total, "in calls with {} or more tokens in cache and call"),
        "position": (position, "from position {} on"),
    }
    least = {name: int(numbers[bad].min()) for name, (numbers, _) in known.items()}
    for names in (*((name,) for name in known), ("index", "new"), ("index", "total")):
        beyond = np.ones(len(bad), bool)
        for name in names:
            beyond &= known[name][0] >= least[name]
        if (beyond & ~bad).sum() <= OTHERS * max(1, (~bad).sum()):
            if all(least[name] == known[name][0].min() for name in names):
                return f"at {'' if bad.all() else 'almost '}all tokens", {"index": least["index"]}
            said = [known[name][1].format(least[name]) for name in names]
            return " ".join(said), {name: least[name] for name in names}
    part = 100 * bad[group["index"] >= least["index"]].mean()
    where = f"from position {least['index']}{of} on at {part:.0f} % of the tokens"
    return where, {"index": least["index"]}


def _cause(
    features: Sequence[str],
    group: Mapping[str, np.ndarray],
    bad: np.ndarray,
    thresholds: Mapping[str, int],
    edges: Mapping[str, int],
) -> str:
    errors, index = group["error"][bad], group["index"][bad]
    first = thresholds.get("index", thresholds.get("position", 0))
    if np.isinf(errors).all():
        return "not finite"
    if "row" in features and not (group["row"][bad] == 0).any():
        return "row"
    if features == ("cache",) and first > 2 and thresholds.get("index", 0) > 2:
        return _at_edge(first, edges) or "capacity"
    if features and features[0] != "offset":
        return features[0]
    if features:
        return "angles" if float(np.median(errors)) < SMALL else "offset"
    if index.min() == 0:
        return "half precision" if errors.max() < SMALL else "everywhere"
    if edge := _at_edge(first, edges):
        return edge
    before = group["error"][group["index"] == first - 1].max(initial=0.0)
    begins = errors[index == first].max(initial=0.0) > SUDDEN * before  # angles lose gradually
    if errors.max() < SMALL and not begins:
        return "angles"
    return "attention" if first <= 2 else "position"


def _at_edge(first: int, edges: Mapping[str, int]) -> str | None:
    """Return the cause at an edge, or None if no edge is within one token."""
    names = [name for name, at in edges.items() if abs(at - first) <= 1 and first > 1]
    if not names:
        return None
    return "window" if names[0].startswith(LIMITED) else "length"


@dataclass(frozen=True)
class Audit:
    """The result of an audit."""

    # "right", "wrong", or "refused" if the graph fails in a call that its inputs can express, and
    # is right in all others.
    verdict: str
    sentence: str  # which calls are wrong, and what they have in common
    cause: str  # a key of CAUSES, or a named fault; empty if nothing is wrong
    cells: Sequence[AuditedCell]  # in the order in which they were measured
    inputs: Sequence[dict[str, str]]  # table of inputs: "name", "type", "meaning"
    unreached: Mapping[str, str]  # edges of the reference that no cell reached, with the reason
    observed: Observed  # the error of each compared token
    loss: Loss | None = None  # what rounding costs, of a graph whose weights are rounded
    # What is proved of an ONNX graph at every length, refuted, or neither
    claims: Sequence[Claim] = ()
    # Source that repeats the first wrong token with numpy and the library of the graph, or empty
    program: str = ""

    @property
    def right(self) -> bool:
        """Whether every call that the inputs can express ran and is right."""
        return self.verdict == "right"

    def as_json(self) -> dict[str, Any]:
        """Return everything but the errors of single tokens and the program, for JSON."""
        return {name: msgspec.to_builtins(getattr(self, name)) for name in WRITTEN}
