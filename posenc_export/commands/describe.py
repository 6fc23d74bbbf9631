"""`posenc describe`: print the description of a model, layer by layer. Reads no weights."""

import argparse
import json
from pathlib import Path
from typing import Any, Dict

from posenc_export.commands.export import PART
from posenc_export.commands.options import BLOCK, add_block
from posenc_export.shared.suggestion import download, suggestion
from posenc_export.shared.tables import WIDTH, aligned

SIZES = {name: default for name, default in BLOCK.items() if name != "seed"}


def add_arguments(describing: argparse.ArgumentParser) -> None:
    """Add the arguments of `posenc describe`."""
    describing.add_argument(
        "model",
        help="a folder with a checkpoint (only config.json is read), the folder of an artefact, a "
        "preset, or the word block",
    )
    add_block(describing, SIZES)
    describing.add_argument("--part", choices=("encoder", "decoder"), help=PART.partition(";")[0])


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status 0."""
    from posenc_export.runtime.artefact.description import lines

    given = {
        name: getattr(options, name)
        for name in (*SIZES, "part")
        if getattr(options, name) is not None
    }
    values = _description(options.model, given)
    print(
        json.dumps(values, indent=1)
        if options.json
        else "\n".join(aligned(None, lines(values), WIDTH))
    )
    return 0


def _description(model: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """Return the JSON values of a model's description.

    Raises:
        ValueError: no such model, an option that it does not take, a configuration that cannot be
            read.
    """
    if (Path(model) / "posenc.json").is_file():
        from posenc_export.runtime.artefact.manifest import read

        _only((), given, "an artefact")
        return dict(read(Path(model)).config)
    from msgspec.structs import replace

    from posenc_export import encodings
    from posenc_export.models import families
    from posenc_export.models.checkpoint import read_config
    from posenc_export.models.config_json import to_json
    from posenc_export.models.gguf.checkpoint import GGUFCheckpoint, is_gguf
    from posenc_export.models.presets import PRESETS
    from posenc_export.models.sentence_transformers import opened
    from posenc_export.models.short_forms import block_config

    if model == "block":
        _only(tuple(SIZES), given, "a block")
        values: Dict[str, Any] = {**SIZES, **given}
        causal = values.pop("attention") == "causal"
        return to_json(
            block_config(encoding=encodings.parse(values.pop("encoding")), causal=causal, **values)
        )
    if model in PRESETS:
        _only((), given, "a preset")
        return to_json(PRESETS[model])
    if not Path(model).is_dir() and not is_gguf(Path(model)):
        known = (
            "block, a folder with a checkpoint or an artefact, a GGUF file, or one of "
            f"{', '.join(PRESETS)}"
        )
        raise ValueError(
            f"describe: expected model to be {known}, got {model!r}; "
            f"{download(model) or suggestion(model, [*PRESETS, 'block'])}"
        )
    _only(("max_positions", "part"), given, "a checkpoint")
    folder, sentences = opened(Path(model), "part" not in given)
    config = GGUFCheckpoint(folder).config if is_gguf(folder) else read_config(folder)
    described = families.read(config, given.get("max_positions"), given.get("part"))[0]
    return to_json(
        described if sentences is None else replace(described, readout=sentences.readout)
    )


def _only(names: Any, given: Dict[str, Any], what: str) -> None:
    other = next((name for name in given if name not in names), None)
    if other is not None:
        taken = " and ".join(f"--{name.replace('_', '-')}" for name in names) or "no options"
        raise ValueError(
            f"describe: expected {taken} for {what}, got --{other.replace('_', '-')}; leave it out"
        )
