"""What the eager module, in float32 whatever the artefact's dtype, gives for the inputs of a proof."""

import copy
from typing import Optional, Tuple

import numpy as np

from posenc_export.export.describe import Model, eager
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.model import Model as Loaded
from posenc_export.runtime.proof import BATCHES, CHUNK, LONGEST, Beside, Expected, inputs, length_of, numbers, starts
from posenc_export.runtime.scenarios import Case
from posenc_export.runtime.session import Session
from posenc_export.runtime.torch_graph import TorchGraph

SEGMENT_PADDING = 3  # columns in front of the first row


def of_module(model: Model, manifest: Manifest, last: Optional[int] = None) -> Expected:
    """Outputs of a model that has the artefact's dtype.

    Args:
        last: how many outputs at the end of a filled cache are kept; all of them where None.
    """
    session = eager_session(model)
    output = manifest.outputs[0]
    cases = {start: _case(session, manifest, start) for start in starts(manifest)}
    return Expected(np.arange(int(output.axes[-1])), cases, _beside(session, manifest), _filled(session, manifest, last) if manifest.states else None)


def eager_session(model: Model) -> Session:
    """A session on the model in float32."""
    module, described = eager(copy.deepcopy(model).float().eval())
    return Loaded(TorchGraph(module, described)).session()


def wide(tokens: np.ndarray) -> np.ndarray:
    """Hidden states in float32."""
    return tokens if tokens.dtype == np.int64 else tokens.astype(np.float32)


def _case(session: Session, manifest: Manifest, start: int) -> Case:
    length = length_of(manifest)
    fork_at, rows = length // 2, max(BATCHES)
    tokens = inputs(manifest, (rows, length), "tokens")
    other = tokens.copy()
    other[:, fork_at:] = inputs(manifest, (rows, length - fork_at), "another ending")
    return Case(tokens, _full(session, tokens, start), start, fork_at, other, _full(session, other, start))


def _full(session: Session, tokens: np.ndarray, start: int) -> np.ndarray:
    session.reset()
    return session.prefill(wide(tokens), start=start, chunk=tokens.shape[1])


def _beside(session: Session, manifest: Manifest) -> Optional[Beside]:
    length = length_of(manifest)
    tokens, mask = inputs(manifest, (2, length), "tokens with numbers beside"), np.ones((2, length), np.int64)
    session.reset()
    if manifest.axes:
        grid = numbers((manifest.axes, 2, length), "coordinates", manifest.max_positions)
        return Beside(tokens, grid, mask, session.prefill(wide(tokens), chunk=length, grid=grid))
    if manifest.input("token_type_ids") is None:
        return None
    types = numbers(tokens.shape, "segments", int(manifest.config["segments"]))
    mask[0, : min(SEGMENT_PADDING, length - 1)] = 0
    return Beside(tokens, types, mask, session.prefill(tokens, attention_mask=mask, token_types=types))


def _filled(session: Session, manifest: Manifest, last: Optional[int]) -> Tuple[np.ndarray, np.ndarray]:
    length = min(manifest.max_positions, LONGEST)
    tokens = inputs(manifest, (1, length), "tokens to fill a cache")
    kept = length if last is None else min(last, length)
    session.reset()
    parts = []
    for first in range(0, length, CHUNK):
        parts.append(session.prefill(wide(tokens[:, first : first + CHUNK]))[:, max(length - kept - first, 0) :])
    return tokens, np.concatenate(parts, axis=1)
