"""Ways to call a model of ours and transformers' own, each with what both give: (ours, theirs) of the same tokens."""

from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import torch

from posenc_export.runtime import Session
from tests.models.encoders import PADDING

Pairs = List[Tuple[np.ndarray, np.ndarray]]
Pattern = Callable[[Any, Session], Pairs]
ABSOLUTE, RELATIVE = 2e-4, 1e-4  # transformers forms angles in float32: at 512 positions they are off by 3e-5
LENGTH = 40  # below the 64 tokens where the long factors of phi3 begin: there transformers' own step and full pass differ
LENGTHS = [LENGTH, 11, 26]


def tokens_of(rows: int = 2, length: int = LENGTH, low: int = 3) -> np.ndarray:
    """Token ids [rows,length], none of them special."""
    return np.random.default_rng(0).integers(low, 61, (rows, length))


def theirs(peer: Any, tokens: np.ndarray, output: str = "logits", **given: np.ndarray) -> np.ndarray:
    """What transformers' model gives, without a cache of its own where it has one."""
    cache = {"use_cache": False} if output == "logits" else {}
    with torch.no_grad():
        found = peer(torch.from_numpy(tokens), **cache, **{key: torch.from_numpy(value) for key, value in given.items()})
    return getattr(found, output).numpy()  # type: ignore[no-any-return]


def share(pairs: Pairs) -> float:
    """The largest difference, as a share of what is allowed."""
    return max(float((np.abs(ours - wanted) / (ABSOLUTE + RELATIVE * np.abs(wanted))).max()) for ours, wanted in pairs)


def worst(pairs: Pairs) -> float:
    """The largest difference."""
    return max(float(np.abs(ours - wanted).max()) for ours, wanted in pairs)


def full(peer: Any, session: Session) -> Pairs:
    """Whole rows in one call."""
    tokens = tokens_of()
    return [(session.prefill(tokens), theirs(peer, tokens))]


def chunked(peer: Any, session: Session) -> Pairs:
    """Whole rows, seven tokens at a time."""
    tokens = tokens_of()
    return [(session.prefill(tokens, chunk=7), theirs(peer, tokens))]


def stepwise(peer: Any, session: Session) -> Pairs:
    """Three tokens, then one after the other."""
    tokens = tokens_of()
    return [(_stepped(session, tokens, session.prefill(tokens[:, :3])), theirs(peer, tokens))]


def shifted(peer: Any, session: Session) -> Pairs:
    """Rows that start at position 300."""
    tokens = tokens_of()
    wanted = theirs(peer, tokens, position_ids=np.arange(300, 300 + LENGTH)[None].repeat(2, 0))
    return [(_stepped(session, tokens, session.prefill(tokens[:, :20], start=300)), wanted)]


def left_padded(peer: Any, session: Session) -> Pairs:
    """Rows of several lengths behind padding, the last four tokens one after the other."""
    tokens, mask, wanted = _padded(peer)
    seen = mask[:, :36] == 1
    first = session.prefill(tokens[:, :36], attention_mask=mask[:, :36])
    return [(first[seen], wanted[:, :36][seen]), (_stepped(session, tokens, np.zeros((3, 36, wanted.shape[2])))[:, 36:], wanted[:, 36:])]


def ragged(peer: Any, session: Session) -> Pairs:
    """Rows of several lengths without padding."""
    tokens, _, wanted = _padded(peer)
    made = session.prefill([row[LENGTH - length :] for row, length in zip(tokens, LENGTHS, strict=True)])
    return [(made[row, :length], wanted[row, LENGTH - length :]) for row, length in enumerate(LENGTHS)]


def _stepped(session: Session, tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Outputs of what stands in `first`, and of the tokens behind it one at a time."""
    return np.concatenate((first, np.stack([session.step(tokens[:, index]) for index in range(first.shape[1], tokens.shape[1])], 1)), axis=1)


def _padded(peer: Any) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = tokens_of(3)
    mask = np.stack([np.arange(LENGTH) >= LENGTH - length for length in LENGTHS]).astype(np.int64)
    return tokens, mask, theirs(peer, tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clip(0))


DECODER: Dict[str, Pattern] = {"full": full, "stepwise": stepwise, "chunked": chunked, "shifted": shifted, "left-padded": left_padded, "ragged": ragged}
BY_POSITION = ("shifted", "left-padded", "ragged")  # what takes transformers' position_ids


def whole(peer: Any, session: Session) -> Pairs:
    """Whole rows of an encoder, long and short ones."""
    tokens = tokens_of(3, low=5)
    return [(session.prefill(part), theirs(peer, part, "last_hidden_state")) for part in (tokens, tokens[:, :9])]


def padded_before(peer: Any, session: Session) -> Pairs:
    """Rows of an encoder behind padding, with token types where it has them."""
    return _encoded(peer, session, np.stack([np.arange(LENGTH) >= LENGTH - length for length in LENGTHS]))


def padded_behind(peer: Any, session: Session) -> Pairs:
    """Rows of an encoder before padding, with token types where it has them."""
    return _encoded(peer, session, np.stack([np.arange(LENGTH) < length for length in LENGTHS]))


def _encoded(peer: Any, session: Session, seen: np.ndarray) -> Pairs:
    tokens, mask, segments = np.where(seen, tokens_of(3, low=5), PADDING), seen.astype(np.int64), session.manifest.segments
    types = np.random.default_rng(1).integers(0, max(segments, 1), tokens.shape)
    wanted = theirs(peer, tokens, "last_hidden_state", attention_mask=mask, **_positions(peer, mask), **({"token_type_ids": types} if segments else {}))
    return [(session.prefill(tokens, attention_mask=mask, **({"token_types": types} if segments else {}))[seen], wanted[seen])]


def _positions(peer: Any, mask: np.ndarray) -> Dict[str, np.ndarray]:
    """Positions of valid tokens as transformers wants them, where a family takes any: RoFormer and others count columns, so that scores are the same."""
    family, counted = peer.config.model_type, (mask.cumsum(1) - 1).clip(0)
    if family in ("bert", "electra", "distilbert", "modernbert"):
        return {"position_ids": counted}
    return {"position_ids": counted + peer.config.pad_token_id + 1} if family in ("roberta", "xlm-roberta", "camembert") else {}


ENCODER: Dict[str, Pattern] = {"full": whole, "left-padded": padded_before, "ragged": padded_behind}
