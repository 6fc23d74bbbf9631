"""Caches of windows in saved sessions."""

import dataclasses
from typing import Mapping

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.session.state import SessionState
from posenc_export.shared.refusal import refusal

STATE = "state."  # begins the names of arrays of states
WINDOWS = "window_start"  # token of each row in slot 0 of its caches of windows
Arrays = Mapping[str, np.ndarray]


def check_windows(manifest: Manifest, arrays: Arrays, kept: int, used: int) -> None:
    """Raise ValueError unless caches of `kept` slots hold the tokens that the next ones read."""
    length, first_kept = arrays["length"], arrays[WINDOWS]
    size = max(state.window for state in manifest.states)
    least = np.where(first_kept > 0, size - 1, 0)
    holds = (first_kept >= 0) & (length - first_kept >= least) & (length - first_kept <= kept)
    if not holds.all() or kept > used:
        rule = f"caches of windows with the last {size - 1} tokens of rows in at most {used} slots"
        got = f"{length.tolist()} tokens from {first_kept.tolist()} on in {kept}"
        raise ValueError(f"expected {rule}, got {got}")


def with_windows(empty: SessionState, arrays: Arrays) -> SessionState:
    """Return the state of no rows whose caches of windows have room for those of a file."""
    window, windowed = empty.caches.window, empty.caches.rules.windowed
    if not windowed:
        return empty
    if arrays[WINDOWS].any() and not window.size:
        got = f"provider {empty.caches.graph.provider}"
        rule = "provider cpu for a session with caches of windows, which begin at later tokens"
        raise refusal("restore", rule, got, "load the artefact with provider cpu")
    stored = empty.caches.states[windowed[0]]
    missing = arrays[STATE + stored.past].shape[stored.axis] - window.slots
    window = window._replace(new=window.new + max(missing, 0))
    return empty.replace(caches=dataclasses.replace(empty.caches, window=window))
