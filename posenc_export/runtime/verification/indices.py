"""Check "indices": slots, positions, indices of tables and masks of an ONNX graph, evaluated
without its weights at all positions and around every edge.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Set, Tuple

import numpy as np

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs import onnx_nodes
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import bias_tables, described, integer_calls, integer_rules
from posenc_export.runtime.verification.integer_graph import (
    IntegerPart,
    Program,
    Use,
    integer_part,
)
from posenc_export.runtime.verification.integer_values import Findings, Role, Tally
from posenc_export.shared.numerics import LEVELS

UNIT = "values"
# By operator and input that reads a value, what it must be.
STRICT = {
    ("RotaryEmbedding", 3): (*integer_rules.POSITIONS, "slots of tokens"),
    ("TensorScatter", 2): ("first slots",),
    ("GroupQueryAttention", 5): ("last slots",),
    ("GroupQueryAttention", 6): (integer_rules.LONGEST,),
    ("GroupQueryAttention", 9): ("slots of tokens",),
    (OPERATOR, 5): ("last slots",),
    (OPERATOR, 9): ("positions of tokens, -1 for none",),
    (OPERATOR, 15): ("slots of tokens",),
    ("output present_positions", -1): ("positions of keys, -1 for none",),
}
MASKS = (("Attention", 3), ("GroupQueryAttention", 10), (OPERATOR, 10))
PICKS = ("GatherElements",)
SIZES = ("Reshape", "Expand", "Slice", "ConstantOfShape", "Pad", "Range", "Tile")
PROBES = (
    integer_calls.Call(np.array([0, 1]), np.array([2, 1]), np.array([2, 1]), 2, 2),
    integer_calls.Call(np.array([0, 1, 0]), np.array([2, 1, 2]), np.array([1, 1, 1]), 1, 2),
)


def check(folder: Path, model: Model) -> Check:
    """Compare the integer part of a graph with its description. OSError: a file cannot be read."""
    manifest = model.manifest
    if not (folder / "model.onnx").exists():
        return Check(0, UNIT, skipped={manifest.target: "the file is no graph of ONNX nodes"})
    if described.is_read(manifest):
        return described.unproved(UNIT)
    part = integer_part(onnx_nodes.read(folder / "model.onnx"))
    findings = Findings()
    if "encoder_attention_mask" in part.uses:
        findings.skipped["encoder_attention_mask"] = "the mask of an encoder's tokens, an input"
    _compare_attributes(part, manifest, findings)
    biases = bias_tables.tables(manifest, folder)
    bias_tables.compare(part, biases, folder, findings)
    bias_tables.compare_rows(part, manifest, folder, findings)
    for roles, values in _programs(part, manifest, folder, findings):
        _evaluate(values, manifest, [Tally(role, biases) for role in roles], findings)
    return Check(findings.compared, UNIT, 0.0, findings.failures, findings.skipped)


def _compare_attributes(part: IntegerPart, manifest: Manifest, findings: Findings) -> None:
    parts = described.attentions(manifest)
    for number, (node, layer) in enumerate(part.attention):
        place = f"{node.operator} {number}"
        if not 0 <= layer < len(parts):
            findings.failures[place] = f"layer {layer}; the config describes {len(parts)} layers"
            continue
        by_mask = manifest.signature == "mask"
        expected = described.attributes(parts[layer], node, by_mask)
        for name, wanted in expected.items():
            value = node.attributes.get(name)
            findings.compared += 1
            close = False
            if isinstance(value, float) and isinstance(wanted, float):
                close = math.isclose(value, wanted, rel_tol=1e-6)  # equal in float32
            if value != wanted and not close:
                findings.failures[f"{place} of layer {layer}"] = f"{name}: {value}, not {wanted}"
        for name in node.attributes.keys() - expected.keys() - described.FREE:
            findings.skipped[f"{place} of layer {layer}, {name}"] = "an attribute without a rule"


def _programs(
    part: IntegerPart, manifest: Manifest, folder: Path, findings: Findings
) -> Iterator[Tuple[Tuple[Role, ...], Program]]:
    """Yield the programs that compute values of a part, with the role of each output."""
    reads = {name: _inputs_of(part, name) for name in dict.fromkeys((*part.uses, *part.tables))}
    names = []
    for name, inputs in reads.items():
        if inputs & {"encoder_attention_mask"}:
            findings.skipped[_place(part, name)] = "depends on the encoder's mask alone"
        elif any(not part.free.get(value, True) for value in inputs):
            findings.skipped[_place(part, name)] = "depends on the shape of a computed value"
        else:
            names.append(name)
    if not names:
        return
    whole = Program(part, names, folder)
    places = [integer_calls.placed(manifest, call) for call in PROBES]
    probes = [whole.run(place.feeds) for place in places]
    # Rows, new tokens, keys, and keys in caches of windows, each of both calls.
    both = [(*place.queries.shape, place.keys.shape[1]) for place in places]
    if any(state.window for state in manifest.states):
        both = [(*sizes, place.window_slots) for sizes, place in zip(both, places, strict=True)]
    sizes = list(zip(*both, strict=True))
    with_keys: Dict[bool, List[Tuple[str, Role]]] = {False: [], True: []}
    for name, first, second in zip(names, *probes, strict=True):
        axes = integer_rules.layout(first, second, sizes)
        in_windows, axes = "w" in axes, tuple("t" if axis == "w" else axis for axis in axes)
        for role in _roles(part, manifest, name, axes, first, findings):
            with_keys["t" in axes].append((name, replace(role, in_windows=in_windows)))
    for chosen in with_keys.values():
        if chosen:
            outputs = [name for name, _ in chosen]
            yield tuple(role for _, role in chosen), Program(part, outputs, folder)


def _inputs_of(part: IntegerPart, name: str) -> Set[str]:
    needed = {name}
    for node in reversed(part.nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
    return needed


def _place(part: IntegerPart, name: str) -> str:
    """Return the name of a value in the certificate, with the node that reads it."""
    use = next(iter(part.uses.get(name, [])), Use("Gather", 1))
    reader = use.operator if use.input < 0 else f"{use.operator} input {use.input}"
    return f"{name} ({reader})"[:128]


def _roles(
    part: IntegerPart,
    manifest: Manifest,
    name: str,
    axes: integer_rules.Layout,
    probe: np.ndarray,
    findings: Findings,
) -> Iterator[Role]:
    """Yield the roles of a value; record the reason in `findings` if it has none."""
    uses, place = part.uses.get(name, []), _place(part, name)
    whole = bool(np.isin(probe, (0, 1)).all())  # 1 for visible keys
    floats = probe.dtype.kind == "f" and not whole
    hides = floats and bool((probe.astype(np.float32) < integer_rules.HIDDEN).any())
    cells = "s" in axes and "t" in axes
    readers = part.layers_after(name)
    masks = cells and any((use.operator, use.input) in MASKS for use in uses)
    if hides and not cells:
        findings.skipped[place] = "a mask with further columns, such as those of sinks"
    if masks or (hides and cells):
        layers = sorted({use.layer for use in uses if use.layer >= 0})
        windows = tuple(sorted(_windows(part, name).items()))
        yield Role(place, axes, tuple(layers) or (0,), windows)
    for table in part.tables.get(name, []):
        rules = _of_table(manifest, table.name, table.shape[0], axes, readers)
        yield Role(f"{place} of {table.name}"[:128], axes, allowed=rules, rows=table.shape[0])
    if not uses or masks or hides:
        return
    if floats or all(use.operator in SIZES for use in uses):
        size = all(use.operator in SIZES for use in uses)
        findings.skipped[place] = "a size" if size else "numbers computed from positions"
        return
    known = [use for use in uses if use.on_state or use.operator != "TensorScatter"]
    keys = [(use, (use.operator, use.input)) for use in known]
    strict = [integer_rules.in_windows(manifest, u, STRICT[k]) for u, k in keys if k in STRICT]
    strict += [integer_rules.selected(manifest) for _, key in keys if key == ("GatherND", 1)]
    picks = integer_rules.allowed(manifest, axes, readers)
    by_cell = [picks for use in uses if use.operator in PICKS]
    yield Role(place, axes, allowed=next(iter((*strict, *by_cell)), ()))


def _of_table(
    manifest: Manifest, name: str, rows: int, axes: integer_rules.Layout, readers: Sequence[int]
) -> Tuple[str, ...]:
    """Return the rules of which the index of a table follows one."""
    if (level := name.rpartition(".")[2]) in LEVELS:
        return integer_rules.by_position(manifest, level)
    own = bool(manifest.packages)  # encodings that may index by a formula of their own
    cells = "s" in axes and "t" in axes
    if not cells and integer_rules.has_row_by_position(manifest, rows) and not own:
        return integer_rules.by_position(manifest)
    return integer_rules.allowed(manifest, axes, readers)


def _windows(part: IntegerPart, mask: str) -> Dict[int, int]:
    """Return by layer the window of the GroupQueryAttention nodes that read a mask; 0 for none."""
    return {
        layer: max(int(node.attributes.get("local_window_size", 0)), 0)
        for node, layer in part.attention
        if node.operator in ("GroupQueryAttention", OPERATOR)
        and mask in [part.casts.get(name, name) for name in node.inputs[10:11]]
    }


def _evaluate(
    values: Program, manifest: Manifest, tallies: Sequence[Tally], findings: Findings
) -> None:
    """Run a program on all calls, and compare its outputs with their roles."""
    keys = any("t" in tally.role.axes for tally in tallies)
    # Values for each query and key.
    shapes = [[int(axis) for axis in tally.role.axes if axis not in "bst"] for tally in tallies]
    heads = max(map(math.prod, shapes)) if keys else 1
    calls = [] if keys else [integer_calls.whole_range(manifest)]
    for call in (*calls, *integer_calls.calls(manifest, heads)):
        places = integer_calls.placed(manifest, call)
        for tally, value in zip(tallies, values.run(places.feeds), strict=True):
            findings.compared += value.size
            tally.add(manifest, value, places)
    for tally in tallies:
        tally.finish(findings)
