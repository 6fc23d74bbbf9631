"""Inputs for calls of any artefact."""

from typing import Dict

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.cache_manager import CacheManager
from posenc_export.runtime.session.graph_runner import GraphRunner
from posenc_export.runtime.session.state import SessionState

ENCODED = 11  # tokens of the encoder's sequence, for decoders that read one


def tokens(manifest: Manifest, batch: int, new: int) -> np.ndarray:
    """Return tokens [B,S], or vectors [B,S,E] for a block."""
    if manifest.vocabulary:
        return (np.arange(batch * new).reshape(batch, new) % manifest.vocabulary).astype(np.int64)
    return np.ones((batch, new, int(manifest.inputs[0].axes[-1])), manifest.inputs[0].dtype)


def feeds(manifest: Manifest, runner: GraphRunner, batch: int, new: int, past: int, slots: int) -> Dict[str, np.ndarray]:
    """Return all graph inputs but the states, for rows of equal length with `past` cached tokens, whose step may read `slots` slots."""
    counts, none = np.full(batch, new), np.zeros(batch, np.int64)
    state = SessionState(np.full(batch, past), none, np.ones((batch, past), bool))
    grid = np.tile(np.arange(past, past + new), (manifest.axes, batch, 1))
    given = runner._feeds(state, slice(None), tokens(manifest, batch, new), {"grid": grid}, counts, none + 1)
    if "total_sequence_length" in given:
        given["total_sequence_length"][...] = slots
    if "slots" in given:
        given["slots"] = np.arange(slots)
    sizes = {"batch_size": batch, "encoder_sequence_length": ENCODED}
    return given | {value.name: np.ones([sizes.get(axis, axis) for axis in value.axes], value.dtype) for value in manifest.encoder}


def runner_of(manifest: Manifest) -> GraphRunner:
    """Return a runner that builds inputs as in a session on CUDA."""
    return GraphRunner(manifest, CacheManager(lambda rows, slots: None, manifest, 1, manifest.max_positions, 1), "cuda")  # type: ignore[arg-type,return-value]
