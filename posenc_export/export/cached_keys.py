"""How cached keys depend on the positions of their tokens, measured with the oracles."""

from typing import Any, Dict, List, Optional

import numpy as np
import torch

from posenc_export.encodings.shared.combined import overrides
from posenc_export.export import graph_values
from posenc_export.export.read_module import ReadModule
from posenc_export.export.signatures import Model
from posenc_export.runtime.artefact.records import CachedKeys, KeyRotation
from posenc_export.runtime.session.rows import rotated

LARGEST = 1e-9  # largest difference from a rotation by p w_k, by rounding in float64
IN_FLOAT32 = 1e-4  # of rotated standard normal keys; others differ by about 1
AT_ONCE = 1024  # positions
NEGLIGIBLE = 1e-15  # sine of an angle that turns nothing within any range


def cached_keys(model: Model) -> Optional[CachedKeys]:
    """Return how cached keys depend on positions. None unless positions p only rotate pairs by
    p w_k, and neither values, inputs of layers nor other states depend on them; and for a module
    that was read, which states no encoding.
    """
    if isinstance(model, ReadModule) or model.axes:
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
        if not rotation.pairs:  # only queries depend on the position
            continue
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
    at_0, at_1 = (_matrix(oracle, heads, size, position) for position in (0, 1))
    scale = np.diag(at_0)
    if np.abs(at_0 - np.diag(scale)).max() > LARGEST or scale.min() <= 0:
        return None
    pairs = np.argwhere(np.abs(np.triu(at_1.T / scale[:, None], 1)) > NEGLIGIBLE)
    if len(np.unique(pairs)) < pairs.size:
        return None
    i, j = pairs.T
    angles = tuple(np.arctan2(at_1[j, i], at_1[i, i]).tolist())
    positions = sorted({p for p in (2, 3, 7, last // 3, last // 2, last) if p <= last})
    keys = np.random.default_rng(0).standard_normal((heads, 1, size))
    for single in (False, True):
        rotation = KeyRotation(tuple(zip(i.tolist(), j.tolist(), strict=True)), angles, single)
        errors = [
            np.abs(
                rotated(rotation, scale * keys, 0, p)[:, 0]
                - oracle.rotate_key_heads(keys[:, 0].copy(), p)
            )
            for p in positions
        ]
        if np.max(errors, initial=0.0) <= LARGEST:
            return rotation if _is_cached(attention, rotation, scale, last) else None
    return None


def _is_cached(attention: Any, rotation: KeyRotation, scale: np.ndarray, last: int) -> bool:
    """Whether the module caches keys as every position up to `last` rotates them."""
    heads, size = attention.states()[0].sizes
    keys = np.random.default_rng(1).standard_normal((heads, 1, size))
    for first in range(0, last + 1, AT_ONCE):
        positions = np.arange(first, min(first + AT_ONCE, last + 1))
        tokens = torch.from_numpy(keys).float().transpose(0, 1).repeat(len(positions), 1, 1)
        rows = tokens.unsqueeze(0), torch.from_numpy(positions).unsqueeze(0)
        _, cached = attention.encoding.rotate(rows[0], rows[0], rows[1])
        expected = rotated(rotation, scale * keys.repeat(len(positions), 1), 0, positions)
        if np.abs(cached[0].transpose(0, 1).double().numpy() - expected).max() > IN_FLOAT32:
            return False
    return True


def _matrix(oracle: Any, heads: int, size: int, position: int) -> np.ndarray:
    """Return the matrix [D,D] by which a position maps a key head, if it is linear. Basis vectors
    take the places of heads.
    """
    rows = np.zeros((-(-size // heads) * heads, size))
    rows[:size] = np.eye(size)
    parts = rows.reshape(-1, heads, size)
    columns = [np.asarray(oracle.rotate_key_heads(part.copy(), position)) for part in parts]
    return np.concatenate(columns)[:size].T
