"""Check "indices": slots, positions, indices of tables and masks of an ONNX graph are those that
its encodings declare, for all sizes, lengths and positions. The solver z3 proves it.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Optional

import numpy as np

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs import onnx_nodes
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import described
from posenc_export.runtime.verification.integer_graph import Findings, IntegerPart, integer_part
from posenc_export.shared.places import evaluate

UNIT = "claims"
SOLVER = "z3"
ROWS = 20  # input of CachedAttention: the row of each distance


def check(folder: Path, model: Model, log: Optional[Path] = None) -> Check:
    """Prove the integer part of a graph. OSError: a file cannot be read, or the log be written.

    log: an empty folder that gets each question to the solver, with its answer, in SMT-LIB 2.
    """
    manifest, findings = model.manifest, Findings()
    if manifest.target == "torchscript":
        findings.skipped["positions"] = "not proved in TorchScript; export for pt2 or onnx"
    elif manifest.places is None:
        findings.skipped["positions"] = "declared by artefacts of later versions; export again"
    elif find_spec(SOLVER) is None:
        how = "pip install 'posenc-export[prove]'"
        findings.skipped["positions"] = f"not proved here, as {SOLVER} is not installed; {how}"
    proves = not findings.skipped
    if described.is_read(manifest):
        findings.skipped["module"] = described.UNDECLARED
    part = _part(folder, manifest, findings) if proves or not manifest.in_torch else None
    if part and "encoder_attention_mask" in part.uses:
        findings.skipped["encoder_attention_mask"] = "the mask of an encoder's tokens, an input"
    if part and not manifest.in_torch:
        _compare_rows(part, manifest, folder, findings)
    if part and proves:
        from posenc_export.runtime.verification import any_call, claims  # need the solver

        claims.Claims(part, any_call.AnyCall(manifest, log), folder, findings).prove()
    return Check(findings.compared, UNIT, 0.0, findings.failures, findings.skipped)


def _part(folder: Path, manifest: Manifest, findings: Findings) -> Optional[IntegerPart]:
    """Return the integer part of a graph, or None and why one of torch is not read."""
    if not manifest.in_torch:
        return integer_part(onnx_nodes.read_nodes(folder / "model.onnx"))
    from posenc_export.runtime.verification import claims, symbolic, torch_graph

    try:
        return torch_graph.part_of_program(folder, manifest)
    except symbolic.MALFORMED as reason:
        findings.skipped["positions"] = f"{claims.OPEN}{symbolic.reason_of(reason)}"
        return None


def _compare_rows(part: IntegerPart, manifest: Manifest, folder: Path, findings: Findings) -> None:
    """Compare the constants of rows by distance, which CachedAttention reads, with what encodings
    declare.
    """
    if described.is_read(manifest):
        return
    own = [(node, layer) for node, layer in reversed(part.attention) if node.operator == OPERATOR]
    layers = {name: layer for node, layer in own for name in node.inputs[ROWS : ROWS + 1] if name}
    declared = manifest.places.rows if manifest.places else []
    distances = np.arange(manifest.max_positions)
    for name, layer in layers.items():
        place, stored = f"{name} ({OPERATOR} input {ROWS})", part.graph.constants.get(name)
        rules = [rule for rule in (declared[layer] if layer < len(declared) else []) if "k" in rule]
        if not rules:
            findings.skipped[place] = "rows that no rule is declared for"
            continue
        if stored is None or len(stored.shape) != 1 or not stored.shape[0]:
            findings.failures[place] = "expected a row for each distance"
            continue
        rows = stored.array(folder)[np.minimum(distances, stored.shape[0] - 1)]
        wrong = [rows != evaluate(rule, {"q": distances, "k": 0}) for rule in rules]
        findings.compared += 1
        if all(w.any() for w in wrong):
            at = int(np.flatnonzero(wrong[0])[0])
            findings.failures[place] = f"row of distance {at}: got {rows[at]}"
