"""`posenc verify`: check an artefact against the reference that it contains."""

import argparse
import json
from pathlib import Path

from posenc_export.runtime.providers import HELP
from posenc_export.terminal import FAILED_CHECK, show


def add_arguments(verifying: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc verify`."""
    verifying.add_argument("folder", type=Path, help="folder of an artefact")
    verifying.add_argument("--provider", default="auto", help=HELP)
    verifying.add_argument("--no-record", action="store_true", help="do not write the certificate to the manifest, for folders that cannot be written")
    verifying.add_argument("--digest", help="digest that the artefact must have, from a source other than the folder itself")
    verifying.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0, or 1 if an error exceeds the tolerance."""
    from posenc_export.runtime import verify
    from posenc_export.runtime.schema import format_worst_error

    certificate = verify(options.folder, options.provider, digest=options.digest, progress=options.say, record=not options.no_record)
    options.say.close()
    if options.json:
        print(json.dumps(certificate, indent=1, sort_keys=True))
    else:
        bound = certificate["tolerance"]
        show([{"cell": name, "worst error": format_worst_error(error), "": "" if error <= bound else "EXCEEDS"} for name, error in certificate["cells"].items()])
        verdict = "passed" if certificate["passed"] else "FAILED"
        print(f"provider {certificate['provider']} on {certificate['machine']}, tolerance {bound:.1e}: {verdict}")
    return 0 if certificate["passed"] else FAILED_CHECK
