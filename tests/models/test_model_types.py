"""Every model type of the installed transformers: the generated page lists it, and every key
about positions is used or refused.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict, List

import pytest

from posenc_export.models import families

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from bench import model_types  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/model-types.md"
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # transformers warns about deprecated configurations
# Configuration keys that concern positions, or which positions a query attends to.
POSITION = re.compile(
    r"rope|rotary|position|alibi|relative|bucket|window|theta|max_seq|max_distance|sinusoidal|"
    r"attn_type|clamp_len|attention_chunk|layer_types|floor_scale|attn_scale|temperature_tuning|"
    r"spatial_shapes|coordinates"
)
# Keys without effect in the models that are read, with the reason.
SILENT = {
    ("smollm3", "sliding_window"): "layers with windows are refused by use_sliding_window",
    ("timesfm2_5", "max_position_embeddings"): "the default rotation does not depend on it",
    ("wav2vec2-bert", "max_source_positions"): "transformers extends its table of sinusoids",
    ("wav2vec2-bert", "rotary_embedding_base"): "a rotation is refused by position_embeddings_type",
}


def _known(name: str) -> Dict[str, Any]:
    """Return the keys of a configuration that concern positions, with their default values."""
    whole = json.loads(transformers.CONFIG_MAPPING[name]().to_json_string(use_diff=False))
    return {key: whole[key] for key in sorted(whole) if POSITION.search(key)}


def _whole(name: str) -> Dict[str, Any]:
    """Return the default configuration, including defaults of all keys about positions."""
    config = model_types.default_config(name)
    return {**_known(name), **config, **OFF_DEFAULT.get(name, {})}


# Types whose defaults are refused or leave keys unused, with settings of a published model.
OFF_DEFAULT: Dict[str, Dict[str, Any]] = {
    "deberta": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
    },
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
    },
    "electra": {"embedding_size": 256},
    "glm4v_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [8, 12, 12],
            "partial_rotary_factor": 0.5,
        }
    },
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 48,
            "long_factor": [2.0] * 48,
        }
    },
}
OTHERS: List[Any] = [None, True, False, 1, 3, 7, 96, 0.5, "other", [1], {"rope_type": "other"}]


def _effect(name: str, key: str, value: Any) -> str:
    """Return the effect of another value of a key: "refused", "felt" (the description changes)
    or "nothing".
    """
    config, parts = _whole(name), model_types.families.parts_of(name) or (None,)
    result = set()
    for part in parts:
        before = model_types.described(config, part)
        try:
            result.add(
                "felt"
                if model_types.described({**config, key: value}, part) != before
                else "nothing"
            )
        except ValueError as refusal:
            result.add("refused" if str(refusal) else "nothing")
    return "felt" if "felt" in result else "refused" if "refused" in result else "nothing"


CASES = [
    (name, key) for name in families.FILES for key in _known(name) if (name, key) not in SILENT
]


@pytest.mark.parametrize(("name", "key"), CASES)
def test_every_key_about_positions_is_used_or_refused(name: str, key: str) -> None:
    effects = (_effect(name, key, value) for value in OTHERS if value != _whole(name)[key])
    assert any(effect in ("felt", "refused") for effect in effects)


def test_the_page_names_read_types_and_those_refused_for_a_reason_and_counts_all_others() -> None:
    rows = [
        model_types.Row("bert", "read"),
        model_types.Row("ernie", "refused", "experts"),
        *(model_types.Row(f"other-{n}", "refused", model_types.NO_FAMILY) for n in range(40)),
    ]
    page = model_types.table(rows, "5.0")
    assert (
        "Experts (1):\n\n`ernie`" in page and "The type is not supported (40): all others." in page
    )
    assert page.count("`bert`") == 1 and "other-" not in page


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == model_types.table(model_types.rows(), transformers.__version__)
