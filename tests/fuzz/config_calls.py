"""Outputs of transformers' models, and of ours for every division of rows into calls."""

from dataclasses import dataclass
from typing import Any, Dict, Optional

import numpy as np
import torch

from posenc_export.runtime import Session
from tests.fuzz.config_peers import Base
from tests.models import pairs
from tests.models.pages import grid_of
from tests.models.patterns import Pairs, theirs
from tests.models.speech import inputs_of

LENGTH, SHORT, CHUNK = 24, 9, 7  # tokens of the long and of the short row, and of a chunk
# Tokens of the first call of a decode, which may lie in another range of a rotation, and the last
# ones, which are read one at a time.
FIRST, STEPS = (3, 21)
BEYOND = 280  # tokens of a long row in which bfloat16 no longer holds every position


class Theirs:
    """Outputs of transformers' model for single rows."""

    def __init__(self, base: Base, model: Any) -> None:
        self.base, self.config = base, model.config
        self.peer = pairs.Peer(model) if base.kind == "pair" else model
        self.output = "last_hidden_state" if base.kind == "encoder" else "logits"

    def full(self, tokens: np.ndarray) -> np.ndarray:
        """Return the outputs [B,S,N] of a full pass; [B,N] of a head that reads a whole row."""
        if not self.base.task:
            return theirs(self.peer, tokens, self.output)
        with torch.no_grad():
            result = self.peer(torch.from_numpy(tokens))
        if self.base.task == "QuestionAnswering":
            return torch.stack((result.start_logits, result.end_logits), 2).numpy()
        return result.logits.numpy()  # type: ignore[no-any-return]

    def cached(self, tokens: np.ndarray) -> np.ndarray:
        """Return the outputs of a decoder that reads FIRST tokens, then others, and the last
        STEPS tokens one at a time, with its own cache.
        """
        parts, cache, ends = (
            [],
            None,
            sorted({FIRST, *range(tokens.shape[1] - STEPS, tokens.shape[1] + 1)}),
        )
        with torch.no_grad():
            for begin, end in zip([0, *ends], ends, strict=False):
                result = self.peer(
                    torch.from_numpy(tokens[:, begin:end]),
                    use_cache=True,
                    **({} if cache is None else {"cache": cache}),
                )
                parts.append(result.logits.numpy())
                cache = result.cache
        return np.concatenate(parts, 1)


@dataclass
class Expected:
    """transformers' outputs.

    Args:
        tokens: two rows [2,S].
        full: outputs [2,S,N] of both rows, or [2,N] of a head that reads whole rows.
        decoded: the same from its decode; of an encoder `full`.
        alone: outputs [1,SHORT,N] or [1,N] of the last SHORT tokens of the second row, as a row of
            its own; None if transformers computes them in another way.
    """

    tokens: np.ndarray
    full: np.ndarray
    decoded: np.ndarray
    alone: Optional[np.ndarray]


def expected(peer: Theirs, tokens: np.ndarray) -> Expected:
    """Return transformers' outputs for two rows of tokens.

    Raises:
        ValueError: they are empty or not finite.
    """
    full = peer.full(tokens)
    # Both rows, since the second row of a pair reads the second source.
    alone = peer.full(tokens[:, -SHORT:])[1:]
    decoded = full if peer.base.kind == "encoder" else peer.cached(tokens)
    if not all(part.size and np.isfinite(part).all() for part in (full, alone, decoded)):
        raise ValueError("outputs that are empty or not finite")
    return Expected(tokens, full, decoded, alone)


def divisions(base: Base, session: Any, expected: Expected) -> Dict[str, Pairs]:
    """Return pairs of outputs (ours, theirs) for every division of the rows into calls."""
    tokens, wanted, alone = expected.tokens, expected.full, expected.alone
    call = session.read_out if base.task else session.prefill
    long = tokens.shape[1]
    sides = {"left padding": slice(long - SHORT, long)}
    if base.kind == "encoder":
        sides["right padding"] = slice(0, SHORT)
    result: Dict[str, Pairs] = {}
    result["full"] = [(call(inputs_of(session, tokens), **grid_of(session, tokens)), wanted)]
    for name, place in sides.items():
        _begin(session)
        rows, mask = np.zeros_like(tokens), np.zeros_like(tokens)
        rows[0], rows[1, place] = tokens[0], tokens[1, -SHORT:]
        mask[0], mask[1, place] = 1, 1
        named = {"attention_mask": mask, **grid_of(session, rows)}
        made = call(inputs_of(session, rows, mask), **named)
        second = made[1] if made.ndim == 2 else made[1, place]
        result[name] = [(made[0], wanted[0]), *([] if alone is None else [(second, alone[0])])]
    if base.kind == "encoder":
        return result
    _begin(session)
    result["chunks"] = [(session.prefill(tokens, chunk=CHUNK), wanted)]
    _begin(session)
    first = session.prefill(tokens[:, : long - STEPS])
    steps = [session.step(tokens[:, index]) for index in range(long - STEPS, long)]
    result["steps"] = [(np.concatenate((first, np.stack(steps, 1)), axis=1), wanted)]
    return result


def _begin(session: Any) -> None:
    held: Session = getattr(session, "session", session)
    held.reset()
