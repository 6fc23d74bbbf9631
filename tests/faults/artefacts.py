"""Artefacts in which faults are planted: small decoders in every format of target ort."""

import functools
import tempfile
from pathlib import Path

from bench.ruins import arguments_of, decoder
from posenc_export.export import export
from posenc_export.models.config import StackConfig
from tests.faults.planting import CorrectArtefact
from tests.traces import sources

RANGE, WINDOW = 96, 32


def described(variant: str, layers: int) -> StackConfig:
    """A decoder of bench.ruins with a shorter range."""
    return decoder(variant, layers, RANGE, WINDOW)


@functools.cache
def correct_artefact(variant: str, format_: str, layers: int) -> CorrectArtefact:
    """Return an artefact of target ort in a format."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, how = Path(temporary) / "artefact", arguments_of(format_, Path(temporary))
        manifest = export(sources(described(variant, layers)), "ort", folder, verify=False, **how)
        return CorrectArtefact(folder, manifest)
