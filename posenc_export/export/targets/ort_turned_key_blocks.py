"""Target `ort`: scores of turned keys in compact rows.

Slots of compact rows have consecutive positions. The key in slot b J + j is turned for the query in slot c by (b J + j - c) d. All blocks b share the angles j d of their
keys, and the rest of the angle turns the query. Keys are cached with the two entries of a pair side by side, so that RotaryEmbedding rotates a block as one long row: its
cost per row is that of about a hundred entries. The slots after the whole blocks, with those of all new tokens, are turned by angles of their own.

Shapes: W head size of the caches, G query heads of a kv head, L slots after the whole blocks.
"""

from dataclasses import dataclass
from typing import List, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.export.targets import ort_slots, turned_keys
from posenc_export.export.targets.rewriter import Rewriter, size

BLOCK = 64  # J: more keys make longer rows, fewer of them leave fewer keys outside of whole blocks


@dataclass(frozen=True)
class Turned:
    """Queries and keys of a call in which keys are turned.

    Args:
        query: [B,S,H,W], rotated as the cached keys and scaled.
        key: new keys [B,S,K,W].
        past: cache of keys [B,K,M,W].
        first: slot of the first new token of each row [B].
        total: number of valid slots of the longest row [1].
        rotary: entries r of a head that are rotated.
    """

    rewriter: Rewriter
    query: ir.Value
    key: ir.Value
    past: Optional[ir.Value]
    first: ir.Value
    total: ir.Value
    rotary: int

    def from_slot(self, start: ir.Value) -> ir.Value:
        """Return the keys from slot `start` [1] on: [B,K,L,W]. GroupQueryAttention writes new keys later; here they are written into a copy."""
        cached = self.rewriter.emit("Slice", [self.past, start, self.total, self.rewriter.constant([2])])
        update = self.rewriter.emit("Transpose", [self.key], attributes={"perm": [0, 2, 1, 3]})
        return self.rewriter.emit("TensorScatter", [cached, update, self.rewriter.emit("Sub", [self.first, start])], attributes={"axis": 2})

    def rotated(self, heads: ir.Value, count: int, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """Rotate `count` heads [B,N,T,W] by angles [B,T,r/2]."""
        partial = {"rotary_embedding_dim": self.rotary, "num_heads": count} if self.rotary < size(self.query, 3) else {}
        return self.rewriter.emit("RotaryEmbedding", [heads, cos, sin], attributes={"interleaved": 1, **partial})


@dataclass(frozen=True)
class Blocks:
    """The whole blocks before all new tokens.

    Args:
        count, end: number of blocks, and the first slot after them [1].
        past: cache of keys [B*K,M,W].
    """

    of: Turned
    count: ir.Value
    end: ir.Value
    past: ir.Value


def scores(of: Turned, drift: ir.Value) -> ir.Value:
    """Scores of all keys [B,H,S,T], one token after the other.

    Args:
        drift: see turned_keys.drift_of.
    """
    rewriter, heads, kv_heads = of.rewriter, size(of.query, 2), size(of.key, 2)
    count = rewriter.emit("Div", [rewriter.emit("ReduceMin", [of.first]), rewriter.constant([BLOCK])])
    flat = _joined(rewriter, rewriter.constant([-1]), rewriter.emit("Shape", [of.past], attributes={"start": 2}))
    blocks = Blocks(of, count, rewriter.emit("Mul", [count, rewriter.constant([BLOCK])]), rewriter.emit("Reshape", [of.past, flat]))
    last = of.from_slot(blocks.end)
    parts = _joined(rewriter, count, rewriter.constant([BLOCK]), rewriter.emit("Sub", [of.total, blocks.end]))

    def of_token(query: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """Scores [B,K,T,G] of queries [B,H,W]."""
        waves = [rewriter.emit_all("Split", [wave, parts], 3, attributes={"axis": 1}) for wave in (cos, sin)]
        for_starts, in_block, after = ([wave[index] for wave in waves] for index in range(3))
        further = of.rotated(last, kv_heads, *after)
        grouped = rewriter.emit("Reshape", [query, rewriter.constant([0, kv_heads, heads // kv_heads, -1])])
        products = rewriter.emit("MatMul", [further, rewriter.emit("Transpose", [grouped], attributes={"perm": [0, 1, 3, 2]})])
        return rewriter.emit("Concat", [_in_blocks(blocks, query, for_starts, in_block), products], attributes={"axis": 2})

    by_token = rewriter.emit("Transpose", [of.query], attributes={"perm": [1, 0, 2, 3]})
    found = rewriter.for_each([by_token, *_waves(blocks, drift)], of_token)  # [S,B,K,T,G]
    by_row = rewriter.emit("Transpose", [found], attributes={"perm": [1, 2, 4, 0, 3]})
    return rewriter.emit("Reshape", [by_row, _joined(rewriter, rewriter.constant([0, heads, -1]), of.total)])


def _waves(blocks: Blocks, drift: ir.Value) -> List[ir.Value]:
    """Return cos and sin [S,B,blocks+J+L,r/2] of the angles by which queries are turned for each block, keys inside of a block, and the keys after the blocks."""
    of, rewriter = blocks.of, blocks.of.rewriter
    zero, start, total = rewriter.constant(0), rewriter.emit("Squeeze", [blocks.end]), rewriter.emit("Squeeze", [of.total])
    slots = rewriter.emit("Unsqueeze", [rewriter.emit("Transpose", [ort_slots.cache_position(rewriter)], attributes={"perm": [1, 0]}), rewriter.constant([2])])
    distances = [
        rewriter.emit("Sub", [slots, rewriter.emit("Range", [zero, start, rewriter.constant(BLOCK)])]),
        rewriter.emit("Expand", [rewriter.constant(np.arange(BLOCK)), rewriter.emit("Shape", [slots])]),
        rewriter.emit("Sub", [rewriter.emit("Range", [start, total, rewriter.constant(1)]), slots]),
    ]
    all_distances = rewriter.emit("Cast", [rewriter.emit("Concat", distances, attributes={"axis": 2})], attributes=turned_keys.DOUBLE)
    by_token = rewriter.emit("Unsqueeze", [rewriter.emit("Transpose", [drift], attributes={"perm": [1, 0, 2]}), rewriter.constant([2])])
    angles = turned_keys.in_radians(rewriter, rewriter.emit("Mul", [rewriter.emit("Unsqueeze", [all_distances, rewriter.constant([3])]), by_token]))
    return [rewriter.emit(op, [angles]) for op in ("Cos", "Sin")]


def _in_blocks(blocks: Blocks, query: ir.Value, for_starts: List[ir.Value], in_block: List[ir.Value]) -> ir.Value:
    """Scores [B,K,blocks*J,G] of queries [B,H,W], one head after the other, whose keys stay in the cache of the processor."""
    of, rewriter, count = blocks.of, blocks.of.rewriter, blocks.count
    heads, kv_heads, wide = size(of.query, 2), size(of.key, 2), size(of.query, 3)
    zero, one, per_kv_head = rewriter.constant([0]), rewriter.constant([1]), rewriter.constant([heads // kv_heads])
    for_blocks = _joined(rewriter, one, one, count, one)
    repeated = rewriter.emit("Expand", [rewriter.emit("Unsqueeze", [query, rewriter.constant([2])]), for_blocks])
    flat = rewriter.emit("Shape", [blocks.past], attributes={"start": 0, "end": 1})
    grouped = _reshaped(rewriter, of.rotated(repeated, heads, *for_starts), _joined(rewriter, flat, per_kv_head, count, rewriter.constant([wide])))
    queries = rewriter.emit("Transpose", [grouped], attributes={"perm": [0, 2, 3, 1]})
    as_rows, as_keys = _joined(rewriter, one, count, one, rewriter.constant([BLOCK * wide])), _joined(rewriter, count, rewriter.constant([BLOCK, wide]))

    def of_head(keys: ir.Value, query: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
        """Products [blocks,J,G] of keys [M,W] with queries [blocks,W,G]."""
        whole = rewriter.emit("Slice", [keys, zero, blocks.end, zero])
        rows = rewriter.emit("RotaryEmbedding", [_reshaped(rewriter, whole, as_rows), cos, sin], attributes={"interleaved": 1})
        return rewriter.emit("MatMul", [_reshaped(rewriter, rows, as_keys), query])

    found = rewriter.for_each([blocks.past, queries, *_for_heads(of, in_block)], of_head)
    rows = rewriter.emit("Shape", [query], attributes={"start": 0, "end": 1})
    return _reshaped(rewriter, found, _joined(rewriter, rows, rewriter.constant([kv_heads]), blocks.end, per_kv_head))


def _for_heads(of: Turned, waves: List[ir.Value]) -> List[ir.Value]:
    """Return cos and sin [B,J,r/2] as rows of RotaryEmbedding for the heads of each row: [B*K,1,1,J*W/2]. Entries that are not rotated get angle 0."""
    rewriter, missing, half = of.rewriter, (size(of.query, 3) - of.rotary) // 2, size(of.query, 3) // 2
    if missing:
        pads = rewriter.constant([0, missing])
        waves = [rewriter.emit("Pad", [wave, pads, rewriter.constant(still, "float32"), rewriter.constant([2])]) for wave, still in zip(waves, (1, 0), strict=True)]
    by_head = [rewriter.emit("Expand", [rewriter.emit("Unsqueeze", [wave, rewriter.constant([1])]), rewriter.constant([1, size(of.key, 2), 1, 1])]) for wave in waves]
    return [rewriter.emit("Reshape", [wave, rewriter.constant([-1, 1, 1, BLOCK * half])]) for wave in by_head]


def _joined(rewriter: Rewriter, *sizes: ir.Value) -> ir.Value:
    return rewriter.emit("Concat", sizes, attributes={"axis": 0})


def _reshaped(rewriter: Rewriter, value: ir.Value, shape: ir.Value) -> ir.Value:
    """Reshape to sizes that may be 0."""
    return rewriter.emit("Reshape", [value, shape], attributes={"allowzero": 1})
