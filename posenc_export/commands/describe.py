"""`posenc describe`: print the description of a model, layer by layer. Reads no weights."""

import argparse
import json
from pathlib import Path
from typing import Any, Collection, Dict, List

from posenc_export.commands.options import (
    BLOCK,
    PART,
    Table,
    block_options,
    check_only,
    chosen_of,
    nearest_model,
    option,
    option_name,
)
from posenc_export.runtime.artefact.description import lines
from posenc_export.runtime.artefact.manifest import read
from posenc_export.shared.tables import WIDTH, aligned

SIZES = {name: default for name, default in BLOCK.items() if name != "seed"}
OPTIONS: Table = {
    "model": option(
        "a folder with a checkpoint (only config.json is read), the folder of an artefact, a "
        "preset, or the word block"
    ),
    **block_options(SIZES),
    "--part": option(PART, choices=("encoder", "decoder")),
}


def run(options: argparse.Namespace) -> int:
    values = _description(options.model, chosen_of(options, (*SIZES, "part")))
    table = "\n".join(aligned(None, lines(values), WIDTH))
    print(json.dumps(values, indent=1) if options.json else table)
    return 0


def _description(model: str, chosen: Dict[str, Any]) -> Dict[str, Any]:
    if (Path(model) / "posenc.json").is_file():
        _check_only((), chosen, "an artefact")
        return dict(read(Path(model)).config)
    from posenc_export.models.config_json import to_json
    from posenc_export.models.presets import PRESETS

    if model == "block":
        return to_json(_block(chosen))
    if model in PRESETS:
        _check_only((), chosen, "a preset")
        return to_json(PRESETS[model])
    return _checkpoint(model, chosen, [*PRESETS, "block"])


def _block(chosen: Dict[str, Any]) -> Any:
    from posenc_export import encodings
    from posenc_export.models.short_forms import block_config

    _check_only(tuple(SIZES), chosen, "a block")
    values: Dict[str, Any] = {**SIZES, **chosen}
    causal = values.pop("attention") == "causal"
    return block_config(encoding=encodings.parse(values.pop("encoding")), causal=causal, **values)


def _checkpoint(model: str, chosen: Dict[str, Any], names: List[str]) -> Dict[str, Any]:
    """The class of transformers that reads a folder or a GGUF file, and its sizes. names: those of
    other models.
    """
    from posenc_export.models import by_transformers
    from posenc_export.models.checkpoint import read_config
    from posenc_export.models.gguf.checkpoint import GGUFCheckpoint, is_gguf
    from posenc_export.models.sentence_transformers import opened

    if not Path(model).is_dir() and not is_gguf(Path(model)):
        known = f"a folder with a checkpoint or an artefact, a GGUF file, or {', '.join(names)}"
        rule, near = f"model to be {known}", nearest_model(model, names)
        raise ValueError(f"describe: expected {rule}, got {model!r}; {near}")
    _check_only(("max_positions", "part"), chosen, "a checkpoint")
    folder, sentences = opened(Path(model), "part" not in chosen)
    config = GGUFCheckpoint(folder).config if is_gguf(folder) else read_config(folder)
    kind = by_transformers.kind_of(config, sentences is None)
    parts = ("part",) if kind.config.is_encoder_decoder else ()
    _check_only(("max_positions", *parts), chosen, f"model_type {config['model_type']}")
    read = kind.described() | chosen
    return read | ({} if sentences is None else {"readout": sentences.described()})


def _check_only(names: Collection[str], chosen: Dict[str, Any], what: str) -> None:
    listed = " and ".join(map(option_name, names)) or "no options"
    check_only("describe", names, chosen, f"{listed} for {what}")
