"""Lowerings of ops.wave_products: one gathers a row of the table for every key; the other adds angles, so that consecutive keys need few rows."""

import onnx_ir as ir

from posenc_export.export.targets.rewriter import Rewriter, size

BLOCK = 256  # keys of a block, for each query of a call: larger blocks rotate queries less often and copy more of the table


def wave_products(rewriter: Rewriter, node: ir.Node) -> ir.Value:
    """Gather a row for each key and multiply: [B,H,S,T]. Heads are rows of one product, so that the gathered rows are read once."""
    q, key_positions, waves = node.inputs
    index = rewriter.emit("Clip", [key_positions, rewriter.constant(0), rewriter.constant(size(waves, 0) - 1)])
    rows = rewriter.emit("Unsqueeze", [rewriter.emit("Gather", [waves, index]), rewriter.constant([1])])
    as_rows = rewriter.emit("Reshape", [q, rewriter.constant([0, 1, -1, size(waves, 1)])])
    products = rewriter.emit("MatMul", [as_rows, rewriter.emit("Transpose", [rows], attributes={"perm": [0, 1, 3, 2]})])
    return rewriter.emit("Reshape", [products, rewriter.constant([0, size(q, 1), -1, 0])])


def consecutive_wave_products(rewriter: Rewriter, node: ir.Node, first: ir.Value, total: ir.Value) -> ir.Value:
    """Multiply with the keys at positions first, first + 1, ..., in blocks: [B,H,S,T].

    (x, y) times (cos((b + n) w), sin((b + n) w)) is (x cos(b w) + y sin(b w), y cos(b w) - x sin(b w)) times (cos(n w), sin(n w)). The first factor is computed
    for the first position b of each block, and all blocks share the second, the first rows of the table. Blocks grow with S, which bounds the memory for
    the first factors by that of T / BLOCK queries.

    Args:
        first: position of slot 0 of each row [B,1].
        total: number of slots T, [].
    """
    q, _, waves = node.inputs
    count, zero = size(waves, 0), rewriter.constant(0)
    queries = rewriter.emit("Squeeze", [rewriter.emit("Shape", [q], attributes={"start": 2, "end": 3})])
    block = rewriter.emit("Min", [rewriter.emit("Mul", [queries, rewriter.constant(BLOCK)]), total])
    starts = rewriter.emit("Clip", [rewriter.emit("Add", [first, rewriter.emit("Range", [zero, total, block])]), zero, rewriter.constant(count - 1)])
    of_starts = rewriter.emit("Unsqueeze", [rewriter.emit("Gather", [waves, starts]), rewriter.constant([1, 2])])
    halves = {"axis": -1, "num_outputs": 2}
    cos, sin = rewriter.emit_all("Split", [of_starts], 2, attributes=halves)
    x, y = rewriter.emit_all("Split", [rewriter.emit("Unsqueeze", [q, rewriter.constant([3])])], 2, attributes=halves)
    (x_cos, x_sin), (y_cos, y_sin) = ([rewriter.emit("Mul", [part, wave]) for wave in (cos, sin)] for part in (x, y))
    turned = rewriter.emit("Concat", [rewriter.emit("Add", [x_cos, y_sin]), rewriter.emit("Sub", [y_cos, x_sin])], attributes={"axis": -1})
    one = rewriter.constant([0])
    shared = rewriter.emit("Slice", [waves, one, rewriter.emit("Unsqueeze", [block, one]), one])
    products = rewriter.emit("MatMul", [turned, rewriter.emit("Transpose", [shared], attributes={"perm": [1, 0]})])
    in_order = rewriter.emit("Reshape", [products, rewriter.constant([0, 0, 0, -1])])
    return rewriter.emit("Slice", [in_order, one, rewriter.emit("Unsqueeze", [total, one]), rewriter.constant([3])])
