"""Checkpoints of decoders compared with transformers, in every call pattern."""

import json
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import export_model, load
from posenc_export.export import Sources
from posenc_export.export.expected import eager_session
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import MODELS, WITHOUT, saved  # noqa: E402
from tests.models.patterns import DECODER, fused_layers, share, theirs, tokens_of  # noqa: E402

pytestmark = pytest.mark.xdist_group("decoders")  # one worker, so that each model is traced once
PEERS: Dict[str, Any] = {}
SESSIONS: Dict[Tuple[str, str], Any] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


def _checkpoint(name: str, folders: Path) -> Tuple[Any, Sources]:
    """Return transformers' model and ours. Each is created once."""
    if name not in PEERS:
        peer, folder = saved(name, folders / name)
        PEERS[name] = (peer, Sources(from_pretrained(folder)))
    return PEERS[name]  # type: ignore[no-any-return]


def _prepared(name: str, target: str, folders: Path) -> Tuple[Any, Session]:
    """Return transformers' model and a new session of ours, or of the module for target eager. Each
    model is created once.
    """
    peer, sources = _checkpoint(name, folders)
    if target == "eager":
        return peer, eager_session(sources.model)
    if (name, target) not in SESSIONS:
        export_model(sources, target, folders / f"{name} {target}", verify=False)
        SESSIONS[name, target] = load(folders / f"{name} {target}", threads=1, provider="cpu")
    return peer, SESSIONS[name, target].session()


# Mechanisms in eager mode, and on targets those that together have
# every part of attention.
QUICK = {
    "ort": ("phi3", "gemma3_text", "falcon", "gpt_oss", "bloom"),
    "eager": ("llama", "mistral", "gpt2", "llama4_text"),
    "torchscript": ("mpt", "gpt_oss"),
}
CASES = [
    pytest.param(
        name, target, pattern, marks=() if name in QUICK.get(target, ()) else pytest.mark.exhaustive
    )
    for name in MODELS
    for target in ("eager", "ort", "onnx", "onnx-static", "torchscript")
    for pattern in DECODER
    if pattern not in WITHOUT.get(name, ())
]


@pytest.mark.parametrize(("name", "target", "pattern"), CASES)
def test_logits_match_transformers(name: str, target: str, pattern: str, folders: Path) -> None:
    assert share(DECODER[pattern](*_prepared(name, target, folders))) <= 1


def test_kept_logits_match_transformers(folders: Path) -> None:
    peer, session = _prepared("phi3", "ort", folders)
    tokens = tokens_of()
    logits = session.prefill(tokens, logits_to_keep=3, chunk=7)
    assert share([(logits, theirs(peer, tokens, logits_to_keep=np.arange(37, 40)))]) <= 1


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3_text", "falcon", "gpt_oss", "bloom"])
def test_every_layer_is_fused_on_ort(name: str, folders: Path) -> None:
    assert fused_layers(_prepared(name, "ort", folders)[1].manifest) == 2


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.exhaustive), "gpt_oss"])
def test_an_export_of_a_checkpoint_is_certified_against_the_oracle(
    name: str, folders: Path
) -> None:
    _prepared(name, "ort", folders)
    manifest = export_model(PEERS[name][1], "ort", folders / f"{name} certified")
    assert (
        manifest.certificate is not None and manifest.certificate["passed"] and not manifest.source
    )
    assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


def _swapped(first: str, second: str) -> Callable[[Dict[str, torch.Tensor]], None]:
    def change(weights: Dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if first in name]:
            other = name.replace(first, second)
            weights[name], weights[other] = weights[other], weights[name]

    return change


def _nothing(weights: Dict[str, torch.Tensor]) -> None:
    """Leave the weights unchanged."""


# Faults: wrong values in the config, or a wrong change of the weights.
FAULTS: Dict[str, Any] = {
    "theta": (
        "mistral",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        _nothing,
    ),
    "epsilon": ("llama", {"rms_norm_eps": 1e-3}, _nothing),
    "a longer window": ("mistral with a window", {"sliding_window": 9}, _nothing),
    "a scaling left out": (
        "mistral with a window",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        _nothing,
    ),
    "other factors": ("phi3", {"original_max_position_embeddings": 512}, _nothing),
    "keys for values": ("llama", {}, _swapped("k_proj", "v_proj")),
    "gate for up": ("llama", {}, _swapped("gate_proj", "up_proj")),
    "one norm for the other": (
        "llama",
        {},
        _swapped("input_layernorm", "post_attention_layernorm"),
    ),
    "layers in another order": ("llama", {}, _swapped("layers.0", "layers.1")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrongly_read_checkpoint_is_detected(fault: str, tmp_path: Path) -> None:
    name, keys, change = FAULTS[fault]
    peer, folder = saved(name, tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **keys}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({key: value.clone() for key, value in weights.items()}, folder / "model.safetensors")
    logits = eager_session(from_pretrained(folder)).prefill(tokens_of())
    assert share([(logits, theirs(peer, tokens_of()))]) > 1
