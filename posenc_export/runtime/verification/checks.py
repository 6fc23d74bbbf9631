"""The checks of a proof that need the artefact alone (docs/reliability.md)."""

from pathlib import Path
from types import MappingProxyType
from typing import Callable, Dict, Mapping, Optional

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.onnx_nodes import read_nodes
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import indices, proof
from posenc_export.runtime.verification.conformance import geometry, suite
from posenc_export.runtime.verification.constants import Constants, digests_of
from posenc_export.shared.progress import Progress, silent
from posenc_export.shared.tables import counted

KERNELS = "contracts of kernels"


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


def operators(folder: Path, model: Model, say: Progress = silent) -> Optional[Check]:
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


# By name in the certificate: a function of the artefact's folder, its loaded model and `progress`,
# which returns None if the artefact has nothing to check.
CHECKS: Mapping[str, Callable[[Path, Model, Progress], Optional[Check]]] = {
    "numbers": numbers,
    "indices": lambda folder, model, say: indices.check(folder, model),
    "operators": operators,
}
NONE: Mapping[str, Check] = MappingProxyType({})


def of_artefact(
    folder: Path, model: Model, progress: Progress, known: Mapping[str, Check] = NONE
) -> Dict[str, Check]:
    """Run the checks of an artefact, whose files were checked, and return them by name, with the
    `known` ones that were done with the module. progress: called with one line of text for each
    check.
    """
    checks = dict(known)
    for name, check in CHECKS.items():
        if name in known:
            continue
        progress(f"{model.manifest.target}: checking {name}")
        result = check(folder, model, progress)
        if result is not None:
            checks[name] = result
    return checks
