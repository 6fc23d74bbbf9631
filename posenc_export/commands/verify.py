"""`posenc verify`: check an artefact against the reference that it contains."""

import argparse
import json
from pathlib import Path

from posenc_export.commands.options import add_digest, add_folder, add_provider
from posenc_export.commands.terminal import FAILED_CHECK, note, show
from posenc_export.runtime.artefact.certificate import Proof

SHOWN = 10  # cells that are printed


def add_arguments(verifying: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc verify`."""
    add_folder(verifying)
    add_provider(verifying)
    verifying.add_argument(
        "--quick",
        action="store_true",
        help="run one scenario for each kind of call instead of every cell of the grid",
    )
    verifying.add_argument(
        "--all", action="store_true", help=f"print every cell (default: the {SHOWN} worst)"
    )
    verifying.add_argument(
        "--no-record",
        action="store_true",
        help="do not write the certificate to the manifest, for folders that cannot be written",
    )
    add_digest(verifying)
    verifying.add_argument(
        "--tolerance",
        type=float,
        metavar="E",
        help="largest error that passes, above 0 and below 1; of the float32 form of an artefact "
        "that rounds activations and runs on the CPU (default: the tolerance of the export)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if an error exceeds the tolerance."""
    from posenc_export.runtime import verify
    from posenc_export.runtime.artefact import files, manifest
    from posenc_export.runtime.artefact.certificate import (
        bound_of,
        exported_error,
        format_bound,
        format_cell,
        format_unreached,
        format_worst_error,
    )

    folder = files.locate(options.folder)
    described = manifest.read_alone(folder, options.digest)
    digest = described.digest
    certificate = verify(
        folder,
        options.provider,
        digest=digest,
        progress=options.say,
        record=False,
        tolerance=options.tolerance,
        quick=options.quick,
    )
    options.say.close()
    if options.json:
        print(json.dumps(certificate, indent=1, sort_keys=True))
    else:
        bounds = {name: bound_of(certificate, name) for name in certificate["cells"]}
        beyond = {
            name: "" if error <= bounds[name] else "EXCEEDS"
            for name, error in certificate["cells"].items()
        }
        worst = sorted(
            bounds,
            key=lambda name: certificate["cells"][name] / (bounds[name] or 1.0),
            reverse=True,
        )
        shown = list(bounds) if options.all else worst[:SHOWN]
        show(
            [
                {
                    "cell": name,
                    "error": format_cell(certificate, name),
                    "tolerance": format_bound(certificate, name),
                    "": beyond[name],
                }
                for name in shown
            ]
        )
        if len(shown) < len(bounds):
            print(f"the worst {len(shown)} of {len(bounds)} cells; --all prints all")
        if unreached := format_unreached(certificate):
            print(f"edges that no cell reached: {unreached}")
        verdict = "passed" if certificate["passed"] else "FAILED"
        if described.target == "ort-cuda" and certificate["provider"] == "cpu":
            verdict += " (values on the CPU only; nothing ran on CUDA)"
        tolerance, exported = (
            f"tolerance {certificate['tolerance']:.1e}",
            exported_error(certificate),
        )
        if exported is not None:
            error = format_worst_error(exported)
            print(f"as exported, which rounds activations or caches, errors are within {error}")
            tolerance += " of the float32 form"
        print(
            f"provider {certificate['provider']} on {certificate['machine']}, {tolerance}: "
            f"{verdict}"
        )
    if not options.no_record:
        _record(folder, digest, certificate)
    return 0 if certificate["passed"] else FAILED_CHECK


def _record(folder: Path, digest: str, proof: Proof) -> None:
    """Write the proof into the manifest, or say why it is not recorded."""
    from posenc_export.runtime.artefact import manifest

    try:
        manifest.add_proof(folder, digest, proof)
    except OSError as error:
        rule = "verify: expected a folder that can be written, to record the proof"
        note(
            f"{rule}, got {error.strerror or error}; the proof is not recorded, and "
            "--no-record does not try"
        )
