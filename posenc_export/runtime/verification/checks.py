"""The checks of a proof that need the artefact alone (docs/reliability.md)."""

from pathlib import Path
from types import MappingProxyType
from typing import Callable, Dict, Mapping, Optional

from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.rules import graph_file
from posenc_export.runtime.graphs.onnx_nodes import read
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification import fused_attention, indices
from posenc_export.runtime.verification.constants import Constants, digests_of
from posenc_export.runtime.verification.operators import of_artefact as of_kernels


def numbers(folder: Path, model: Model) -> Check:
    """Decode all constants of a graph, and compare their digests with those of the manifest."""
    manifest = model.manifest
    if not manifest.constants:
        why = "no digests: a torch program, or an artefact that was not verified when exported"
        return Check(0, "numbers", skipped={graph_file(manifest): why})
    try:
        constants = Constants(read(folder / graph_file(manifest)), folder)
        digests = digests_of(constants)
    except ValueError as error:
        return Check(0, "numbers", failures={graph_file(manifest): str(error)})
    wanted = manifest.constants
    differing = [name for name in [*wanted, *digests] if wanted.get(name) != digests.get(name)]
    why = "other numbers or attributes than in the digest of the export"
    return Check(constants.count, "numbers", failures=dict.fromkeys(differing, why))


def operators(folder: Path, model: Model) -> Optional[Check]:
    """Compare kernels for weights of few bits or float16 with their contracts (operators.py)."""
    if graph_file(model.manifest) != "model.onnx" or model.provider != "cpu":
        return None
    return of_kernels(folder, model.manifest)


# By name in the certificate: a function of the artefact's folder and its loaded model, which
# returns None if the artefact has nothing to check.
CHECKS: Mapping[str, Callable[[Path, Model], Optional[Check]]] = {
    "numbers": numbers,
    "indices": indices.check,
    "attention": fused_attention.check,
    "operators": operators,
}
NONE: Mapping[str, Check] = MappingProxyType({})


def of_artefact(
    folder: Path, model: Model, progress: Callable[[str], None], known: Mapping[str, Check] = NONE
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
        result = check(folder, model)
        if result is not None:
            checks[name] = result
    return checks
