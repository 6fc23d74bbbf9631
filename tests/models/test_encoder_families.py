"""Checkpoints of encoder families against the hidden states of transformers: whole rows, padding on either side, token types, every target and signature."""

import json
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export import encodings, export_model, from_pretrained, load
from posenc_export.encodings.base import Geometry
from posenc_export.export import TARGETS, Sources
from posenc_export.export.expected import eager_session
from posenc_export.models import families
from posenc_export.runtime import Session

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.encoders import MODELS, PADDING, SIZES, read, saved  # noqa: E402

pytestmark = pytest.mark.xdist_group("encoder families")  # one worker, so that each model is traced once
SIGNATURES = {name: tuple(TARGETS[name].layout) for name in ("ort", "onnx", "torchscript", "pt2")}
ABSOLUTE, RELATIVE = 2e-4, 1e-4
LENGTH = 40
LENGTHS = [LENGTH, 11, 26]
PEERS: Dict[str, Tuple[Any, Sources, Path]] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def _peer(name: str, folders: Path) -> Tuple[Any, Sources, Path]:
    """Transformers' model, ours and the folder of both; made once."""
    if name not in PEERS:
        peer, folder = saved(name, folders / name)
        PEERS[name] = (peer, Sources(read(name, folder)), folder)
    return PEERS[name]


def _session(name: str, target: str, signature: str, folders: Path) -> Session:
    place = folders / f"{name} {target} {signature}"
    if not place.exists():
        export_model(_peer(name, folders)[1], target, place, signature, verify=False)
    return load(place, threads=1).session()


def _segments(name: str, folders: Path) -> int:
    return int(_peer(name, folders)[1].of("float32").model.segments)


def _tokens(rows: int = len(LENGTHS), length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).integers(5, 61, (rows, length))


def _types(name: str, folders: Path) -> np.ndarray:
    """Token types of _tokens(), all of them in every row."""
    return np.random.default_rng(1).integers(0, max(_segments(name, folders), 1), _tokens().shape)


def _theirs(peer: Any, tokens: np.ndarray, **given: Any) -> np.ndarray:
    with torch.no_grad():
        return peer(torch.from_numpy(tokens), **{key: torch.from_numpy(value) for key, value in given.items()}).last_hidden_state.numpy()


def _close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool((np.abs(ours - theirs) <= ABSOLUTE + RELATIVE * np.abs(theirs)).all())


CALLS = [(target, signature) for target, signatures in SIGNATURES.items() for signature in signatures]
CASES = [
    # one of them for every model without -m exhaustive, in turn
    pytest.param(name, *call, marks=() if number % len(CALLS) == place else (pytest.mark.exhaustive,))
    for number, name in enumerate(MODELS)
    for place, call in enumerate(CALLS)
]
each = pytest.mark.parametrize(("name", "target", "signature"), CASES)


@each
def test_whole_rows_give_the_hidden_states_of_transformers(name: str, target: str, signature: str, folders: Path) -> None:
    session, tokens = _session(name, target, signature, folders), _tokens()
    assert _close(session.prefill(tokens), _theirs(_peer(name, folders)[0], tokens))
    assert _close(session.prefill(tokens[:, :9]), _theirs(_peer(name, folders)[0], tokens[:, :9]))


@each
def test_padding_on_either_side_gives_the_hidden_states_of_transformers(name: str, target: str, signature: str, folders: Path) -> None:
    peer, session = _peer(name, folders)[0], _session(name, target, signature, folders)
    numbers, tokens = np.arange(LENGTH), _tokens()
    given = {"token_types": _types(name, folders)} if _segments(name, folders) else {}
    for seen in (np.stack([numbers >= LENGTH - n for n in LENGTHS]), np.stack([numbers < n for n in LENGTHS])):
        mask = seen.astype(np.int64)
        padded = np.where(seen, tokens, PADDING)
        wanted = _theirs(peer, padded, attention_mask=mask, **_named(name, peer, mask), **({"token_type_ids": given["token_types"]} if given else {}))
        assert _close(session.prefill(padded, attention_mask=mask, **given)[seen], wanted[seen])


def _named(name: str, peer: Any, mask: np.ndarray) -> Dict[str, np.ndarray]:
    """Positions of valid tokens as transformers wants them, where a family takes any: RoFormer and others count columns, so that scores are the same."""
    if name.startswith(("bert", "electra", "distilbert", "modernbert")):
        return {"position_ids": (mask.cumsum(1) - 1).clip(0)}
    if name.startswith(("roberta", "xlm-roberta", "camembert")):
        return {"position_ids": (mask.cumsum(1) - 1).clip(0) + peer.config.pad_token_id + 1}
    return {}


@pytest.mark.parametrize("name", ["bert", "roberta other", "roformer"])
def test_token_types_are_felt(name: str, folders: Path) -> None:
    session, tokens, types = _session(name, "ort", "positions", folders), _tokens(), _types(name, folders)
    assert not _close(session.prefill(tokens, token_types=types), session.prefill(tokens))


@pytest.mark.parametrize("name", MODELS)
def test_an_encoder_keeps_nothing_and_ends_in_hidden_states(name: str, folders: Path) -> None:
    model = _peer(name, folders)[1].of("float32").model
    assert model.config.head is None and not any(attention.states() for attention in model.attentions())


@pytest.mark.parametrize("name", ["mpnet", "modernbert other"])
def test_an_export_of_an_encoder_is_certified_against_the_oracle(name: str, folders: Path) -> None:
    manifest = export_model(_peer(name, folders)[1], "ort", folders / f"{name} certified")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


HEADS = {
    "bert": ("AutoModelForMaskedLM", "AutoModelForPreTraining", "AutoModelForQuestionAnswering"),
    "roberta": ("AutoModelForMaskedLM", "AutoModelForSequenceClassification"),
    "mpnet": ("AutoModelForMaskedLM",),
    "modernbert": ("AutoModelForMaskedLM", "AutoModelForTokenClassification"),
    "roformer": ("AutoModelForMaskedLM",),
    "electra": ("AutoModelForPreTraining", "AutoModelForMaskedLM"),
    "distilbert": ("AutoModelForMaskedLM", "AutoModelForSequenceClassification"),
    "xlnet": ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForQuestionAnswering"),
    "deberta": ("AutoModelForMaskedLM", "AutoModelForSequenceClassification"),
    "deberta-v2": ("AutoModelForMaskedLM", "AutoModelForMultipleChoice"),
}


@pytest.mark.parametrize(("name", "head"), [(name, head) for name, heads in HEADS.items() for head in heads])
def test_heads_of_other_tasks_are_left_out(name: str, head: str, tmp_path: Path) -> None:
    peer, folder = saved(name, tmp_path, head)
    assert _close(eager_session(read(name, folder)).prefill(_tokens()), _theirs(peer.base_model, _tokens()))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["mpnet", "roformer", "deberta", "xlnet"])
def test_a_layer_alone_is_that_layer(name: str, layer: int, folders: Path) -> None:
    model, block = _peer(name, folders)[1].of("float32").model, read(name, _peer(name, folders)[2], layer=layer)
    for (key, own), (_, whole) in zip(block.attention.named_parameters(), model.layers[layer].attention.named_parameters(), strict=True):
        assert torch.equal(own, whole), key


def test_norms_by_their_old_names_are_read(tmp_path: Path) -> None:
    name = "bert"
    peer, folder = saved(name, tmp_path)
    file = folder / "model.safetensors"
    weights = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value for name, value in load_file(file).items()}
    assert any("gamma" in name for name in weights)
    save_file(weights, file)
    assert _close(eager_session(read(name, folder)).prefill(_tokens()), _theirs(peer, _tokens()))


def _config(name: str, folders: Path, **changes: Any) -> Dict[str, Any]:
    """config.json of a model, with other values; without the keys whose value is Ellipsis."""
    config = {**json.loads((_peer(name, folders)[2] / "config.json").read_text()), **changes}
    return {key: value for key, value in config.items() if value is not ...}


ROTATIONS = {"modernbert", "roformer"}


@pytest.mark.parametrize("name", MODELS)
def test_only_a_family_that_turns_has_a_rotation(name: str, folders: Path) -> None:
    config, _ = families.read(_config(name, folders), SIZES["max_position_embeddings"] if name.startswith("xlnet") else None)
    turned = any("rope" in spec["name"] for kind in config.kinds for spec in (*kind.attention.encodings, *config.tokens.encodings))
    assert turned == (name.split()[0] in ROTATIONS)


REFUSED = {
    "an unknown key": ("bert", {"new_key": 1}, "every key of config.json is understood, got new_key=1"),
    "a rotation in a family that has none": ("bert", {"rope_theta": 10000.0}, "got rope_theta"),
    "a decoder": ("bert", {"is_decoder": True}, "is_decoder is False, got True"),
    "cross-attention": ("roberta", {"add_cross_attention": True}, "add_cross_attention is False, got True"),
    "relative keys": ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'absolute', got 'relative_key'"),
    "pruned heads": ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads is {}, got"),
    "no epsilon": ("bert", {"layer_norm_eps": ...}, "config.json has layer_norm_eps, got none"),
    "no number of segments": ("bert", {"type_vocab_size": -1}, "type_vocab_size is a whole number of 0 or more, got -1"),
    "an activation": ("bert", {"hidden_act": "mish"}, "hidden_act is one of .*, got 'mish'"),
    "no padding": ("roberta", {"pad_token_id": None}, "pad_token_id is a whole number of 0 or more, got None"),
    "padding above the table": ("roberta", {"pad_token_id": 63}, "max_position_embeddings is above the 64 rows of padding, got 64"),
    "buckets": ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets is 32, got 16"),
    "values that turn": ("roformer", {"rotary_value": True}, "rotary_value is False, got True"),
    "a narrow table": ("electra", {"embedding_size": 32}, "embedding_size is 48, got 32"),
    "a narrow table by default": ("electra", {"embedding_size": ...}, "embedding_size is 48, got 128"),
    "no distances": ("deberta", {"relative_attention": False}, "relative_attention is True, got False"),
    "no distances by default": ("deberta-v2", {"relative_attention": ...}, "relative_attention is True, got False"),
    "one term alone": ("deberta", {"pos_att_type": ["c2p"]}, "pos_att_type is c2p and p2c, got .'c2p'.; nothing else"),
    "absolute positions beside distances": ("deberta", {"position_biased_input": True}, "position_biased_input is False, got True"),
    "heads that are mixed": ("deberta", {"talking_head": True}, "talking_head is False, got True"),
    "a convolution": ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}, "conv_kernel_size is 0, got 3"),
    "a norm of distances": ("deberta-v2", {"norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is none or layer_norm, got 'batch_norm'"),
    "odd buckets": ("deberta-v2", {"position_buckets": 7}, "position_buckets is .* even and below max_relative_positions, got 7 and 20"),
    "attention one way": ("xlnet", {"attn_type": "uni"}, "attn_type is 'bi', got 'uni'"),
    "two directions of data": ("xlnet", {"bi_data": True}, "bi_data is False, got True"),
    "distances that are cut off": ("xlnet", {"clamp_len": 8}, "clamp_len is -1, got 8"),
    "no range": ("xlnet", {}, "config.json has no max_position_embeddings, got none; give max_positions"),
    "layer types": ("modernbert", {"layer_types": ["chunked_attention"] * 5}, "layer_types are full_attention or sliding_attention, got 'chunked_attention'"),
    "too few layer types": ("modernbert", {"layer_types": ["full_attention"]}, "layer_types has an entry for each of 5 layers"),
    "one rotation for all": ("modernbert", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters is a mapping for full_attention and"),
    "theta twice": ("modernbert", {"local_rope_theta": 1e4}, "got local_rope_theta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(case: str, folders: Path) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        families.read(_config(name, folders, **changes), 64 if name == "xlnet" and case != "no range" else None)


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet", "distilbert"])
def test_a_range_beside_the_position_table_is_refused(name: str, folders: Path) -> None:
    with pytest.raises(ValueError, match="max_positions is the .* rows of its position table, got 20; leave it out"):
        from_pretrained(_peer(name, folders)[2], max_positions=20)


@pytest.mark.parametrize("name", ["roformer", "modernbert"])
def test_a_rotation_goes_on_beyond_the_range_of_the_config(name: str, folders: Path) -> None:
    assert from_pretrained(_peer(name, folders)[2], max_positions=100).config.max_positions == 100


def test_older_configs_of_modernbert_say_the_same(folders: Path) -> None:
    old = _config("modernbert", folders, layer_types=..., rope_parameters=..., global_rope_theta=160000.0, local_rope_theta=10000.0, global_attn_every_n_layers=3)
    assert families.read(old)[0] == families.read(_config("modernbert", folders))[0]
    assert families.read(_config("modernbert", folders, layer_types=..., rope_parameters=...))[0] == families.read(old)[0]


SPANS = [(256, 512), (128, 512), (64, 1024), (48, 100), (16, 20)]


@pytest.mark.parametrize(("buckets", "relative"), SPANS)
def test_buckets_of_distances_are_those_of_transformers(buckets: int, relative: int) -> None:
    theirs = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2").make_log_bucket_position
    distances = torch.arange(-2 * relative, 2 * relative + 1)
    ours = encodings.build({"name": "deberta", "version": "v2", "span": buckets, "max_relative": relative}, Geometry(8, 2, 4, 16, causal=False))
    wanted = (theirs(distances, buckets, relative).long() + buckets).clamp(0, 2 * buckets - 1)
    assert torch.equal(ours.of_distance[distances.clamp(-relative, relative) + relative], wanted)


def test_buckets_of_mpnet_are_those_of_transformers(folders: Path) -> None:
    peer, ours = _peer("mpnet", folders)[0], _peer("mpnet", folders)[1].of("float32").model.attentions()[0].encoding
    distances = torch.arange(-300, 301)
    assert torch.equal(ours.of_distance[distances.clamp(-128, 128) + 128], peer.encoder.relative_position_bucket(distances))


def _swapped(first: str, second: str) -> Callable[[Dict[str, torch.Tensor]], None]:
    def change(weights: Dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if first in name]:
            other = name.replace(first, second)
            weights[name], weights[other] = weights[other], weights[name]

    return change


def _halves(part: str) -> Callable[[Dict[str, torch.Tensor]], None]:
    def change(weights: Dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if part in name]:
            weights[name] = torch.cat(weights[name].chunk(2)[::-1])

    return change


def _nothing(weights: Dict[str, torch.Tensor]) -> None:
    """Weights as they were."""


# A checkpoint read as if it said something else: keys of its config, its weights.
FAULTS: Dict[str, Any] = {
    "epsilon": ("bert", {"layer_norm_eps": 1e-2}, _nothing),
    "activation": ("bert", {"hidden_act": "gelu_new"}, _nothing),
    "heads": ("bert", {"num_attention_heads": 6}, _nothing),
    "keys for values": ("bert", {}, _swapped("self.key", "self.value")),
    "one norm for the other": ("bert", {}, _swapped("attention.output.LayerNorm", "output.LayerNorm")),
    "buckets of a shuffled table": ("mpnet", {}, _halves("relative_attention_bias")),
    "one bias for the other": ("deberta", {}, _swapped("q_bias", "v_bias")),
    "projections of distances": ("deberta-v2 other", {}, _swapped("pos_key_proj", "pos_query_proj")),
    "distances in another order": ("deberta", {}, _halves("rel_embeddings")),
    "another last bucket": ("deberta-v2 other", {"max_relative_positions": 24}, _nothing),
    "one trained vector for the other": ("xlnet", {}, _swapped("r_w_bias", "r_r_bias")),
    "gate for up": ("modernbert", {}, _halves("Wi")),
    "a window one narrower": ("modernbert", {"local_attention": 6}, _nothing),
    "theta of one layer type": ("modernbert other", {"rope_parameters": {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 20.0}}}, _nothing),
    "layer types": ("modernbert", {"layer_types": ["full_attention"] * 5}, _nothing),
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
    assert not _close(eager_session(read(name, folder)).prefill(_tokens()), _theirs(peer, _tokens()))
