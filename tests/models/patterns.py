"""Call patterns. Each calls our model and transformers' model on the same tokens, and returns
pairs of outputs (ours, theirs).
"""

from typing import Any, Callable

import numpy as np
import torch

from posenc_export.runtime import Session
from posenc_export.runtime.artefact.manifest import Manifest
from tests.models.encoders import PADDING

Pairs = list[tuple[np.ndarray, np.ndarray]]
Pattern = Callable[[Any, Session], Pairs]
# transformers computes angles in float32, with errors of 3e-5 at position 512.
ABSOLUTE, RELATIVE = 2e-4, 1e-4
LENGTH = 40
LENGTHS = [LENGTH, 11, 26]
# Masks of rows of these lengths with padding before and behind them.
BEFORE = np.stack([np.arange(LENGTH) >= LENGTH - length for length in LENGTHS])
BEHIND = BEFORE[:, ::-1]


def fused_layers(manifest: Manifest) -> int:
    """Return the number of layers whose cached values GroupQueryAttention alone reads."""
    values = [state for state in manifest.states if state.past.endswith(".value")]
    return sum(not state.reads_hidden for state in values)


def tokens_of(rows: int = 2, length: int = LENGTH, low: int = 3) -> np.ndarray:
    """Return token ids [rows,length] without special tokens."""
    return np.random.default_rng(0).integers(low, 61, (rows, length))


def theirs(
    peer: Any, tokens: np.ndarray, output: str = "logits", **given: np.ndarray
) -> np.ndarray:
    """Return the output of transformers' model, called without a cache."""
    arguments: dict[str, Any] = {key: torch.from_numpy(value) for key, value in given.items()}
    arguments |= {"use_cache": False} if output == "logits" else {}
    with torch.no_grad():
        result = peer(torch.from_numpy(tokens), **arguments)
    return getattr(result, output).numpy()  # type: ignore[no-any-return]


def share(pairs: Pairs) -> float:
    """Return the largest difference relative to the tolerance."""
    errors = (np.abs(y - wanted) / (ABSOLUTE + RELATIVE * np.abs(wanted)) for y, wanted in pairs)
    return max(float(error.max()) for error in errors)


def worst(pairs: Pairs) -> float:
    """Return the largest difference."""
    return max(float(np.abs(ours - wanted).max()) for ours, wanted in pairs)


def full(peer: Any, session: Session) -> Pairs:
    """Call with whole rows."""
    tokens = tokens_of()
    return [(session.prefill(tokens), theirs(peer, tokens))]


def chunked(peer: Any, session: Session) -> Pairs:
    """Call with whole rows in chunks of seven tokens."""
    tokens = tokens_of()
    return [(session.prefill(tokens, chunk=7), theirs(peer, tokens))]


def stepwise(peer: Any, session: Session) -> Pairs:
    """Call with three tokens, then with one token at a time."""
    tokens = tokens_of()
    return [(_stepped(session, tokens, session.prefill(tokens[:, :3])), theirs(peer, tokens))]


def shifted(peer: Any, session: Session) -> Pairs:
    """Call with rows that start at position 300."""
    tokens = tokens_of()
    wanted = theirs(peer, tokens, position_ids=np.arange(300, 300 + LENGTH)[None].repeat(2, 0))
    return [(_stepped(session, tokens, session.prefill(tokens[:, :20], start=300)), wanted)]


def left_padded(peer: Any, session: Session) -> Pairs:
    """Call with left-padded rows of different lengths, and with the last four tokens one at a
    time.
    """
    tokens, mask, wanted = _padded(peer)
    seen = mask[:, :36] == 1
    first = session.prefill(tokens[:, :36], attention_mask=mask[:, :36])
    last = _stepped(session, tokens, first)[:, 36:]
    return [(first[seen], wanted[:, :36][seen]), (last, wanted[:, 36:])]


def ragged(peer: Any, session: Session) -> Pairs:
    """Call with rows of different lengths without padding."""
    tokens, _, wanted = _padded(peer)
    each = [*enumerate(LENGTHS)]
    outputs = session.prefill([tokens[row, LENGTH - length :] for row, length in each])
    return [(outputs[row, :length], wanted[row, LENGTH - length :]) for row, length in each]


def _stepped(session: Session, tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the outputs `first`, followed by outputs of the remaining tokens one at a time."""
    steps = [session.step(column) for column in tokens.T[first.shape[1] :]]
    return np.concatenate((first, np.stack(steps, 1)), axis=1)


def _padded(peer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = tokens_of(3)
    mask, counted = BEFORE.astype(np.int64), (BEFORE.cumsum(1) - 1).clip(0)
    return tokens, mask, theirs(peer, tokens, attention_mask=mask, position_ids=counted)


DECODER: dict[str, Pattern] = {
    "full": full,
    "stepwise": stepwise,
    "chunked": chunked,
    "shifted": shifted,
    "left-padded": left_padded,
    "ragged": ragged,
}
# Patterns that need position_ids in transformers.
BY_POSITION = ("shifted", "left-padded", "ragged")


def whole(peer: Any, session: Session) -> Pairs:
    """Call an encoder with whole rows, long and short."""
    tokens = tokens_of(3, low=5)
    parts = (tokens, tokens[:, :9])
    return [(session.prefill(part), theirs(peer, part, "last_hidden_state")) for part in parts]


def padded_before(peer: Any, session: Session) -> Pairs:
    """Call an encoder with left-padded rows, with token types if the model has them."""
    return _encoded(peer, session, BEFORE)


def padded_behind(peer: Any, session: Session) -> Pairs:
    """Call an encoder with right-padded rows, with token types if the model has them."""
    return _encoded(peer, session, BEHIND)


def _encoded(peer: Any, session: Session, seen: np.ndarray) -> Pairs:
    tokens, mask = np.where(seen, tokens_of(3, low=5), PADDING), seen.astype(np.int64)
    given, types = {"attention_mask": mask, **_positions(peer, mask)}, {}
    if segments := session.manifest.segments:
        types["token_types"] = np.random.default_rng(1).integers(0, segments, tokens.shape)
        given["token_type_ids"] = types["token_types"]
    wanted = theirs(peer, tokens, "last_hidden_state", **given)
    return [(session.prefill(tokens, attention_mask=mask, **types)[seen], wanted[seen])]


def _positions(peer: Any, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Return transformers' positions of valid tokens, for families that accept them. RoFormer
    and others use columns, which gives the same scores.
    """
    family, counted = peer.config.model_type, (mask.cumsum(1) - 1).clip(0)
    if family in ("bert", "electra", "distilbert", "modernbert", "layoutlm"):
        return {"position_ids": counted}
    if family in ("roberta", "layoutlmv3"):
        return {"position_ids": counted + peer.config.pad_token_id + 1}
    return {}


ENCODER: dict[str, Pattern] = {"full": whole, "left-padded": padded_before, "ragged": padded_behind}
