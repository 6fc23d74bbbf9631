"""How cached keys depend on the positions of their tokens, measured with the oracles."""

from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import torch

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.export import graph_values
from posenc_export.export.signatures import Model
from posenc_export.models.user_module import OwnModule
from posenc_export.runtime.artefact.records import CachedKeys, KeyRotation
from posenc_export.runtime.session.discarding import turned

LARGEST = 1e-9  # difference from a rotation by p w_k that is rounding of float64
IN_FLOAT32 = 1e-4  # of rotated standard normal keys; others differ by about 1
NEGLIGIBLE = 1e-15  # sine of an angle that turns nothing within any range


def cached_keys(model: Model) -> Optional[CachedKeys]:
    """Return how cached keys depend on positions, or None: if that is not by a rotation of pairs by
    p w_k, if values or inputs of layers depend on positions too, if other states are kept, or if
    the model computes more than its layers state.
    """
    if isinstance(model, OwnModule) or model.axes:
        return None
    states = graph_values.states_of(model, "mask", "in_place")
    names = {state.past.rpartition(".")[2] for state in states}
    if names != {"key", "value"} or overrides(model.token_encoding, "embed", "embed_next"):
        return None
    rotations: List[KeyRotation] = []
    rotation_of: Dict[str, int] = {}
    known: Dict[int, Optional[KeyRotation]] = {}
    for layer, attention in enumerate(model.attentions()):
        encoding = attention.encoding
        if not attention.states() or not overrides(encoding, "rotate"):
            continue
        if id(encoding) not in known:
            known[id(encoding)] = _rotation(attention, model.config.max_positions - 1)
        rotation = known[id(encoding)]
        if rotation is None:
            return None
        if rotation not in rotations:
            rotations.append(rotation)
        rotation_of[f"past_key_values.{layer}.key"] = rotations.index(rotation)
    return CachedKeys(rotations, rotation_of)


def _rotation(attention: Any, last: int) -> Optional[KeyRotation]:
    """Return the rotation of key heads [K,D] by positions up to `last`, or None if they depend on
    positions in another way.
    """
    encoding, (heads, size) = attention.encoding, attention.states()[0].sizes
    if encoding.key_size(attention.head_size) != attention.head_size:
        return None
    oracle = encoding.oracle()
    first, second = _matrix(oracle, heads, size, 0), _matrix(oracle, heads, size, 1)
    scale = np.diag(first)
    if np.abs(first - np.diag(scale)).max() > LARGEST or scale.min() <= 0:
        return None
    pairs = np.argwhere(np.abs(np.triu(second.T / scale[:, None], 1)) > NEGLIGIBLE)
    if len(np.unique(pairs)) < pairs.size:
        return None
    i, j = pairs.T
    angles = tuple(np.arctan2(second[j, i], second[i, i]).tolist())
    positions = sorted({p for p in (2, 3, 7, last // 3, last // 2, last) if p <= last})
    keys = np.random.default_rng(0).standard_normal((heads, 1, size))
    for single in (False, True):
        rotation = KeyRotation(tuple(zip(i.tolist(), j.tolist(), strict=True)), angles, single)
        errors = [
            np.abs(turned(rotation, scale * keys, 0, p)[:, 0] - _turned(oracle, keys[:, 0], p))
            for p in positions
        ]
        if np.max(errors, initial=0.0) <= LARGEST:
            return rotation if _is_cached(encoding, keys, positions, rotation, scale) else None
    return None


def _is_cached(
    encoding: PositionEncoding,
    keys: np.ndarray,
    positions: Sequence[int],
    rotation: KeyRotation,
    scale: np.ndarray,
) -> bool:
    """Whether the module caches keys as they are rotated, and does not rotate them when read."""
    count = len(positions)
    tokens = torch.from_numpy(keys).float().transpose(0, 1).expand(1, count, *keys.shape[::2])
    _, cached = encoding.rotate(tokens, tokens, torch.tensor([positions]))
    expected = turned(rotation, scale * keys.repeat(count, 1), 0, np.array(positions))
    error = np.abs(cached[0].transpose(0, 1).double().numpy() - expected).max()
    return bool(error <= IN_FLOAT32)


def _matrix(oracle: Any, heads: int, size: int, position: int) -> np.ndarray:
    """Return what a position makes of a key head, as a matrix [D,D] if that is linear."""
    rows = np.zeros((-(-size // heads) * heads, size))
    rows[:size] = np.eye(size)
    columns = [_turned(oracle, part, position) for part in rows.reshape(-1, heads, size)]
    return np.concatenate(columns)[:size].T


def _turned(oracle: Any, keys: np.ndarray, position: int) -> np.ndarray:
    oracle.begin([position])
    return np.asarray(oracle.rotate_key_heads(keys.copy(), position))
