"""Hidden states of encoders compared with transformers: whole rows, padding on either
side, token types, every target and signature.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import encodings, export_model, from_pretrained, load
from posenc_export.encodings.shared.base import Geometry
from posenc_export.export import TARGETS, Sources
from posenc_export.export.expected import eager_session
from posenc_export.runtime import Session

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.cases import choice
from tests.models.encoders import MODELS, saved
from tests.models.patterns import ENCODER, share, theirs, tokens_of

# One worker, so that each model is traced once.
pytestmark = pytest.mark.xdist_group("encoder families")
SIGNATURES = {name: tuple(TARGETS[name].layout) for name in ("ort", "onnx", "torchscript", "pt2")}
PEERS: dict[str, tuple[Any, Sources, Path]] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def _peer(name: str, folders: Path) -> tuple[Any, Sources, Path]:
    """Return transformers' model, ours and their folder. Each is created once."""
    if name not in PEERS:
        peer, folder = saved(name, folders / name)
        PEERS[name] = (peer, Sources(from_pretrained(folder)), folder)
    return PEERS[name]


def _differs(model: Any, peer: Any) -> float:
    """Return the largest difference of hidden states relative to the tolerance."""
    tokens = tokens_of(low=5)
    with torch.no_grad():
        hidden = model(torch.from_numpy(tokens)).numpy()
    return share([(hidden, theirs(peer, tokens, "last_hidden_state"))])


def _session(name: str, target: str, signature: str, folders: Path) -> Session:
    if target == "eager":
        return eager_session(_peer(name, folders)[1].model)
    place = folders / f"{name} {target} {signature}"
    if not place.exists():
        export_model(_peer(name, folders)[1], target, place, signature, verify=False)
    return load(place, threads=1, provider="cpu").session()


CALLS = [
    ("eager", "positions"),
    *((target, signature) for target in SIGNATURES for signature in SIGNATURES[target]),
]
# One model of each way to know the position of a token.
QUICK = [
    *((name, "eager", "positions") for name in ("roberta other", "modernbert other", "roformer")),
    ("mpnet", "eager", "positions"),
    ("t5 gated", "torchscript", "positions"),
    ("bert", "ort", "mask"),
    ("deberta-v2", "ort", "positions"),
]
CASES = choice([(name, *call) for name in MODELS for call in CALLS], QUICK)


@pytest.mark.parametrize(("name", "target", "signature"), CASES)
def test_hidden_states_match_transformers(
    name: str, target: str, signature: str, folders: Path
) -> None:
    for pattern in ENCODER:
        session = _session(name, target, signature, folders)
        assert share(ENCODER[pattern](_peer(name, folders)[0], session)) <= 1, pattern


@pytest.mark.parametrize("name", ["bert", "roberta other"])
def test_token_types_change_hidden_states(name: str, folders: Path) -> None:
    session, tokens = _session(name, "eager", "positions", folders), tokens_of(low=5)
    types = np.random.default_rng(1).integers(0, session.manifest.segments, tokens.shape)
    plain = session.prefill(tokens)
    assert share([(session.prefill(tokens, token_types=types), plain)]) > 1
    assert np.array_equal(session.prefill(tokens, token_types=np.zeros_like(tokens)), plain)
    for wrong, message in (
        (np.full_like(tokens, 9), "expected token_types in 0 .. "),
        (types[:, :1], "expected token_types of shape"),
        (types.astype(np.float32), "with whole numbers, got .* float32"),
    ):
        with pytest.raises(ValueError, match=message):
            session.prefill(tokens, token_types=wrong)


@pytest.mark.parametrize(
    "name", choice(["mpnet", "modernbert other", "deberta-v2"], ["deberta-v2"])
)
def test_an_export_of_an_encoder_is_certified_against_the_oracle(name: str, folders: Path) -> None:
    place = folders / f"{name} certified"
    manifest = export_model(_peer(name, folders)[1], "ort", place, verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


@pytest.mark.parametrize(
    ("name", "task", "head"), [("bert", "PreTraining", True), ("electra", "MaskedLM", False)]
)
def test_heads_that_are_not_read_or_not_wanted_are_left_out(
    name: str, task: str, head: bool, tmp_path: Path
) -> None:
    peer, folder = saved(name, tmp_path, f"AutoModelFor{task}")
    assert _differs(from_pretrained(folder, head=head), peer.base_model) <= 1


def test_the_encoder_of_t5_is_loaded_without_its_decoder(tmp_path: Path) -> None:
    peer, folder = saved("t5", tmp_path, "AutoModelForSeq2SeqLM")
    assert _differs(from_pretrained(folder), peer.get_encoder()) <= 1


def test_norms_with_tensorflow_names_are_loaded(tmp_path: Path) -> None:
    name = "bert"
    peer, folder = saved(name, tmp_path)
    file = folder / "model.safetensors"
    weights = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in load_file(file).items()
    }
    assert any("gamma" in name for name in weights)
    save_file(weights, file)
    assert _differs(from_pretrained(folder), peer) <= 1


def test_max_positions_of_a_rotation_may_exceed_the_config(folders: Path) -> None:
    assert from_pretrained(_peer("roformer", folders)[2], max_positions=100).max_positions == 100


SPANS = [(256, 512), (128, 512), (64, 1024), (48, 100), (16, 20)]


@pytest.mark.parametrize(("buckets", "relative"), SPANS)
def test_buckets_of_distances_match_transformers(buckets: int, relative: int) -> None:
    theirs = pytest.importorskip(
        "transformers.models.deberta_v2.modeling_deberta_v2"
    ).make_log_bucket_position
    distances = torch.arange(-2 * relative, 2 * relative + 1)
    ours = encodings.build(
        {"name": "deberta", "version": "v2", "span": buckets, "max_relative": relative},
        Geometry(8, 2, 4, 16, causal=False),
    )
    wanted = (theirs(distances, buckets, relative).long() + buckets).clamp(0, 2 * buckets - 1)
    assert torch.equal(ours.of_distance[distances.clamp(-relative, relative) + relative], wanted)
