"""Check "indices": slots, positions, indices of tables and masks of an ONNX graph are those that
its encodings declare, for all sizes, lengths and positions. The solver z3 proves it.
"""

import itertools
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
from posenc_export.shared.foreign import brief
from posenc_export.shared.places import evaluate

UNIT = "claims"
SOLVER = "z3"
ROWS = 20  # input of CachedAttention: the row of each distance


def check(folder: Path, model: Model, log: Optional[Path] = None) -> Check:
    """Prove the integer part of a graph. OSError: a file cannot be read, or the log be written.

    log: an empty folder that gets each question to the solver, with its answer, in SMT-LIB 2.
    """
    manifest, findings = model.manifest, Findings()
    if manifest.places is None:
        findings.skipped["positions"] = "declared by artefacts of later versions; export again"
    elif find_spec(SOLVER) is None:
        how = "pip install 'posenc-export[prove]'"
        findings.skipped["positions"] = f"not proved here, as {SOLVER} is not installed; {how}"
    proves = not findings.skipped
    if described.is_read(manifest):
        findings.skipped["module"] = described.UNDECLARED
    if manifest.in_torch:
        if proves:
            _of_torch(folder, manifest, findings, log)
    else:
        part = integer_part(onnx_nodes.read(folder / "model.onnx"))
        if "encoder_attention_mask" in part.uses:
            findings.skipped["encoder_attention_mask"] = "the mask of an encoder's tokens, an input"
        _compare_rows(part, manifest, folder, findings)
        if proves:
            from posenc_export.runtime.verification import any_call, claims  # need the solver

            claims.Claims(part, any_call.AnyCall(manifest, log), folder, findings).prove()
    return Check(findings.compared, UNIT, 0.0, findings.failures, findings.skipped)


def _of_torch(
    folder: Path, manifest: Manifest, findings: Findings, log: Optional[Path] = None
) -> None:
    """Prove the integer part of a file of torch: of TorchScript for calls with one row or several,
    and one token or several, in which it takes different branches.
    """
    from posenc_export.runtime.verification import any_call, claims, torch_graph
    from posenc_export.runtime.verification.solver import MALFORMED, reason_of

    script = manifest.target == "torchscript"
    graph = torch_graph.TorchGraph(folder, manifest)
    for rows, columns in itertools.product((2, 1), (3, 1)) if script else [(2, 3)]:
        call = any_call.AnyCall(manifest, log)
        pairs = ((call.rows, rows), (call.columns, columns)) if script else ()
        call.solver.assumed += [n == 1 if one == 1 else n >= 2 for n, one in pairs]
        try:
            part, assumed = graph.part(rows, columns)
        except IndexError as error:
            rule = f"expected a call with {rows} rows and {columns} tokens to stay within its slots"
            findings.failures["calls"] = f"{rule}, got {brief(error)}"
            return
        except (*MALFORMED, RuntimeError) as reason:
            why = brief(reason) if isinstance(reason, RuntimeError) else reason_of(reason)
            findings.skipped["positions"] = f"{claims.OPEN}{why}"
            return
        claims.Claims(part, call, folder, findings).prove()
        if assumed:
            why = f"{assumed} that sizes of computed numbers choose are taken as in one call"
            findings.skipped["branches"] = why


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
