"""Text models of vision-language models compared with transformers: text, and tokens of images and videos with time, height and width as coordinates."""

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import export_model, load
from posenc_export.export import Sources
from posenc_export.grids import coordinates
from posenc_export.models import families
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export.export.expected import eager_session  # noqa: E402
from tests.models.checkpoints import randomised  # noqa: E402
from tests.models.patterns import LENGTH, share, theirs, tokens_of  # noqa: E402

pytestmark = pytest.mark.xdist_group("vision")  # one worker, so that each model is traced once
TEXT = {
    "vocab_size": 61, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOWERS = {
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 40, "tokens_per_second": 3},
    "qwen3_vl": {
        "depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "intermediate_size": 40, "deepstack_visual_indexes": [0],
    },
    "glm4v": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "image_size": 16, "intermediate_size": 40},
    "glm_ocr": {"depth": 1, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 4, "image_size": 16, "intermediate_size": 40},
}  # fmt: skip
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "glm4v": "Glm4v", "glm_ocr": "GlmOcr"}
SPLIT = ("qwen3_vl", "glm4v", "glm_ocr")  # families with separate tokens for each frame of a video


def _axes(*sections: int, **more: Any) -> Dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Settings of each text model that differ from TEXT, and whether the head is tied. The first word of a name is the family.
MODELS: Dict[str, Tuple[Dict[str, Any], bool]] = {
    "qwen2_vl": (_axes(2, 3, 3), False),
    "qwen2_vl with windows": (
        {
            **_axes(5, 1, 2, rope_theta=500.0), "num_hidden_layers": 3, "num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 8,
            "max_window_layers": 1, "rms_norm_eps": 1e-3,
        },
        True,
    ),
    "qwen2_5_vl": ({**_axes(2, 3, 3), "num_attention_heads": 4, "num_key_value_heads": 4}, True),
    "qwen3_vl": ({**_axes(6, 3, 3, mrope_interleaved=True), "head_dim": 24}, False),
    "qwen3_vl with biases": ({**_axes(6, 5, 5), "head_dim": 32, "attention_bias": True, "num_key_value_heads": 1}, True),
    "qwen2_5_vl beyond its length": (_axes(2, 3, 3, **YARN), False),
    "qwen3_vl beyond its length": ({**_axes(6, 3, 3, **YARN, attention_factor=1.25), "head_dim": 24}, False),
    "glm4v": (_axes(1, 1, 2, partial_rotary_factor=0.5), False),
    "glm4v, whole heads": ({**_axes(2, 3, 3, rope_theta=500.0), "num_key_value_heads": 4}, True),
    "glm_ocr": ({**_axes(2, 2, 2, partial_rotary_factor=0.5), "head_dim": 24}, False),
}  # fmt: skip
PEERS: Dict[str, Any] = {}
SESSIONS: Dict[Tuple[str, str], Any] = {}
IMAGE, VIDEO, MARK = 60, 59, 58  # token ids
# Two rows of LENGTH tokens, as runs of one kind with the patches of images and videos.
ROWS: List[List[Tuple[int, int, Tuple[int, ...]]]] = [
    [(0, 5, ()), (1, 6, (1, 4, 6)), (0, 9, ()), (1, 8, (1, 8, 4)), (0, 12, ())],
    [(2, 12, (3, 4, 4)), (0, 8, ()), (1, 2, (1, 2, 4)), (0, 18, ())],
]


def saved(name: str, folder: Path) -> Any:
    """Save transformers' model in a folder, and return it."""
    torch.manual_seed(0)
    family, (text, tied) = re.split("[ ,]", name)[0], MODELS[name]
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": MARK, "vision_end_token_id": MARK}
    config = getattr(transformers, CLASSES[family] + "Config")(text_config={**TEXT, **text}, vision_config=TOWERS[family], tie_word_embeddings=tied, **ids)
    model = randomised(getattr(transformers, CLASSES[family] + "ForConditionalGeneration")(config))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def _prepared(name: str, target: str, folders: Path) -> Tuple[Any, Session]:
    """Return transformers' model and a new session of ours. Each model is created once."""
    if name not in PEERS:
        PEERS[name] = (saved(name, folders / name), Sources(from_pretrained(folders / name)))
    peer, sources = PEERS[name]
    if (name, target) not in SESSIONS:
        manifest = export_model(sources, target, folders / f"{name} {target}", verify=False)
        assert target != "ort" or manifest.operators["GroupQueryAttention"] == peer.config.text_config.num_hidden_layers
        SESSIONS[name, target] = load(folders / f"{name} {target}", threads=1)
    return peer, SESSIONS[name, target].session()


def _places() -> np.ndarray:
    """Return the coordinates of both rows [3,2,LENGTH]."""
    rows = []
    for runs in ROWS:
        kinds = [kind for kind, count, _ in runs for _ in range(count)]
        rows.append(coordinates(kinds, [grid for kind, _, grid in runs if kind == 1], [grid for kind, _, grid in runs if kind == 2]))
    return np.stack(rows, 1)


QUICK = {"ort": ("qwen3_vl",), "torchscript": tuple(MODELS)}
each = pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, marks=() if name in QUICK.get(target, ()) else pytest.mark.exhaustive)
        for name in MODELS
        for target in ("ort", "onnx", "onnx-static", "torchscript")
    ],
)


@each
def test_logits_of_images_and_videos_match_transformers_at_every_split(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens, places = tokens_of(), _places()
    wanted = theirs(peer, tokens, position_ids=places)
    assert share([(session.prefill(tokens, grid=places), wanted)]) <= 1
    session.reset()
    assert share([(session.prefill(tokens, chunk=7, grid=places), wanted)]) <= 1
    session.reset()
    first = session.prefill(tokens[:, :29], grid=places[:, :, :29])
    steps = [session.prefill(tokens[:, index : index + 1], grid=places[:, :, index : index + 1]) for index in range(29, LENGTH)]
    assert share([(np.concatenate((first, *steps), axis=1), wanted)]) <= 1


@each
def test_logits_of_text_match_transformers_step_by_step(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens = tokens_of()
    wanted = theirs(peer, tokens)
    first = session.prefill(tokens[:, :3])
    assert share([(np.concatenate((first, np.stack([session.step(tokens[:, index]) for index in range(3, LENGTH)], 1)), axis=1), wanted)]) <= 1
    session.reset()
    wanted = theirs(peer, tokens, position_ids=np.arange(300, 300 + LENGTH)[None, None].repeat(3, 0).repeat(2, 1))
    assert share([(session.prefill(tokens, start=300), wanted)]) <= 1


@each
def test_logits_of_padded_images_match_transformers(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens, places = tokens_of(), _places()
    padded, behind = np.zeros((2, LENGTH + 6), np.int64), np.zeros((3, 2, LENGTH + 6), np.int64)
    mask = np.stack([np.arange(LENGTH + 6) >= 6, np.arange(LENGTH + 6) >= 2]).astype(np.int64)
    for row, begin in enumerate((6, 2)):
        padded[row, begin:], behind[:, row, begin:] = tokens[row].tolist() + [5] * (6 - begin), places.max() + 1
        behind[:, row, begin : begin + LENGTH] = places[:, row]
    wanted = theirs(peer, padded, attention_mask=mask, position_ids=behind)
    assert share([(session.prefill(padded, attention_mask=mask, grid=behind)[mask == 1], wanted[mask == 1])]) <= 1


def _model_of(name: str) -> Any:
    """Return transformers' model with weights on the meta device."""
    class_name = CLASSES[name]
    config = getattr(transformers, class_name + "Config")(text_config=TEXT, vision_config=TOWERS[name])
    with torch.device("meta"):
        return getattr(transformers, class_name + "Model")(config)


@pytest.mark.parametrize("name", CLASSES)
def test_coordinates_match_transformers(name: str) -> None:
    images, videos = [(1, 4, 6), (1, 2, 2)], [(4, 4, 2), (2, 2, 8)]
    moving = [0, 2, 2] * 4 + [0, 2, 2, 2, 2] * 2 if name in SPLIT else [0, *[2] * 8, 0, *[2] * 8]
    kinds = [0] * 3 + [1] * 6 + [0] * 2 + moving + [0, 1] + [0] * 4
    given, seconds = torch.tensor([kinds]), [0.3, 1.7]
    more = {"second_per_grid_ts": torch.tensor(seconds)} if name == "qwen2_5_vl" else {}
    wanted, delta = _model_of(name).get_rope_index(given * 0, given, torch.tensor(images), torch.tensor(videos), **more)
    intervals = [3 * second for second in seconds] if more else []
    found = coordinates(kinds, images, videos, 2, intervals, split=name in SPLIT, behind="sides")
    assert found.tolist() == wanted[:, 0].tolist() and found.max() + 1 == len(kinds) + int(delta)


def test_text_after_an_image_continues_from_the_largest_coordinate_or_from_the_sides() -> None:
    kinds = [0, 2, 2, 2, 0]
    assert coordinates(kinds, videos=[(3, 2, 2)]).tolist() == [[0, 1, 2, 3, 4], [0, 1, 1, 1, 4], [0, 1, 1, 1, 4]]
    assert coordinates(kinds, videos=[(3, 2, 2)], behind="sides").tolist() == [[0, 1, 2, 3, 2], [0, 1, 1, 1, 2], [0, 1, 1, 1, 2]]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kinds": [[0, 1]]}, "for each token of one row, got int64 of shape [1, 2]"),
        ({"kinds": [0, 3]}, "expected kinds 0, 1 or 2"),
        ({"kinds": [0, 1, 1], "images": [(1, 4, 4)]}, "got 2 tokens for grid [1, 4, 4]"),
        ({"kinds": [0, 1]}, "got 1 tokens for grid [0, 0, 0]"),
        ({"kinds": [0], "images": [(1, 2, 2)]}, "expected tokens for every image and video, got too few for 1 images and 0 videos"),
        ({"kinds": [1], "images": [(2, 2)]}, "expected images as three whole numbers above 0 each"),
        ({"kinds": [2], "videos": [(1, 2, 2)], "intervals": [1.0, 2.0]}, "one finite interval for each of 1 videos, or no intervals with split frames, got [1.0, 2.0]"),
        ({"kinds": [2], "videos": [(1, 2, 2)], "intervals": [1.0], "split": True}, "no intervals with split frames, got [1.0]"),
        ({"kinds": [0], "behind": "video"}, "expected behind to be one of largest, sides"),
    ],
)
def test_grids_that_do_not_match_their_tokens_are_refused(given: Dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        coordinates(**given)


def _flat(config: Dict[str, Any]) -> Dict[str, Any]:
    """Convert a config to the older form without text_config: keys of the text model are at the top, the rotation is in rope_scaling."""
    text = {key: value for key, value in config.pop("text_config").items() if key not in ("model_type", "rope_parameters", "layer_types")}
    scaling = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 10000.0, "vision_token_id": 57}
    return {**config, **text, **scaling}


def _same(config: Dict[str, Any]) -> Dict[str, Any]:
    return config


def _alone(config: Dict[str, Any]) -> Dict[str, Any]:
    return {**config["text_config"], "tie_word_embeddings": config["tie_word_embeddings"]}


# Forms in which the same model is saved: a change of its config, and the prefix of its tensor names.
SAVED: Dict[str, Tuple[str, Callable[[Dict[str, Any]], Dict[str, Any]], Dict[str, str]]] = {
    "a flat config": ("qwen2_vl", _flat, {}),
    "a flat config, heads tied": ("qwen2_5_vl", _flat, {}),
    "names of the modules": ("qwen2_vl", _same, {r"^model\.": "model.language_model.", r"^visual\.": "model.visual."}),
    "names of older modules": ("qwen3_vl", _same, {r"^model\.language_model\.": "model.", r"^model\.visual\.": "visual."}),
    "a text model alone": ("qwen3_vl with biases", _alone, {r"^model\.language_model\.": "", r"^model\.visual\.": "visual."}),
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
    model, places = from_pretrained(tmp_path), _places()
    assert share([(eager_session(model).prefill(tokens_of(), grid=places), theirs(peer, tokens_of(), position_ids=places))]) <= 1


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
    **{f"{name}: an unknown key": (name, _text(attention_sigmoid=True), "got attention_sigmoid=True") for name in CLASSES},
    **{f"{name}: an unknown key beside": (name, _beside(attention_sigmoid=True), "got attention_sigmoid=True outside") for name in CLASSES},
    **{f"{name}: a longer rotation": (name, _rotation(rope_type="linear", factor=2.0), "yarn without mscale, with mrope_section, got linear") for name in CLASSES},
    **{f"{name}: too few pairs": (name, _rotation(mrope_section=[2, 3, 2]), ", got [2, 3, 2]") for name in CLASSES},
    "qwen2_vl: two sections": ("qwen2_vl", _rotation(mrope_section=[4, 4]), "three integers above 0 with sum 8, got [4, 4]"),
    "qwen2_vl: usual sections": ("qwen2_vl", _text(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "got [16, 24, 24]"),
    "qwen2_vl: part of a head": ("qwen2_vl", _rotation(partial_rotary_factor=0.5, mrope_section=[1, 1, 2]), "rotation of whole heads"),
    "qwen2_vl: axes in turn": ("qwen2_vl", _rotation(mrope_interleaved=True), "mrope_interleaved to be False for qwen2_vl, got True"),
    "qwen2_vl: another head size": ("qwen2_vl", _text(head_dim=32), "head_dim to be 16, got 32"),
    "qwen2_vl: windows without a size": ("qwen2_vl", _text(layer_types=["sliding_attention"] * 2), "sliding_attention without a window"),
    "qwen2_vl: no mapping": ("qwen2_vl", _beside(text_config=3), "text_config to be a mapping, got 3"),
    "qwen3_vl: part of a head": ("qwen3_vl", _rotation(partial_rotary_factor=0.5, mrope_section=[2, 2, 2]), "rotation of whole heads"),
    "glm4v: another head size": ("glm4v", _text(head_dim=32), "head_dim to be 16, got 32"),
    "qwen3_vl: axes in sections": ("qwen3_vl", _rotation(mrope_interleaved=False), "mrope_interleaved to be True for qwen3_vl, got False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_configs_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, change, named = REFUSED[case]
    saved(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    with pytest.raises(ValueError) as refusal:
        families.read(config)
    assert str(refusal.value).startswith((f"{name}: ", "hugging_face: ")) and named in str(refusal.value)


# Faults: a model, and wrong values in its config.
FELT: Dict[str, Tuple[str, Callable[[Dict[str, Any]], None]]] = {
    "qwen2_vl: another theta": ("qwen2_vl", _rotation(rope_theta=1000000.0)),
    "qwen2_vl: other sections": ("qwen2_vl", _rotation(mrope_section=[3, 2, 3])),
    "qwen2_vl: a longer window": ("qwen2_vl with windows", _text(sliding_window=9)),
    "qwen2_vl: windows elsewhere": ("qwen2_vl with windows", _text(layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "qwen3_vl: other sections": ("qwen3_vl", _rotation(mrope_section=[4, 4, 4])),
    "qwen3_vl: another temperature": ("qwen3_vl beyond its length", _rotation(attention_factor=1.5)),
    "glm4v: another part of a head": ("glm4v", _rotation(partial_rotary_factor=1.0, mrope_section=[2, 2, 4])),
    "qwen3_vl: another epsilon": ("qwen3_vl", _text(rms_norm_eps=1e-2)),
}


@pytest.mark.parametrize("case", FELT)
def test_a_wrongly_read_config_is_detected(case: str, tmp_path: Path) -> None:
    name, change = FELT[case]
    peer, places = saved(name, tmp_path), _places()
    config = json.loads((tmp_path / "config.json").read_text())
    change(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert share([(eager_session(from_pretrained(tmp_path)).prefill(tokens_of(), grid=places), theirs(peer, tokens_of(), position_ids=places))]) > 1
