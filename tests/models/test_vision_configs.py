"""Config files of vision-language models: forms that load alike, configs that are refused, and
wrongly read values that the comparison with transformers detects.
"""

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402

from posenc_export.export.expected import eager_session  # noqa: E402
from posenc_export.models import families  # noqa: E402
from posenc_export.models.pretrained import from_pretrained  # noqa: E402
from tests.models.patterns import share, theirs, tokens_of  # noqa: E402
from tests.models.vision_models import CLASSES, places, saved  # noqa: E402


def _flat(config: Dict[str, Any]) -> Dict[str, Any]:
    """Convert a config to the older form without text_config: keys of the text model are at the
    top, the rotation is in rope_scaling.
    """
    text = {
        key: value
        for key, value in config.pop("text_config").items()
        if key not in ("model_type", "rope_parameters", "layer_types")
    }
    scaling = {
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "rope_theta": 10000.0,
        "vision_token_id": 57,
    }
    return {**config, **text, **scaling}


def _same(config: Dict[str, Any]) -> Dict[str, Any]:
    return config


def _alone(config: Dict[str, Any]) -> Dict[str, Any]:
    return {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}


# Forms in which the same model is saved: a change of its config, and the prefix of its tensor
# names.
SAVED: Dict[str, Tuple[str, Callable[[Dict[str, Any]], Dict[str, Any]], Dict[str, str]]] = {
    "a flat config": ("qwen2_vl", _flat, {}),
    "a flat config, heads tied": ("qwen2_5_vl", _flat, {}),
    "names of the modules": (
        "qwen2_vl",
        _same,
        {r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
    ),
    "names of older modules": (
        "qwen3_vl",
        _same,
        {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."},
    ),
    "a text model alone": (
        "qwen3_vl with biases",
        _alone,
        {r"^model\.language_model\.": "", r"^model\.visual\.": "visual."},
    ),
    "a text model with a head": ("qwen2_vl", _alone, {}),
}


@pytest.mark.parametrize("case", SAVED)
def test_all_saved_forms_of_a_model_load_alike(case: str, tmp_path: Path) -> None:
    name, change, renamed = SAVED[case]
    peer = saved(name, tmp_path)
    config = change(json.loads((tmp_path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    for pattern, begin in renamed.items():
        assert any(re.search(pattern, key) for key in weights)
        weights = {re.sub(pattern, begin, key): value.clone() for key, value in weights.items()}
    save_file(weights, tmp_path / "model.safetensors")
    model, grid = from_pretrained(tmp_path), places()
    assert (
        share(
            [
                (
                    eager_session(model).prefill(tokens_of(), grid=grid),
                    theirs(peer, tokens_of(), position_ids=grid),
                )
            ]
        )
        <= 1
    )


def _text(**changes: Any) -> Callable[[Dict[str, Any]], None]:
    def change(config: Dict[str, Any]) -> None:
        config["text_config"].update(changes)

    return change


def _rotation(**changes: Any) -> Callable[[Dict[str, Any]], None]:
    def change(config: Dict[str, Any]) -> None:
        config["text_config"]["rope_parameters"].update(changes)

    return change


def _beside(**changes: Any) -> Callable[[Dict[str, Any]], None]:
    return lambda config: config.update(changes)


REFUSED: Dict[str, Tuple[str, Callable[[Dict[str, Any]], None], str]] = {
    **{
        f"{name}: an unknown key": (
            name,
            _text(attention_sigmoid=True),
            "got attention_sigmoid=True",
        )
        for name in CLASSES
    },
    **{
        f"{name}: an unknown key beside": (
            name,
            _beside(attention_sigmoid=True),
            "got attention_sigmoid=True outside",
        )
        for name in CLASSES
    },
    **{
        f"{name}: a longer rotation": (
            name,
            _rotation(rope_type="linear", factor=2.0),
            "yarn without mscale, with mrope_section, got linear",
        )
        for name in CLASSES
    },
    **{
        f"{name}: too few pairs": (name, _rotation(mrope_section=[2, 3, 2]), ", got [2, 3, 2]")
        for name in CLASSES
    },
    "qwen2_vl: two sections": (
        "qwen2_vl",
        _rotation(mrope_section=[4, 4]),
        "three integers above 0 with sum 8, got [4, 4]",
    ),
    "qwen2_vl: usual sections": (
        "qwen2_vl",
        _text(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "got [16, 24, 24]",
    ),
    "qwen2_vl: part of a head": (
        "qwen2_vl",
        _rotation(partial_rotary_factor=0.5, mrope_section=[1, 1, 2]),
        "rotation of whole heads",
    ),
    "qwen2_vl: axes in turn": (
        "qwen2_vl",
        _rotation(mrope_interleaved=True),
        "mrope_interleaved to be False for qwen2_vl, got True",
    ),
    "qwen2_vl: another head size": ("qwen2_vl", _text(head_dim=32), "head_dim to be 16, got 32"),
    "qwen2_vl: windows without a size": (
        "qwen2_vl",
        _text(layer_types=["sliding_attention"] * 2),
        "sliding_attention without a window",
    ),
    "qwen2_vl: no mapping": (
        "qwen2_vl",
        _beside(text_config=3),
        "text_config to be a mapping, got 3",
    ),
    "qwen3_vl: part of a head": (
        "qwen3_vl",
        _rotation(partial_rotary_factor=0.5, mrope_section=[2, 2, 2]),
        "rotation of whole heads",
    ),
    "glm4v: another head size": ("glm4v", _text(head_dim=32), "head_dim to be 16, got 32"),
    "qwen3_vl: axes in sections": (
        "qwen3_vl",
        _rotation(mrope_interleaved=False),
        "mrope_interleaved to be True for qwen3_vl, got False",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configs_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, change, named = REFUSED[case]
    saved(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    with pytest.raises(ValueError) as refusal:
        families.read(config)
    assert str(refusal.value).startswith(f"{name}: ") and named in str(refusal.value)


# A model, and wrong values in its config.
WRONG: Dict[str, Tuple[str, Callable[[Dict[str, Any]], None]]] = {
    "qwen2_vl: another theta": ("qwen2_vl", _rotation(rope_theta=1000000.0)),
    "qwen2_vl: other sections": ("qwen2_vl", _rotation(mrope_section=[3, 2, 3])),
    "qwen2_vl: a longer window": ("qwen2_vl with windows", _text(sliding_window=9)),
    "qwen2_vl: windows elsewhere": (
        "qwen2_vl with windows",
        _text(layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    ),
    "qwen3_vl: other sections": ("qwen3_vl", _rotation(mrope_section=[4, 4, 4])),
    "qwen3_vl: another temperature": (
        "qwen3_vl beyond its length",
        _rotation(attention_factor=1.5),
    ),
    "glm4v: another part of a head": (
        "glm4v",
        _rotation(partial_rotary_factor=1.0, mrope_section=[2, 2, 4]),
    ),
    "qwen3_vl: another epsilon": ("qwen3_vl", _text(rms_norm_eps=1e-2)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrongly_read_config_is_detected(case: str, tmp_path: Path) -> None:
    name, change = WRONG[case]
    peer, grid = saved(name, tmp_path), places()
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert (
        share(
            [
                (
                    eager_session(from_pretrained(tmp_path)).prefill(tokens_of(), grid=grid),
                    theirs(peer, tokens_of(), position_ids=grid),
                )
            ]
        )
        > 1
    )
