"""List every model type of the installed transformers: read by from_pretrained, or refused, with
the reason.

    python -m bench.model_types [--markdown docs/model-types.md]

Needs transformers. The outcome of a type that is read is that of its default configuration, as
transformers saves it.
"""

import argparse
import collections
import json
import textwrap
import warnings
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from bench import marked
from posenc_export.models import families
from posenc_export.models.config import StackConfig

RANGE = 512  # max_positions for types whose configuration has no such key
NO_FAMILY = "the type is not supported"


class Row(NamedTuple):
    """A model type, its outcome and the reason."""

    name: str
    outcome: str
    why: str = ""


def default_config(name: str) -> Dict[str, Any]:
    """Return the default configuration of a type as transformers saves it."""
    from transformers import CONFIG_MAPPING

    return {**json.loads(CONFIG_MAPPING[name]().to_json_string()), "model_type": name}


def described(config: Dict[str, Any], part: Optional[str]) -> StackConfig:
    """Return the description of a configuration, with max_positions RANGE if it has no such key.
    ValueError: families.read refuses the configuration.
    """
    try:
        return families.read(config, None, part)[0]
    except ValueError as refusal:
        if not str(refusal).endswith("give max_positions"):
            raise
        return families.read(config, RANGE, part)[0]


def row(name: str) -> Row:
    """Return the row of a model type."""
    if name not in families.FILES:
        return Row(name, "refused", families.UNREAD.get(name, NO_FAMILY))
    try:
        for part in families.parts_of(name) or (None,):
            described(default_config(name), part)
    except ValueError as refusal:
        return Row(name, "read", str(refusal))
    return Row(name, "read")


def rows() -> List[Row]:
    """Return the rows of all model types, sorted by name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated configurations warn
        return [row(name) for name in sorted(CONFIG_MAPPING_NAMES)]


def table(rows: Sequence[Row], version: str) -> str:
    """Return the rows as a Markdown page."""
    read = [row for row in rows if row.outcome == "read"]
    refused: Dict[str, List[str]] = collections.defaultdict(list)
    for row in rows:
        if row.outcome == "refused":
            refused[row.why].append("" if row.why == NO_FAMILY else f"`{row.name}`")
    how: Dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}
    listed = "\n".join(textwrap.wrap(", ".join(f"`{row.name}`" for row in read), 100, **how))
    counts = {"read": len(read), "refused": len(rows) - len(read)}
    lines = [marked.text("model-types").format(version=version, listed=listed, **counts)]
    reasons = dict.fromkeys(row.why for row in read if row.why)
    lines += [*(f"- {why}" for why in reasons), "", "## Refused"]
    for why, names in sorted(refused.items(), key=lambda reason: len(reason[1])):
        listed = textwrap.fill(", ".join(filter(None, names)), 100, **how)
        title = f"{why[0].upper()}{why[1:]} ({len(names)})"
        lines += ["", *([f"{title}:", "", listed] if listed else [f"{title}: all others."])]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, default=Path("docs/model-types.md"))
    page = table(rows(), transformers.__version__)
    parser.parse_args().markdown.write_text(page, encoding="utf-8")
