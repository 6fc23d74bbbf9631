"""`posenc compile`: compile a pt2 artefact to native code for this machine."""

import argparse
import json
from pathlib import Path

from posenc_export.commands.options import Table, digest_of, folder_of, option
from posenc_export.commands.terminal import FAILED_CHECK, refuse, show, summary

OPTIONS: Table = {
    **folder_of("an artefact of target pt2"),
    "-o --output": option("folder of the compiled artefact (default: FOLDER-native)", type=Path),
    **digest_of("the pt2 artefact"),
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 1 if the native code does not agree with the reference."""
    from posenc_export.export import VerificationError
    from posenc_export.export.aotinductor import compile_artefact

    output = options.output or options.folder.with_name(f"{options.folder.resolve().name}-native")
    try:
        manifest = compile_artefact(options.folder, output, options.say, options.digest)
    except VerificationError as error:
        refuse(options.say, str(error))
        return FAILED_CHECK
    options.say.close()
    row = {"target": manifest.target, "folder": str(output), **summary(manifest.proofs[0])}
    print(json.dumps([row], indent=1)) if options.json else show([row])
    return 0
