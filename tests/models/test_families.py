"""Checkpoints of every family against transformers' own forward, at every cut."""

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
from tests.models.checkpoints import BY_COLUMN, MODELS, saved  # noqa: E402

pytestmark = pytest.mark.xdist_group("families")  # one worker, so that each model is traced once
TARGETS = ["ort", "torchscript", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("onnx", "onnx-static"))]
ABSOLUTE, RELATIVE = 2e-4, 1e-4  # transformers forms angles in float32: at 512 positions they are off by 3e-5
PEERS: Dict[str, Any] = {}
SESSIONS: Dict[Tuple[str, str], Any] = {}
LENGTH = 40  # below the 64 tokens where the long factors of phi3 begin: there transformers' own step and full pass differ


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def _prepared(name: str, target: str, folders: Path) -> Tuple[Any, Session]:
    """Transformers' model and a new session on ours; each is made once."""
    if name not in PEERS:
        peer, folder = saved(name, folders / name)
        PEERS[name] = (peer, Sources(from_pretrained(folder)))
    peer, sources = PEERS[name]
    if (name, target) not in SESSIONS:
        export_model(sources, target, folders / f"{name} {target}", verify=False)
        SESSIONS[name, target] = load(folders / f"{name} {target}", threads=1)
    return peer, SESSIONS[name, target].session()


def _theirs(peer: Any, tokens: np.ndarray, **given: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return peer(torch.from_numpy(tokens), use_cache=False, **{key: torch.from_numpy(value) for key, value in given.items()}).logits.numpy()


def _tokens(rows: int = 2, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).integers(3, 61, (rows, length))


def _close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool((np.abs(ours - theirs) <= ABSOLUTE + RELATIVE * np.abs(theirs)).all())


CASES = [pytest.param(n, *getattr(t, "values", (t,)), marks=getattr(t, "marks", ())) for n in MODELS for t in TARGETS]
each = pytest.mark.parametrize(("name", "target"), CASES)
each_by_position = pytest.mark.parametrize(("name", "target"), [case for case in CASES if case.values[0] not in BY_COLUMN])


@each
def test_full_pass_chunks_and_steps_give_the_logits_of_transformers(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens = _tokens()
    wanted = _theirs(peer, tokens)
    assert _close(session.prefill(tokens), wanted)
    session.reset()
    assert _close(session.prefill(tokens, chunk=7), wanted)
    session.reset()
    first = session.prefill(tokens[:, :3])
    steps = [session.step(tokens[:, index]) for index in range(3, LENGTH)]
    assert _close(np.concatenate((first, np.stack(steps, 1)), axis=1), wanted)


@each_by_position
def test_a_start_beyond_zero_gives_the_logits_of_transformers_at_those_positions(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens = _tokens()
    wanted = _theirs(peer, tokens, position_ids=np.arange(300, 300 + LENGTH)[None].repeat(2, 0))
    first = session.prefill(tokens[:, :20], start=300)
    assert _close(np.concatenate((first, np.stack([session.step(tokens[:, index]) for index in range(20, LENGTH)], 1)), axis=1), wanted)


@each_by_position
def test_left_padded_and_ragged_rows_give_the_logits_of_transformers(name: str, target: str, folders: Path) -> None:
    peer, session = _prepared(name, target, folders)
    tokens, lengths = _tokens(3), [LENGTH, 11, 26]
    mask = np.stack([np.arange(LENGTH) >= LENGTH - length for length in lengths]).astype(np.int64)
    wanted = _theirs(peer, tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clip(0))
    assert _close(session.prefill(tokens[:, :36], attention_mask=mask[:, :36])[mask[:, :36] == 1], wanted[:, :36][mask[:, :36] == 1])
    assert _close(np.stack([session.step(tokens[:, index]) for index in range(36, LENGTH)], 1), wanted[:, 36:])
    session.reset()
    ragged = session.prefill([row[LENGTH - length :] for row, length in zip(tokens, lengths, strict=True)])
    for row, length in enumerate(lengths):
        assert _close(ragged[row, :length], wanted[row, LENGTH - length :])


@pytest.mark.parametrize("name", ["smollm3", "phi3"])
def test_an_export_of_a_checkpoint_is_certified_against_the_oracle(name: str, folders: Path) -> None:
    _prepared(name, "ort", folders)
    manifest = export_model(PEERS[name][1], "ort", folders / f"{name} certified")
    assert manifest.certificate is not None and manifest.certificate["passed"] and not manifest.source
    assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_alone_gives_what_the_attention_of_transformers_gives(layer: int, folders: Path) -> None:
    peer, _ = _prepared("smollm3", "ort", folders)
    x = torch.randn(1, 20, 64)
    positions = torch.arange(20)[None]
    mask = torch.full((20, 20), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        wanted = peer.model.layers[layer].self_attn(x, position_embeddings=peer.model.rotary_emb(x, positions), attention_mask=mask)[0].numpy()
    block = from_pretrained(folders / "smollm3", layer=layer)
    assert [spec["name"] for spec in block.config.attention.encodings] == ([] if layer == 3 else ["rope"])
    assert _close(eager_session(block).prefill(x.numpy()), wanted)


def _swapped(first: str, second: str) -> Callable[[Dict[str, torch.Tensor]], None]:
    def change(weights: Dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if first in name]:
            other = name.replace(first, second)
            weights[name], weights[other] = weights[other], weights[name]

    return change


def _nothing(weights: Dict[str, torch.Tensor]) -> None:
    """Weights as they were."""


# A checkpoint read as if it said something else: keys of its config, its weights.
FAULTS: Dict[str, Any] = {
    "theta": ("mistral", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}, _nothing),
    "epsilon": ("qwen2", {"rms_norm_eps": 1e-3}, _nothing),
    "a scaling left out": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, _nothing),
    "a layer that turns": ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, _nothing),
    "other factors": ("phi3", {"original_max_position_embeddings": 8}, _nothing),
    "keys for values": ("qwen2", {}, _swapped("k_proj", "v_proj")),
    "gate for up": ("llama", {}, _swapped("gate_proj", "up_proj")),
    "one norm for the other": ("llama", {}, _swapped("input_layernorm", "post_attention_layernorm")),
    "layers in another order": ("llama", {}, _swapped("layers.0", "layers.1")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_read_wrongly_would_be_seen(fault: str, tmp_path: Path) -> None:
    name, keys, change = FAULTS[fault]
    peer, folder = saved(name, tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **keys}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({key: value.clone() for key, value in weights.items()}, folder / "model.safetensors")
    assert not _close(eager_session(from_pretrained(folder)).prefill(_tokens()), _theirs(peer, _tokens()))
