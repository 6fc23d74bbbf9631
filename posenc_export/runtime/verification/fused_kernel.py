"""A kind of fused attention node, and what it computes in float64."""

from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Tuple

import numpy as np

from posenc_export.runtime.verification.attention import (
    by_query_head,
    by_token,
    softmax,
    sums_between,
    visible,
)

ROWS = 5  # of tables whose rows are picked by distance


@dataclass(frozen=True)
class Kernel:
    """A node and the sizes of its inputs. Equal kernels have equal results.

    Args:
        heads, kv_heads, size, value_size: H, K and head sizes of keys and of values.
        scale, softcap: of scores; 0 for no cap.
        packed, sinks, scaled: whether q, k and v are one input, and inputs for sinks and for scales
            of 8-bit caches exist.
    """

    model: bytes  # the node alone as a model
    heads: int
    kv_heads: int
    size: int
    value_size: int
    rotary: int  # size r of the rotated part of a head; 0 for none
    interleaved: bool  # which entries form a pair
    window: int  # number of keys that a query sees; 0 for all
    scale: float
    softcap: float
    packed: bool
    sinks: bool
    scaled: bool
    lengths: Tuple[int, ...]  # numbers of tokens after a call, both sides of each edge
    chunk: int  # positions of a chunk; 0 for none
    range: int  # columns of the table of biases by distance; 0 for none
    row_range: int  # distances whose rows are picked; 0 for none
    row_scale: float  # factor of the rows of keys
    input_names: Tuple[str, ...]  # names of the inputs
    outputs: Tuple[str, ...]  # "y", and "weights" for sums of weights by row


class Scores(NamedTuple):
    """What scores of a row are added to and hidden by: sinks [H] or None, biases by distance
    [H,range], positions of new tokens [S], rows of queries [H,S,R] and of keys [H,R,T], the row of
    each distance, and decays of keys [H,T].
    """

    sinks: Optional[np.ndarray]
    distances: np.ndarray
    positions: np.ndarray
    query_rows: np.ndarray
    key_rows: np.ndarray
    row_of_distance: np.ndarray
    decays: np.ndarray


def attended(
    kernel: Kernel, q: np.ndarray, read: List[np.ndarray], inputs: Scores
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the output [S,H*D] of queries [H,S,D] with keys and values [K,T,D], and the sums of
    weights by row [H,S,R].
    """
    keys, values = (by_query_head(part, kernel.heads) for part in read)
    scores = kernel.scale * (q @ keys.transpose(0, 2, 1))  # [H,S,T]
    if kernel.softcap:
        scores = kernel.softcap * np.tanh(scores / kernel.softcap)
    count, total = q.shape[1], keys.shape[1]
    behind = np.arange(total - count, total)[:, None] - np.arange(total)
    if kernel.range:
        scores = scores + inputs.distances[:, np.clip(behind, 0, kernel.range - 1)]
    picked = np.zeros((count, total, ROWS))  # 1 at the row of a query and a key
    if kernel.row_range:
        picked = np.eye(ROWS)[inputs.row_of_distance[np.clip(behind, 0, kernel.row_range - 1)]]
    if "query_rows" in kernel.input_names:
        scores = scores + np.einsum("hsr,str->hst", inputs.query_rows, picked)
    if "key_rows" in kernel.input_names:
        of_keys = inputs.key_rows[:, :, :total].astype(np.float64)
        scores = scores + kernel.row_scale * np.einsum("hrt,str->hst", of_keys, picked)
    if "decays" in kernel.input_names:
        scores = scores + sums_between(inputs.decays, count, total)
    seen = visible(count, total, kernel.window)
    if kernel.chunk:
        seen = seen & (behind <= inputs.positions[:, None] % kernel.chunk)
    scores = np.where(seen, scores, -np.inf)
    sinks = -np.inf if inputs.sinks is None else inputs.sinks[:, None, None]
    weights = softmax(scores, sinks)
    return by_token(weights @ values), np.einsum("hst,str->hsr", weights, picked)
