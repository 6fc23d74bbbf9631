"""The rows that a call reads: where they begin, their memory, and the encoder outputs they read."""

from typing import Optional

import numpy as np

from posenc_export.runtime.session import arguments, encoder_outputs
from posenc_export.runtime.session.arguments import PrefillArguments
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.inputs import Numbers, Rows, per_row
from posenc_export.runtime.session.prefixes import Prefix
from posenc_export.runtime.session.state import SessionState


def before_prefill(
    state: SessionState,
    prefill: PrefillArguments,
    start: Numbers,
    encoder: Optional[Rows] = None,
    encoder_mask: Optional[np.ndarray] = None,
) -> SessionState:
    """Return the state before a prefill: `state` if its rows have tokens, or else empty rows."""
    manifest, counts = state.caches.graph.manifest, prefill.counts
    if not counts.any():
        got = f"rows of {counts.tolist()} tokens"
        raise expected("at least one token in at least one row", got)
    if not manifest.states:  # a bidirectional model reads whole rows
        state = SessionState.empty(state.caches, state.rewind)
    length = state.settled_length
    starts = arguments.starts(manifest, state.start, length, counts, start)
    filled = bool(length.any())
    settled = length if filled else np.zeros_like(starts)
    arguments.check_room(manifest, state.caches.most, starts, settled, counts)
    outputs = encoder_outputs.for_rows(
        manifest, state.encoder_outputs, length, len(starts), encoder, encoder_mask
    )
    if filled:
        return state
    return state.opened(starts, prefill.longest).replace(encoder_outputs=outputs)


def before_admit(
    state: SessionState,
    prefill: PrefillArguments,
    start: Numbers,
    encoder: Optional[Rows],
    encoder_mask: Optional[np.ndarray],
    prefix: Optional[Prefix],
) -> SessionState:
    """Return `state` with the new rows of an admit, before their tokens are read."""
    manifest = state.caches.graph.manifest
    arguments.check_every_row(prefill.counts, "new row")
    starts = per_row("start", start, len(prefill.tokens))
    if prefix is not None and starts.tolist() != [0]:
        got = f"rows at {starts.tolist()}"
        raise expected("one row at position 0 after a prefix", got, "admit rows one by one")
    known = 0 if prefix is None else prefix.length
    cached = np.full_like(starts, known)
    arguments.check_room(manifest, state.caches.most, starts, cached, prefill.counts)
    outputs = encoder_outputs.new(manifest, encoder, encoder_mask, len(starts))
    if state.encoder_outputs is not None and outputs is not None:
        outputs = state.encoder_outputs.joined(outputs)
    joined = state.joined(starts, known + prefill.longest).replace(encoder_outputs=outputs)
    return joined if prefix is None else joined.begun(state.rows, prefix)
