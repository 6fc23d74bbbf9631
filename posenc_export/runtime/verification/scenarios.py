"""Ways to divide a sequence into calls, all of which must give the outputs of one full pass."""

from typing import Callable, List, Tuple

import numpy as np

from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification import row_scenarios
from posenc_export.runtime.verification.case import Calls, Case, Level, Pairs, Scenario

Run = Callable[[Calls, Case], Pairs]


def split(past: int, new: int) -> Run:
    """Prefill `past` tokens, then `new` tokens in one call."""

    def run(session: Calls, case: Case) -> Pairs:
        if past:
            yield session.prefill(case.tokens[:, :past], **case.beginning()), case.full[:, :past]
        how = {} if past else case.beginning()
        outputs = session.prefill(case.tokens[:, past : past + new], **how)
        yield outputs, case.full[:, past : past + new]

    return run


def chunked(chunk: int) -> Run:
    """Prefill all tokens in chunks."""

    def run(session: Calls, case: Case) -> Pairs:
        yield session.prefill(case.tokens, chunk=chunk, **case.beginning()), case.full

    return run


def stepped_from(past: int) -> Run:
    """Prefill `past` tokens, then feed one at a time."""

    def run(session: Calls, case: Case) -> Pairs:
        yield session.prefill(case.tokens[:, :past], **case.beginning()), case.full[:, :past]
        for index in range(past, case.tokens.shape[1]):
            yield session.step(case.tokens[:, index]), case.full[:, index]

    return run


stepped = stepped_from(1)


def left_padded(session: Calls, case: Case) -> Pairs:
    """Prefill with b + 1 columns of left padding in row b, then step."""
    rows, total = case.tokens.shape[:2]
    length = max(1, total // 2)
    padded, mask = _behind_padding(case.tokens[:, :length])
    result = session.prefill(padded, attention_mask=mask, **case.beginning())
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row, :length]
    for index in range(length, min(length + 3, total)):
        yield session.step(case.tokens[:, index]), case.full[:, index]


def _behind_padding(tokens: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Pad tokens [B,n] or [B,n,E] by b + 1 columns at the left of row b; also return the mask."""
    rows, length = tokens.shape[:2]
    mask = np.zeros((rows, length + rows), np.int64)
    padded = np.repeat(tokens[:, -1:], length + rows, axis=1)
    for row in range(rows):
        mask[row, row + 1 : row + 1 + length] = 1
        padded[row, row + 1 : row + 1 + length] = tokens[row]
    return padded, mask


def last_of_left_padded(session: Calls, case: Case) -> Pairs:
    """Prefill twice with left padding, with the outputs of the last tokens only."""
    total = case.tokens.shape[1]
    middle = max(1, total // 2)
    for first, end, count, how in ((0, middle, 1, case.beginning()), (middle, total, 2, {})):
        if first < end:
            padded, mask = _behind_padding(case.tokens[:, first:end])
            result = session.prefill(padded, attention_mask=mask, logits_to_keep=count, **how)
            yield result, case.full[:, max(first, end - count) : end]


def rewound(session: Calls, case: Case) -> Pairs:
    """Feed tokens past the fork, rewind, and feed the other ending: stale content is not read."""
    at, beyond = case.fork_at, min(4, case.tokens.shape[1] - case.fork_at - 1)
    session.prefill(case.tokens[:, : at + beyond], **case.beginning())
    session.step(case.tokens[:, at + beyond])
    session.rewind(beyond + 1)
    yield session.step(case.other[:, at]), case.other_full[:, at]
    session.rewind(1)
    yield session.prefill(case.other[:, at:]), case.other_full[:, at:]


def forked(session: Calls, case: Case) -> Pairs:
    """Fork a session and step both sessions alternately, each with its own ending."""
    at = case.fork_at
    session.prefill(case.tokens[:, :at], **case.beginning())
    other = session.fork()
    for index in range(at, min(at + 4, case.tokens.shape[1])):
        yield session.step(case.tokens[:, index]), case.full[:, index]
        yield other.step(case.other[:, index]), case.other_full[:, index]


def padded_around(session: Calls, case: Case) -> Pairs:
    """Prefill all tokens with b + 1 columns of left padding in row b, and right padding."""
    rows, length = case.tokens.shape[:2]
    padded, mask = _behind_padding(case.tokens)
    result = session.prefill(padded, attention_mask=mask, **case.beginning())
    for row in range(rows):
        yield result[row, row + 1 : row + 1 + length], case.full[row]


def read_out_at_once(session: Session, case: Case) -> Pairs:
    """Read all tokens, and compare the second output."""
    assert case.readout is not None
    yield session.read_out(case.tokens, start=case.start), case.readout


def read_out_of_padded(session: Session, case: Case) -> Pairs:
    """As `padded_around`, with the second output."""
    assert case.readout is not None
    length = case.tokens.shape[1]
    padded, mask = _behind_padding(case.tokens)
    result = session.read_out(padded, case.start, mask)
    for row, expected in enumerate(case.readout):
        pooled = expected.ndim == 1  # one result for a row, otherwise one for each token
        yield result[row] if pooled else result[row, row + 1 : row + 1 + length], expected


# For models with a second output.
OF_READOUTS = (
    Scenario("at once", read_out_at_once, Level.QUICK),
    Scenario("padding", read_out_of_padded, Level.QUICK),
    Scenario("ragged rows", row_scenarios.read_out_of_ragged, Level.QUICK),
)
# For graphs that compute the outputs of selected tokens.
OF_LAST_OUTPUTS = (
    Scenario("last of ragged rows", row_scenarios.last_of_ragged, Level.QUICK),
    Scenario("last of left padding", last_of_left_padded, Level.QUICK),
)
# For sessions whose rows come and go.
OF_ROWS = Scenario("rows come and go", row_scenarios.admitted, Level.QUICK)


def of_whole_calls(length: int) -> List[Scenario]:
    """Return the scenarios for bidirectional models, which have no cache."""
    return [
        Scenario("at once", split(0, length), Level.LOAD),
        Scenario("padding", padded_around, Level.LOAD),
        Scenario("ragged rows", row_scenarios.ragged_at_once, Level.LOAD),
    ]


def of_caches(length: int) -> List[Scenario]:
    """Return the scenarios for sequences of `length` tokens in a model with caches."""
    levels = {"past middle, new 1": Level.LOAD}
    splits = {
        f"past {name}, new {new}": split(past, new)
        for name, past in (("0", 0), ("1", 1), ("middle", length // 2))
        for new in (1, 2, length // 3)
        if 0 < new and past + new <= length
    }
    scenarios = [Scenario(name, run, levels.get(name, Level.LARGE)) for name, run in splits.items()]
    if length > 1:
        scenarios += [
            Scenario("past last, new 1", split(length - 1, 1)),
            Scenario("rewind", rewound),
            Scenario("rewind by row", row_scenarios.rewound_by_row, Level.QUICK),
            Scenario("fork", forked, Level.QUICK),
        ]
    return [
        *scenarios,
        # In a large model, calls with one token and steps repeat its calls.
        Scenario("chunks of 1", chunked(1), Level.WHOLE),
        Scenario("chunks of 5", chunked(5), Level.QUICK),
        Scenario("steps", stepped),
        Scenario("left padding", left_padded, Level.LOAD),
        Scenario("ragged rows", row_scenarios.ragged, Level.LOAD),
    ]
