"""Text models of vision-language models compared with transformers: text, and tokens of images
and videos with time, height and width as coordinates.
"""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import export_model, load
from posenc_export.export import Sources
from posenc_export.export.expected import eager_session
from posenc_export.models.by_transformers import TransformersModel
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.cases import choice
from tests.models.checkpoints import made
from tests.models.patterns import LENGTH, share, theirs, tokens_of
from tests.models.vision_models import MODELS, places, saved

pytestmark = pytest.mark.xdist_group("vision")  # one worker, so that each model is traced once
PEERS: dict[str, Any] = {}
SESSIONS: dict[tuple[str, str], Any] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


def _prepared(name: str, target: str, folders: Path) -> tuple[Any, Session]:
    """Return transformers' model and a new session of ours. Each model is created once."""
    if name not in PEERS:
        PEERS[name] = (saved(name, folders / name), Sources(from_pretrained(folders / name)))
    peer, sources = PEERS[name]
    if target == "eager":
        return peer, eager_session(sources.model)
    if (name, target) not in SESSIONS:
        manifest = export_model(sources, target, folders / f"{name} {target}", verify=False)
        text = peer.config.text_config
        types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
        layers = len([kind for kind in types if kind != "linear_attention"])
        assert target != "ort" or manifest.operators["GroupQueryAttention"] == layers
        SESSIONS[name, target] = load(folders / f"{name} {target}", threads=1, provider="cpu")
    return peer, SESSIONS[name, target].session()


QUICK = [("qwen3_vl", "ort"), ("qwen2_vl with windows", "torchscript"), ("glm4v", "eager")]
CASES = itertools.product(MODELS, ("eager", "ort", "onnx", "onnx-static", "torchscript"))
each = pytest.mark.parametrize(("name", "target"), choice(CASES, QUICK))


@each
def test_logits_of_images_and_videos_match_transformers_at_every_split(
    name: str, target: str, folders: Path
) -> None:
    peer, session = _prepared(name, target, folders)
    tokens, grid = tokens_of(), places()
    wanted = theirs(peer, tokens, position_ids=grid)
    assert share([(session.prefill(tokens, grid=grid), wanted)]) <= 1
    session.reset()
    assert share([(session.prefill(tokens, chunk=7, grid=grid), wanted)]) <= 1
    session.reset()
    first = session.prefill(tokens[:, :29], grid=grid[:, :, :29])
    steps = [
        session.prefill(tokens[:, index : index + 1], grid=grid[:, :, index : index + 1])
        for index in range(29, LENGTH)
    ]
    assert share([(np.concatenate((first, *steps), axis=1), wanted)]) <= 1


@each
def test_logits_of_text_match_transformers_step_by_step(
    name: str, target: str, folders: Path
) -> None:
    peer, session = _prepared(name, target, folders)
    tokens = tokens_of()
    wanted = theirs(peer, tokens)
    first = session.prefill(tokens[:, :3])
    steps = np.stack([session.step(tokens[:, index]) for index in range(3, LENGTH)], 1)
    assert share([(np.concatenate((first, steps), axis=1), wanted)]) <= 1
    session.reset()
    shifted = np.arange(300, 300 + LENGTH)[None, None].repeat(3, 0).repeat(2, 1)
    wanted = theirs(peer, tokens, position_ids=shifted)
    assert share([(session.prefill(tokens, start=300), wanted)]) <= 1


@each
def test_logits_of_padded_images_match_transformers(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens, grid = tokens_of(), places()
    padded, behind = np.zeros((2, LENGTH + 6), np.int64), np.zeros((3, 2, LENGTH + 6), np.int64)
    mask = np.stack([np.arange(LENGTH + 6) >= 6, np.arange(LENGTH + 6) >= 2]).astype(np.int64)
    for row, begin in enumerate((6, 2)):
        padded[row, begin:], behind[:, row, begin:] = (
            tokens[row].tolist() + [5] * (6 - begin),
            grid.max() + 1,
        )
        behind[:, row, begin : begin + LENGTH] = grid[:, row]
    wanted = theirs(peer, padded, attention_mask=mask, position_ids=behind)
    logits = session.prefill(padded, attention_mask=mask, grid=behind)
    assert share([(logits[mask == 1], wanted[mask == 1])]) <= 1


def test_a_rotation_that_takes_no_coordinates_has_none() -> None:
    peer = made("llama")
    peer.model.rotary_emb.mrope_section = [2, 3, 3]
    assert TransformersModel(peer, 61, 64).axes == 0


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a config to the older form without text_config: keys of the text model are at the
    top, the rotation is in rope_scaling.
    """
    text = config.pop("text_config")
    for key in ("model_type", "rope_parameters", "layer_types"):
        text.pop(key, None)
    scaling = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    return {**config, **text, **scaling, "rope_theta": 10000.0, "vision_token_id": 57}


# Forms in which the same model is saved: a change of its config, and of its tensors' names.
SAVED: dict[str, tuple[str, Any, dict[str, str]]] = {
    "a flat config": ("qwen2_vl", _flat, {}),
    "a flat config, heads tied": ("qwen2_5_vl", _flat, {}),
    "names of the modules": (
        "qwen2_vl",
        dict,
        {r"^model\.": "model.language_model.", r"^visual\.": "model.visual."},
    ),
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
    tokens, grid = tokens_of(), places()
    with torch.no_grad():
        ours = from_pretrained(tmp_path)(torch.from_numpy(tokens), torch.from_numpy(grid))
    assert share([(ours.numpy(), theirs(peer, tokens, position_ids=grid))]) <= 1
