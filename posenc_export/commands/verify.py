"""`posenc verify`: check an artefact against the reference that it contains."""

import argparse
import json
from pathlib import Path

from posenc_export.commands.options import PROVIDER, Table, folder_of, option
from posenc_export.commands.terminal import FAILED_CHECK, note, show
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact import certificate as certificates
from posenc_export.runtime.artefact import files, manifest
from posenc_export.runtime.artefact.certificate import Proof
from posenc_export.runtime.verification import checks
from posenc_export.shared.tables import counted

SHOWN = 10  # cells that are printed
OPTIONS: Table = {
    **folder_of(),
    **PROVIDER,
    "--quick": option(
        "run one scenario for each kind of call instead of every cell of the grid",
        action="store_true",
    ),
    "--all": option(f"print every cell (default: the {SHOWN} worst)", action="store_true"),
    "--no-record": option(
        "do not write the certificate to the manifest, for folders that cannot be written",
        action="store_true",
    ),
    "--tolerance": option(
        "largest error that passes, as a share of the largest output (default: that of the "
        "export); of a file that rounds activations, on the CPU in its float32 form",
        type=float,
        metavar="E",
    ),
    "--log-claims": option(
        "write each question to the solver, with its answer, to a file in a new folder, for other "
        "solvers, in SMT-LIB 2",
        type=Path,
        metavar="FOLDER",
    ),
    "--digest": option(
        "digest that the artefact must have, from a source other than the folder itself"
    ),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if an error exceeds the tolerance."""
    folder = files.locate(options.folder)
    described = manifest.read_alone(folder, options.digest)
    if options.log_claims is not None:
        options.log_claims.mkdir(parents=True)
    certificate = verify(
        folder,
        options.provider,
        digest=described.digest,
        progress=options.say,
        record=False,
        tolerance=options.tolerance,
        quick=options.quick,
    )
    if options.log_claims is not None:
        checks.indices(folder, load(folder, options.provider), log=options.log_claims)
    options.say.close()
    if options.json:
        print(json.dumps(certificate, indent=1, sort_keys=True))
    else:
        _print_cells(certificate, options.all)
        _print_verdict(certificate, described.target)
    if not options.no_record:
        _record(folder, described.digest, certificate)
    return 0 if certificate["passed"] else FAILED_CHECK


def _print_cells(certificate: Proof, every: bool) -> None:
    errors = certificate["cells"]
    bounds = {name: certificates.bound_of(certificate, name) for name in errors}
    worst = sorted(bounds, key=lambda name: errors[name] / (bounds[name] or 1.0), reverse=True)
    shown, rows = list(bounds) if every else worst[:SHOWN], []
    for name in shown:
        row = {"cell": name, "error": certificates.format_cell(certificate, name)}
        row["tolerance"] = certificates.format_bound(certificate, name)
        rows.append({**row, "": "" if errors[name] <= bounds[name] else "EXCEEDS"})
    show(rows)
    if len(shown) < len(bounds):
        print(f"the worst {len(shown)} of {len(bounds)} cells; --all prints all")
    if unreached := certificates.format_unreached(certificate):
        print(f"edges that no cell reached: {unreached}")
    if unproved := certificates.format_unproved(certificate):
        print(f"checks that compared nothing: {unproved}")
    for name, failure in certificates.failed_checks(certificate).items():
        print(f"check {name}: {failure}")


def _print_verdict(certificate: Proof, target: str) -> None:
    verdict = "passed" if certificate["passed"] else "FAILED"
    if target == "ort-cuda" and certificate["provider"] == "cpu":
        verdict += " (values on the CPU only; nothing ran on CUDA)"
    tolerance = f"tolerance {certificate['tolerance']:.1e} of the largest output"
    exported = certificates.exported_error(certificate)
    if exported is not None:
        error = certificates.format_worst_error(exported)
        print(f"as exported, which rounds activations or caches, errors are within {error}")
        tolerance += " in the float32 form"
    where = f"provider {certificate['provider']} on {certificate['machine']}"
    print(f"{where}, {counted(len(certificate['cells']), 'cell')}, {tolerance}: {verdict}")


def _record(folder: Path, digest: str, proof: Proof) -> None:
    try:
        manifest.add_proof(folder, digest, proof)
    except OSError as error:
        rule = "verify: expected a folder that can be written, to record the proof"
        remedy = "the proof is not recorded, and --no-record does not try"
        note(f"{rule}, got {error.strerror or error}; {remedy}")
