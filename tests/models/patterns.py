"""Call patterns. Each calls our model and transformers' model on the same tokens, and returns
pairs of outputs (ours, theirs).
"""

from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import torch

from posenc_export.runtime import Session
from posenc_export.runtime.artefact.manifest import Manifest
from tests.models.encoders import PADDING

Pairs = List[Tuple[np.ndarray, np.ndarray]]
Pattern = Callable[[Any, Session], Pairs]
ABSOLUTE, RELATIVE = (
    2e-4,
    1e-4,
)  # transformers computes angles in float32, with errors of 3e-5 at position 512
LENGTH = 40
LENGTHS = [LENGTH, 11, 26]


def fused_layers(manifest: Manifest) -> int:
    """Return the number of layers whose cached values GroupQueryAttention alone reads."""
    return sum(
        state.past.endswith(".value") and not state.reads_hidden for state in manifest.states
    )


def tokens_of(rows: int = 2, length: int = LENGTH, low: int = 3) -> np.ndarray:
    """Return token ids [rows,length] without special tokens."""
    return np.random.default_rng(0).integers(low, 61, (rows, length))


def theirs(
    peer: Any, tokens: np.ndarray, output: str = "logits", **given: np.ndarray
) -> np.ndarray:
    """Return the output of transformers' model, called without a cache."""
    cache = {"use_cache": False} if output == "logits" else {}
    with torch.no_grad():
        result = peer(
            torch.from_numpy(tokens),
            **cache,
            **{key: torch.from_numpy(value) for key, value in given.items()},
        )
    return getattr(result, output).numpy()  # type: ignore[no-any-return]


def share(pairs: Pairs) -> float:
    """Return the largest difference relative to the tolerance."""
    return max(
        float((np.abs(ours - wanted) / (ABSOLUTE + RELATIVE * np.abs(wanted))).max())
        for ours, wanted in pairs
    )


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
    return [
        (first[seen], wanted[:, :36][seen]),
        (_stepped(session, tokens, np.zeros((3, 36, wanted.shape[2])))[:, 36:], wanted[:, 36:]),
    ]


def ragged(peer: Any, session: Session) -> Pairs:
    """Call with rows of different lengths without padding."""
    tokens, _, wanted = _padded(peer)
    outputs = session.prefill(
        [row[LENGTH - length :] for row, length in zip(tokens, LENGTHS, strict=True)]
    )
    return [
        (outputs[row, :length], wanted[row, LENGTH - length :])
        for row, length in enumerate(LENGTHS)
    ]


def _stepped(session: Session, tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the outputs `first`, followed by outputs of the remaining tokens one at a time."""
    return np.concatenate(
        (
            first,
            np.stack(
                [
                    session.step(tokens[:, index])
                    for index in range(first.shape[1], tokens.shape[1])
                ],
                1,
            ),
        ),
        axis=1,
    )


def _padded(peer: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = tokens_of(3)
    mask = np.stack([np.arange(LENGTH) >= LENGTH - length for length in LENGTHS]).astype(np.int64)
    return (
        tokens,
        mask,
        theirs(peer, tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clip(0)),
    )


DECODER: Dict[str, Pattern] = {
    "full": full,
    "stepwise": stepwise,
    "chunked": chunked,
    "shifted": shifted,
    "left-padded": left_padded,
    "ragged": ragged,
}
BY_POSITION = (
    "shifted",
    "left-padded",
    "ragged",
)  # patterns that need position_ids in transformers


def whole(peer: Any, session: Session) -> Pairs:
    """Call an encoder with whole rows, long and short."""
    tokens = tokens_of(3, low=5)
    return [
        (
            session.prefill(part),
            theirs(peer, part, "last_hidden_state"),
        )
        for part in (tokens, tokens[:, :9])
    ]


def padded_before(peer: Any, session: Session) -> Pairs:
    """Call an encoder with left-padded rows, with token types if the model has them."""
    return _encoded(
        peer, session, np.stack([np.arange(LENGTH) >= LENGTH - length for length in LENGTHS])
    )


def padded_behind(peer: Any, session: Session) -> Pairs:
    """Call an encoder with right-padded rows, with token types if the model has them."""
    return _encoded(peer, session, np.stack([np.arange(LENGTH) < length for length in LENGTHS]))


def _encoded(peer: Any, session: Session, seen: np.ndarray) -> Pairs:
    tokens, mask, segments = (
        np.where(seen, tokens_of(3, low=5), PADDING),
        seen.astype(np.int64),
        session.manifest.segments,
    )
    types = np.random.default_rng(1).integers(0, max(segments, 1), tokens.shape)
    wanted = theirs(
        peer,
        tokens,
        "last_hidden_state",
        attention_mask=mask,
        **_positions(peer, mask),
        **({"token_type_ids": types} if segments else {}),
    )
    named = {"token_types": types} if segments else {}
    return [(session.prefill(tokens, attention_mask=mask, **named)[seen], wanted[seen])]


def _positions(peer: Any, mask: np.ndarray) -> Dict[str, np.ndarray]:
    """Return transformers' positions of valid tokens, for families that accept them. RoFormer
    and others use columns, which gives the same scores.
    """
    family, counted = peer.config.model_type, (mask.cumsum(1) - 1).clip(0)
    if family in ("bert", "electra", "distilbert", "modernbert", "layoutlm"):
        return {"position_ids": counted}
    return (
        {"position_ids": counted + peer.config.pad_token_id + 1}
        if family in ("roberta", "layoutlmv3")
        else {}
    )


ENCODER: Dict[str, Pattern] = {"full": whole, "left-padded": padded_before, "ragged": padded_behind}
