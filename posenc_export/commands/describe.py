"""`posenc describe`: print the parts of a checkpoint or a preset, without reading weights."""

import argparse
import json
from pathlib import Path
from typing import Any

from posenc_export.commands.options import Table, nearest_model, option
from posenc_export.runtime.artefact.summary import lines
from posenc_export.shared.refusal import refusal
from posenc_export.shared.tables import WIDTH, aligned

OPTIONS: Table = {
    "model": option(
        "a folder with a checkpoint, of which only config.json is read, a GGUF file, or a preset"
    )
}


def run(options: argparse.Namespace) -> int:
    values = _description(options.model)
    table = "\n".join(aligned(None, lines(values), WIDTH))
    print(json.dumps(values, indent=1) if options.json else table)
    return 0


def _description(model: str) -> dict[str, Any]:
    """Return the description of a preset; of a folder or a GGUF file the class of transformers that
    reads it, and its sizes.
    """
    from posenc_export.models import by_transformers
    from posenc_export.models.checkpoint import read_config
    from posenc_export.models.config_json import to_json
    from posenc_export.models.gguf.checkpoint import GGUFCheckpoint, is_gguf
    from posenc_export.models.presets import PRESETS
    from posenc_export.models.sentence_transformers import opened

    if model in PRESETS:
        return to_json(PRESETS[model])
    if not Path(model).is_dir() and not is_gguf(Path(model)):
        rule = f"model to be a folder with a checkpoint, a GGUF file, or {', '.join(PRESETS)}"
        raise refusal("describe", rule, repr(model), nearest_model(model, [*PRESETS]))
    folder, sentences = opened(Path(model), True)
    config = GGUFCheckpoint(folder).config if is_gguf(folder) else read_config(folder)
    read = by_transformers.kind_of(config, sentences is None).described()
    return read | ({} if sentences is None else {"readout": sentences.described()})
