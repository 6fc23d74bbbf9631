"""Artefacts in which faults are planted: small decoders in every format of target ort."""

import tempfile
from pathlib import Path
from typing import Any, Dict

import numpy as np

from posenc_export.export import Sources, export
from posenc_export.models.config import StackConfig
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.testing.planting import CorrectArtefact


def described(variant: str, layers: int) -> StackConfig:
    """A byte-level decoder of width 64 with grouped heads."""
    return decoder_config(
        256, layers, 128, block_config(64, 4, 96, kv_heads=2, encoding={"name": variant})
    )


def arguments_of(format_: str, folder: Path) -> Dict[str, Any]:
    """Return the arguments of `export` for a format."""
    if format_ == "cache int8":
        sample = folder / "sample.txt"
        sample.write_bytes(
            np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8).tobytes()
        )
        return {"cache": "int8", "calibrate": sample}
    if format_.startswith("int"):
        return {"weights": format_}
    return {"dtype": "float16"} if format_ == "float16" else {}


def correct_artefact(sources: Sources, format_: str) -> CorrectArtefact:
    """Return an artefact of target ort in a format."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "artefact"
        manifest = export(
            sources, "ort", folder, verify=False, **arguments_of(format_, Path(temporary))
        )
        return CorrectArtefact(folder, manifest)
