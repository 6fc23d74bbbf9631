"""The checks of a proof that need the artefact alone (docs/reliability.md)."""

from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Callable, Mapping

import numpy as np

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.graphs.onnx_nodes import read_nodes
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import described, proof
from posenc_export.runtime.verification.conformance import geometry, suite
from posenc_export.runtime.verification.constants import Constants, digests_of
from posenc_export.runtime.verification.integer_graph import Findings, IntegerPart, integer_part
from posenc_export.shared.places import evaluate
from posenc_export.shared.progress import Progress, silent
from posenc_export.shared.tables import counted

KERNELS = "contracts of kernels"
SOLVER = "z3"
ROWS = 20  # input of CachedAttention: the row of each distance


def numbers(folder: Path, model: Model, say: Progress = silent) -> Check:
    """Compare the digests of the constants and nodes of a graph with those of the manifest."""
    wanted, file = model.manifest.constants, graph_file(model.manifest)
    if not wanted:
        why = "no digests: a torch program, or an artefact that was not verified when exported"
        return Check(0, "numbers", skipped={file: why})
    try:
        constants = Constants(read_nodes(folder / file), folder)
        digests = digests_of(constants)
    except ValueError as error:
        return Check(0, "numbers", failures={file: str(error)})
    if wanted.keys().isdisjoint(constants.stored):
        return Check(0, "numbers", skipped={file: "digests of an earlier version; export again"})
    differing = [name for name in [*wanted, *digests] if wanted.get(name) != digests.get(name)]
    why = "other numbers, or other nodes, than in the digest of the export"
    return Check(constants.count, "numbers", failures=dict.fromkeys(differing, why))


def operators(folder: Path, model: Model, say: Progress = silent) -> Check | None:
    """Compare the kernels of this machine that run a graph with their contracts (conformance/)."""
    if graph_file(model.manifest) != "model.onnx" or model.provider != "cpu":
        return None
    kernels = geometry.kernels(folder, model.manifest)
    if not (kernels.contracts or kernels.wrong or kernels.skipped):
        return None
    results, failures = list(suite.results(kernels.contracts)), dict(kernels.wrong)
    new = sum(not result.known for result in results)
    tried = counted(len(results), "contract")
    said = f"{tried} of kernels on this processor, {new} of them run now"
    say(f"{model.manifest.target}: {said}")
    wrong = [result for result in results if result.failure or result.missing]
    failures |= {kernels.contracts[r.kernel]: r.failure or r.missing for r in wrong}
    worst = proof.rounded_up(max((result.worst for result in results), default=0.0))
    return Check(len(results), KERNELS, worst, failures, kernels.skipped)


def indices(folder: Path, model: Model, say: Progress = silent, log: Path | None = None) -> Check:
    """Prove with the solver z3 that slots, positions, indices of tables and masks of a graph are
    those that its encodings declare, for all sizes, lengths and positions. OSError: a file cannot
    be read or the log cannot be written.

    log: empty folder for the questions to the solver, with its answers, in SMT-LIB 2.
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
    return Check(findings.compared, "claims", 0.0, findings.failures, findings.skipped)


def _part(folder: Path, manifest: Manifest, findings: Findings) -> IntegerPart | None:
    """Return the integer part of a graph; None, with a reason, for an unknown torch program."""
    if not manifest.in_torch:
        return integer_part(read_nodes(folder / "model.onnx"))
    from posenc_export.runtime.verification import claims, symbolic, torch_graph

    try:
        return torch_graph.part_of_program(folder, manifest)
    except symbolic.MALFORMED as reason:
        findings.skipped["positions"] = f"{claims.OPEN}{symbolic.reason_of(reason)}"
        return None


def _compare_rows(part: IntegerPart, manifest: Manifest, folder: Path, findings: Findings) -> None:
    """Compare the constants that give CachedAttention a row for each distance with the rules that
    encodings declare.
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


# By name in the certificate: a function of the artefact's folder, its loaded model and `progress`,
# which returns None if the artefact has nothing to check.
CHECKS: Mapping[str, Callable[[Path, Model, Progress], Check | None]] = {
    "numbers": numbers,
    "indices": indices,
    "operators": operators,
}
NONE: Mapping[str, Check] = MappingProxyType({})


def of_artefact(
    folder: Path, model: Model, progress: Progress, known: Mapping[str, Check] = NONE
) -> dict[str, Check]:
    """Run the checks of an artefact, whose files were checked. Return them by name, with `known`
    ones, which an export has done. progress: called with a line of text for each check.
    """
    checks = dict(known)
    for name, check in CHECKS.items():
        if name in known:
            continue
        progress(f"{model.manifest.target}: checking {name}")
        if (result := check(folder, model, progress)) is not None:
            checks[name] = result
    return checks
