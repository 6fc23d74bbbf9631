"""The registry of planted faults, and the correct models that they are planted in
(tests.faults.planting).
"""

import functools
import tempfile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from tests import tiny
from tests.faults import of_encodings, of_models, of_sessions
from tests.faults.planting import CorrectArtefact, CorrectModel, Fault
from tests.traces import sources

FAULTS: dict[str, Fault] = {
    **of_encodings.FAULTS,
    **of_models.FAULTS,
    **of_sessions.FAULTS,
}  # those of artefacts are planted in several formats, in test_depths.py


def described(model: str) -> Any:
    """Return the description of a model by name: a variant of tests.tiny for a decoder, or a
    kind and a variant.
    """
    kind, _, variant = model.rpartition(" ")
    if kind == "windowed":
        block = tiny.block(variant)
        return replace(
            block, attention=replace(block.attention, sees={"name": "window", "size": 5})
        )
    if model == "two thetas":
        return decoder_config(
            61,
            2,
            40,
            tiny.block("nope"),
            layer_encodings=[{"name": "rope"}, {"name": "rope", "theta": 100.0}],
        )
    if kind == "linear":
        return tiny.block(variant, mechanism="linear", kv_heads=6)
    return {"": tiny.decoder, "block": tiny.block, "encoder": tiny.encoder}[kind](variant)


@functools.lru_cache(maxsize=8)
def correct(model: str, target: str = "") -> CorrectModel | CorrectArtefact:
    """Return a correct model by name, eager or as an artefact of a target, which is kept for its
    next fault.
    """
    traced = sources(described(model))
    if not target:
        return CorrectModel(traced.model, lambda: seeded(described(model)))
    with tempfile.TemporaryDirectory() as folder:
        return CorrectArtefact(Path(folder), export(traced, target, folder, verify=False))
