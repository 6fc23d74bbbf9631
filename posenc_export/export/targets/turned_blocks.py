"""Target `ort`: scores of turned keys in whole blocks of slots.

Slots of compact rows have consecutive positions. The key in slot b J + j is turned for the query in slot c by (b J + j - c) d. All blocks b share the angles j d of their
keys, and the rest of the angle turns the query. Keys are cached with the two entries of a pair side by side, so that RotaryEmbedding rotates a block as one long row: its
cost per row is that of about a hundred entries.
"""

from dataclasses import dataclass
from typing import List, Optional, Sequence

import numpy as np
import onnx_ir as ir

from posenc_export.export.rewriter import Rewriter, size
from posenc_export.export.targets import ort_slots, turned

BLOCK = 64  # J, keys of a block: more of them make longer rows, fewer of them leave fewer keys outside of whole blocks


@dataclass(frozen=True)
class Turned:
    """Queries and keys of a call in which keys are turned.

    Args:
        query: [B,S,H,W], rotated as the cached keys and scaled; W is the head size of the caches.
        key: new keys [B,S,K,W].
        past: cache of keys [B,K,M,W].
        first: slot of the first new token of each row [B].
        total: number of valid slots of the longest row [1].
        drift: see turned.drift_of; None if angles are rounded.
    """

    rewriter: Rewriter
    node: ir.Node
    query: ir.Value
    key: ir.Value
    past: Optional[ir.Value]
    first: ir.Value
    total: ir.Value
    drift: Optional[ir.Value]


def of_blocks(of: Turned, blocks: ir.Value) -> ir.Value:
    """Scores [B,H,S,blocks*J] of the first `blocks` [1] blocks.

    They are computed for one token and one head after the other, whose keys stay in the cache of the processor.
    """
    rewriter, heads, kv_heads = of.rewriter, size(of.query, 2), size(of.key, 2)
    end = rewriter.emit("Mul", [blocks, rewriter.constant([BLOCK])])
    of_heads = rewriter.emit("Concat", [rewriter.constant([-1]), rewriter.emit("Shape", [of.past], attributes={"start": 2})], attributes={"axis": 0})
    past = rewriter.emit("Reshape", [of.past, of_heads])  # [B*K,M,W]

    def of_token(query: ir.Value, *waves: ir.Value) -> ir.Value:
        turned_queries = _turned_queries(of, past, blocks, query, waves[:2])
        in_block = [_for_heads(of, wave) for wave in waves[2:]]
        return rewriter.for_each([past, turned_queries, *in_block], lambda *of_head: _of_head(of, blocks, *of_head))

    by_token = rewriter.emit("Transpose", [of.query], attributes={"perm": [1, 0, 2, 3]})
    found = rewriter.for_each([by_token, *_waves_of_starts(of, blocks), *_waves_in_block(of)], of_token)  # [S,B*K,blocks,J,G]
    rows, tokens = (rewriter.emit("Shape", [of.query], attributes={"start": axis, "end": axis + 1}) for axis in (0, 1))
    by_head = _reshaped(rewriter, found, [tokens, rows, rewriter.constant([kv_heads]), end, rewriter.constant([heads // kv_heads])])
    by_row = rewriter.emit("Transpose", [by_head], attributes={"perm": [1, 2, 4, 0, 3]})
    return _reshaped(rewriter, by_row, [rows, rewriter.constant([heads]), tokens, end])


def _of_head(of: Turned, blocks: ir.Value, keys: ir.Value, query: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """Products [blocks,J,G] of keys [M,W] of one head with queries [blocks,W,G]."""
    rewriter, wide, zero, one = of.rewriter, size(of.query, 3), of.rewriter.constant([0]), of.rewriter.constant([1])
    end = rewriter.emit("Mul", [blocks, rewriter.constant([BLOCK])])
    whole = _reshaped(rewriter, rewriter.emit("Slice", [keys, zero, end, zero]), [one, blocks, one, rewriter.constant([BLOCK * wide])])
    rows = rewriter.emit("RotaryEmbedding", [whole, cos, sin], attributes={"interleaved": 1})
    return rewriter.emit("MatMul", [_reshaped(rewriter, rows, [blocks, rewriter.constant([BLOCK, wide])]), query])


def _turned_queries(of: Turned, past: ir.Value, blocks: ir.Value, query: ir.Value, waves: Sequence[ir.Value]) -> ir.Value:
    """Turn the queries [B,H,W] of one token for the first slot of each block: [B*K,blocks,W,G]."""
    rewriter, heads, wide, rotary = of.rewriter, size(of.query, 2), size(of.query, 3), 2 * size(of.node.inputs[turned.FIRST], 1)
    one = rewriter.constant([1])
    for_each = rewriter.emit("Concat", [one, one, blocks, one], attributes={"axis": 0})
    repeated = rewriter.emit("Expand", [rewriter.emit("Unsqueeze", [query, rewriter.constant([2])]), for_each])
    attributes = {"interleaved": 1, **({"rotary_embedding_dim": rotary, "num_heads": heads} if rotary < wide else {})}
    found = rewriter.emit("RotaryEmbedding", [repeated, *(rewriter.emit("Squeeze", [wave, one]) for wave in waves)], attributes=attributes)
    rows = rewriter.emit("Shape", [past], attributes={"start": 0, "end": 1})
    by_group = _reshaped(rewriter, found, [rows, rewriter.constant([heads // size(of.key, 2)]), blocks, rewriter.constant([wide])])
    return rewriter.emit("Transpose", [by_group], attributes={"perm": [0, 2, 3, 1]})


def _waves_of_starts(of: Turned, blocks: ir.Value) -> List[ir.Value]:
    """Return cos and sin [S,B,1,blocks,r/2] of the angles by which queries are turned for the first slots of blocks."""
    rewriter, zero, one = of.rewriter, of.rewriter.constant(0), of.rewriter.constant(1)
    numbers = rewriter.emit("Range", [zero, rewriter.emit("Squeeze", [blocks]), one])
    starts = rewriter.emit("Unsqueeze", [rewriter.emit("Mul", [numbers, rewriter.constant(BLOCK)]), rewriter.constant([0])])
    cos, sin = _waves(of, ort_slots.cache_position(rewriter), starts)
    return [cos, rewriter.emit("Neg", [sin])]  # turning the key is turning the query back


def _waves_in_block(of: Turned) -> List[ir.Value]:
    """Return cos and sin [S,B,1,J,W/2] of the angles of the keys of a block; entries that are not rotated get angle 0."""
    rewriter, missing = of.rewriter, size(of.query, 3) // 2 - size(of.node.inputs[turned.FIRST], 1)
    waves = _waves(of, rewriter.constant([[0]]), rewriter.constant(np.arange(BLOCK)[None]))
    if not missing:
        return waves
    pads = rewriter.constant([0, missing])
    return [rewriter.emit("Pad", [wave, pads, rewriter.constant(still, "float32"), rewriter.constant([4])]) for wave, still in zip(waves, (1, 0), strict=True)]


def _waves(of: Turned, positions: ir.Value, key_positions: ir.Value) -> List[ir.Value]:
    """Return cos and sin [S,B,1,T,r/2]."""
    assert of.drift is not None
    angles = turned.angles_between(of.rewriter, of.drift, positions, key_positions)
    by_token = of.rewriter.emit("Transpose", [angles], attributes={"perm": [2, 0, 1, 3, 4]})
    return [of.rewriter.emit(op, [by_token]) for op in ("Cos", "Sin")]


def _for_heads(of: Turned, wave: ir.Value) -> ir.Value:
    """Repeat waves [B,1,J,W/2] for the heads of each row, as rows of RotaryEmbedding: [B*K,1,1,J*W/2]."""
    rewriter = of.rewriter
    repeated = rewriter.emit("Expand", [wave, rewriter.constant([1, size(of.key, 2), 1, 1])])
    return rewriter.emit("Reshape", [repeated, rewriter.constant([-1, 1, 1, BLOCK * size(of.query, 3) // 2])])


def _reshaped(rewriter: Rewriter, value: ir.Value, sizes: Sequence[ir.Value]) -> ir.Value:
    """Reshape to sizes, which may be 0."""
    return rewriter.emit("Reshape", [value, rewriter.emit("Concat", sizes, attributes={"axis": 0})], attributes={"allowzero": 1})
