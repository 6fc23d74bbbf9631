"""Rows of large tables of rotations, computed in the graph from two small ones
(encodings/shared/tables.py). A table of 32,768 positions and 128 pairs becomes a 43rd of its size.
"""

from functools import partial
from typing import Any, Mapping, Optional

import onnx_ir as ir

from posenc_export.export.targets.builder import FLOAT, Builder
from posenc_export.export.targets.rewriter import NodeLowering
from posenc_export.shared.numerics import FINE, LEVELS


def rows(op: Builder, table: ir.Value, positions: ir.Value) -> Optional[ir.Value]:
    """Return the rows of a table at positions of at least 0, float32; None for one of one level."""
    levels = op.levels.get(str(table.name))
    if levels is None:
        return None
    coarse, fine = (
        op.weight(f"{levels.name}.{level}", partial(getattr, levels.tables, level))
        for level in LEVELS
    )
    cos, sin = op.several(2, "Split", op.Gather(coarse, op.Div(positions, FINE)), axis=-1, **TWO)
    of_fine = op.several(2, "Split", op.Gather(fine, op.Mod(positions, FINE)), axis=-1, **TWO)
    if levels.sines:
        wave = op.Add(op.Mul(sin, of_fine[0]), op.Mul(cos, of_fine[1]))
    else:
        wave = op.Sub(op.Mul(cos, of_fine[0]), op.Mul(sin, of_fine[1]))
    return op.Cast(wave, to=FLOAT)


def gathered(op: Builder, node: ir.Node) -> Optional[ir.Value]:
    """Lower a Gather of the rows of a table at positions."""
    table, positions = node.inputs
    assert table is not None and positions is not None
    return rows(op, table, positions)


TWO: Any = {"num_outputs": 2}
GATHERS: Mapping[str, NodeLowering] = {"Gather": gathered}
