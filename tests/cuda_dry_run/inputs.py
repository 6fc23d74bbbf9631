"""Inputs for calls of any artefact."""

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest


def tokens(manifest: Manifest, batch: int, new: int) -> np.ndarray:
    """Return tokens [B,S], or vectors [B,S,E] for a block."""
    if manifest.vocabulary:
        return (np.arange(batch * new).reshape(batch, new) % manifest.vocabulary).astype(np.int64)
    return np.ones((batch, new, int(manifest.inputs[0].axes[-1])), manifest.inputs[0].dtype)
