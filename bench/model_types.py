"""Every model type of the installed transformers: read by from_pretrained, or refused and why.

    python -m bench.model_types [--markdown docs/model-types.md]

Needs transformers. A type is judged by its default configuration, as transformers saves it.
"""

import argparse
import collections
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from posenc_export.models import families
from posenc_export.models.config import StackConfig

# Keys of a configuration that name positions, or what a query sees of them.
POSITION = re.compile(
    r"rope|rotary|position|alibi|relative|bucket|window|theta|max_seq|max_distance|sinusoidal|attn_type|clamp_len|attention_chunk|layer_types|floor_scale|"
    r"attn_scale|temperature_tuning|spatial_shapes|coordinates"
)
RANGE = 512  # positions, for types whose configuration has no range
NO_FAMILY = "no family reads it"
# Text models whose rotation can be exported, and which of their parts cannot.
MISSING = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), "three of four layers are gated delta rules, a linear attention that is no part here"),
    **dict.fromkeys(("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), "experts of images beside those of text, which the kind of a token chooses, are no part here"),
}


class Row(NamedTuple):
    """A model type: what becomes of it, why, and the keys of its configuration that name positions."""

    name: str
    outcome: str
    why: str
    keys: List[str]


def default_config(name: str) -> Optional[Dict[str, Any]]:
    """What transformers saves of a type whose keys are all at their defaults; None where it has no defaults."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        made = CONFIG_MAPPING[name]()
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, NotImplementedError, StrictDataclassError):  # parts that have to be given
        return None
    return {**json.loads(made.to_json_string()), "model_type": name}


def known_keys(name: str) -> List[str]:
    """Keys that name positions, those at their defaults among them."""
    from transformers import CONFIG_MAPPING

    whole = json.loads(CONFIG_MAPPING[name]().to_json_string(use_diff=False))
    return sorted(key for key in whole if POSITION.search(key))


def described(config: Dict[str, Any], part: Optional[str]) -> StackConfig:
    """The description of a configuration, of RANGE positions where it has no range.

    Raises:
        ValueError: as families.read.
    """
    try:
        return families.read(config, None, part)[0]
    except ValueError as refusal:
        if not str(refusal).endswith("give max_positions"):
            raise
        return families.read(config, RANGE, part)[0]


def row(name: str) -> Row:
    """What becomes of a model type."""
    config = default_config(name)
    if config is None:
        return Row(name, "refused", f"{NO_FAMILY}; transformers has no default configuration of it", [])
    keys = known_keys(name)
    if name not in families.FILES:
        return Row(name, "refused", MISSING.get(name, NO_FAMILY), keys)
    parts = families.parts_of(name)
    try:
        for part in parts or (None,):
            described(config, part)
    except ValueError as refusal:
        return Row(name, "read, its defaults refused", str(refusal), keys)
    return Row(name, "read" if not parts else f"read, parts {' and '.join(parts)}", "", keys)


def rows() -> List[Row]:
    """All model types, in the order of their names."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of configurations that are no longer kept
        return [row(name) for name in sorted(CONFIG_MAPPING_NAMES)]


def table(found: Sequence[Row], version: str) -> str:
    """The rows as a page of Markdown."""
    counts = collections.Counter("read" if each.outcome.startswith("read") else "refused" for each in found)
    lines = [
        "# Model types",
        "",
        f"Every `model_type` of transformers {version}: {counts['read']} are read by `from_pretrained`, {counts['refused']} are refused by name. The last column has",
        "the keys of the default configuration that name positions. Each such key of a type that is read changes the model or is refused by name",
        "(tests/models/test_model_types.py). Models with a vision or audio tower have a type for the whole and one for the text alone.",
        "Written by `python -m bench.model_types`.",
        "",
        "| model type | | why | keys that name positions |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{each.name}` | {each.outcome} | {each.why} | {', '.join(each.keys)} |" for each in found]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str]) -> int:
    """The exit status: 0."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path, default=Path("docs/model-types.md"))
    options = parser.parse_args(arguments)
    options.markdown.write_text(table(rows(), transformers.__version__), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
