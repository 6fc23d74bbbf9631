"""Lowerings of ops.wave_products: one gathers a row of the table for every key; the other adds angles, so that consecutive keys need few rows."""

import onnx_ir as ir

from posenc_export.export.targets.rewriter import Builder, size
from posenc_export.ops.graph import WaveProducts

BLOCK = 256  # keys of a block, for each query of a call: larger blocks rotate queries less often and copy more of the table


def wave_products(op: Builder, node: WaveProducts) -> ir.Value:
    """Gather a row for each key and multiply: [B,H,S,T]. Heads are rows of one product, so that the gathered rows are read once."""
    q, waves = node.q, node.waves
    index = op.Clip(node.key_positions, 0, size(waves, 0) - 1)
    rows = op.Unsqueeze(op.Gather(waves, index), [1])
    as_rows = op.Reshape(q, [0, 1, -1, size(waves, 1)])
    products = op.MatMul(as_rows, op.Transpose(rows, perm=[0, 1, 3, 2]))
    return op.Reshape(products, [0, size(q, 1), -1, 0])


def consecutive_wave_products(op: Builder, node: WaveProducts, first: ir.Value, total: ir.Value) -> ir.Value:
    """Multiply with the keys at positions first, first + 1, ..., in blocks: [B,H,S,T].

    (x, y) times (cos((b + n) w), sin((b + n) w)) is (x cos(b w) + y sin(b w), y cos(b w) - x sin(b w)) times (cos(n w), sin(n w)). The first factor is computed
    for the first position b of each block, and all blocks share the second, the first rows of the table. Blocks grow with S, which bounds the memory for
    the first factors by that of T / BLOCK queries.

    Args:
        first: position of slot 0 of each row [B,1].
        total: number of slots T, [].
    """
    q, waves = node.q, node.waves
    count, zero = size(waves, 0), op.constant(0)
    queries = op.Squeeze(op.Shape(q, start=2, end=3))
    block = op.Min(op.Mul(queries, BLOCK), total)
    starts = op.Clip(op.Add(first, op.Range(zero, total, block)), zero, count - 1)
    of_starts = op.Unsqueeze(op.Gather(waves, starts), [1, 2])
    halves = {"axis": -1, "num_outputs": 2}
    cos, sin = op.several(2, "Split", of_starts, **halves)
    x, y = op.several(2, "Split", op.Unsqueeze(q, [3]), **halves)
    (x_cos, x_sin), (y_cos, y_sin) = ([op.Mul(part, wave) for wave in (cos, sin)] for part in (x, y))
    turned = op.Concat(op.Add(x_cos, y_sin), op.Sub(y_cos, x_sin), axis=-1)
    one = op.constant([0])
    shared = op.Slice(waves, one, op.Unsqueeze(block, one), one)
    products = op.MatMul(turned, op.Transpose(shared, perm=[1, 0]))
    in_order = op.Reshape(products, [0, 0, 0, -1])
    return op.Slice(in_order, one, op.Unsqueeze(total, one), [3])
