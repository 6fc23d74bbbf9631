"""Batches of rows of different lengths: a prompt and steps, compared with the module in float64."""

from typing import Any, Sequence

import numpy as np

from posenc_export.runtime import Session
from posenc_export.shared.numerics import worst_error


def worst_of_batch(
    block: Any, session: Session, lengths: Sequence[int], steps: int, chunk: int | None = None
) -> float:
    """Return the worst error of a batch with prompts of these lengths, followed by `steps`
    steps.
    """
    x = [
        np.random.default_rng(row).standard_normal(
            (length + steps, block.config.width), dtype=np.float32
        )
        for row, length in enumerate(lengths)
    ]
    outputs = session.prefill([row[:-steps] for row in x], chunk=chunk)
    stepped = np.stack(
        [session.step(np.stack([row[index - steps] for row in x])) for index in range(steps)],
        axis=1,
    )
    results = [
        np.concatenate((outputs[row][: len(given) - steps], stepped[row]))
        for row, given in enumerate(x)
    ]
    return max(
        worst_error(ours, block.exact(given, range(len(given)), range(len(given))))
        for ours, given in zip(results, x, strict=True)
    )


def check_rewind(session: Session, width: int, length: int) -> None:
    """Check that a row rewound from `length` + 10 tokens to 10 gives the same outputs as before
    it had the other tokens.
    """
    x = np.random.default_rng(0).standard_normal((1, length + 10, width), dtype=np.float32)
    session.prefill(x[:, :10])
    expected: list[np.ndarray] = [session.step(x[:, index]) for index in range(10, 14)]
    session.prefill(x[:, 14:])
    session.rewind(length)
    for index, wanted in enumerate(expected):
        np.testing.assert_array_equal(session.step(x[:, 10 + index]), wanted)
