"""The gated delta rule beside its recurrence in float64 and transformers' functions."""

import functools
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from posenc_export.export import Sources, export
from posenc_export.export.describe import eager
from posenc_export.models import oracle
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config
from posenc_export.ops import recurrence
from posenc_export.runtime import Model, load
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.tiny import block, decoder

pytestmark = pytest.mark.xdist_group("gated delta")
TOKENS = 150  # several chunks of the lowering, of 32 tokens, and a part of one


def hybrid(max_positions: int = 1100) -> StackConfig:
    """Describe gated delta rules before and after attention, of other sizes. The second has a decay
    for each entry of a key.
    """
    softmax = decoder("rope", max_positions=max_positions)
    delta = decoder("nope", mechanism="gated_delta").layers["layer"]
    sizes = {"value_size": 24, "kernel": 3, "largest_rate": 2.0}
    layers = {
        "delta": delta.with_attention(projection={"name": "gated_delta", **sizes}),
        "full": softmax.layers["layer"],
        "by_entry": delta.with_attention(kv_heads=2, projection={"name": "gated_delta", "rank": 8}),
    }
    return replace(softmax, layers=layers, order=tuple(layers))


@functools.lru_cache(maxsize=None)
def _sources(kind: str = "hybrid") -> Sources:
    return Sources(seeded(hybrid(), 0) if kind == "hybrid" else _hard(kind))


# Biases of decays and of rates, by kind of input. With equal keys, rates near 2 and no decay, each
# token undoes what the last one wrote, and powers of the system of a chunk exceed float32.
HARD: Dict[str, Tuple[float, float]] = {
    "equal tokens, rates of 2": (-60.0, 30.0),
    "equal tokens, rates of 1": (-60.0, 0.0),
    "strong decays": (40.0, 1.0),
    "small rates": (-60.0, -9.0),
    "decays by entry": (40.0, 1.0),
}


def _hard(kind: str) -> Any:
    """A block whose first input is the decay's, and whose second the rate's, of all heads. By
    entry, a third of the entries forgets nothing, and the others forget in different tokens.
    """
    config = block("nope", mechanism="gated_delta", max_positions=256)
    rank = 6 if "entry" in kind else 0
    sizes = {"name": "gated_delta", "value_size": 24, "largest_rate": 2.0, "rank": rank}
    model = seeded(replace(config, attention=replace(config.attention, projection=sizes)), 0)
    projection: Any = model.attention.projection
    decay, rate = HARD[kind]
    with torch.no_grad():
        ends = projection.inputs.weight[-12:]
        ends.zero_()
        ends[6:, 0], ends[:6, 1] = decay, rate
        if rank:
            projection.decays.weight.zero_()
            entries = projection.decays.weight.unflatten(0, (3, -1))
            entries[0, :, 0], entries[1, :, 0], entries[2, :, 0] = 1.0, -1.0, 1e-3
            projection.step.value[-32:] = -60.0
    return model.eval()


def _inputs(kind: str) -> np.ndarray:
    """Hidden states [n,E]; with strong decays, only every third token forgets."""
    x = np.random.default_rng(1).standard_normal((TOKENS, 48)).astype(np.float32)
    if kind.startswith("equal"):
        x[:] = x[0]
    x[:, :2] = 1.0
    if kind in ("strong decays", "decays by entry"):
        x[:, 0] = np.where(np.arange(TOKENS) % 3 == 0, 1.0, -1.0)
    return x


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(
    "target", ["eager", "onnx", "ort", pytest.param("pt2", marks=pytest.mark.exhaustive)]
)
def test_outputs_match_the_recurrence_in_float64(kind: str, target: str, tmp_path: Path) -> None:
    traced, x = _sources(kind), _inputs(kind)
    if target == "eager":
        module, manifest = eager(traced.model)
        model = Model(TorchGraph(module, manifest))
    else:
        export(traced, target, tmp_path / "a", verify=False)
        model = load(tmp_path / "a", provider="cpu")
    expected = oracle.full_pass(traced.model, x, 0)
    # Errors of all tokens add up in a state that forgets nothing.
    bound = tolerance("float32", 1, 48 if "2" not in kind else TOKENS * TOKENS)
    whole = model.session().prefill(x[None], chunk=TOKENS)[0]
    assert worst_error(whole, expected) <= bound
    session = model.session()
    parts = [session.prefill(x[None, :70], chunk=33)[0]]
    parts += [session.step(token[None]) for token in x[70:80]]
    parts.append(session.prefill(x[None, 80:], chunk=64)[0])
    assert worst_error(np.concatenate(parts), expected) <= bound


@pytest.mark.parametrize("entries", [1, 16])
def test_the_rule_is_that_of_transformers(entries: int) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as by_entry
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 70, 3, 16, generator=generator) for _ in range(2))
    v, state = torch.randn(2, 70, 6, 24, generator=generator), torch.randn(2, 6, 16, 24)
    decay = -torch.rand(2, 70, 6, entries, generator=generator)
    rate = torch.rand(2, 70, 6, generator=generator)
    settings = {"g": decay, "beta": rate, "initial_state": state, "output_final_state": True}
    q, k = (peer.l2norm(part) for part in (q, k))
    if entries == 1:
        settings["g"] = decay[..., 0]
        expected = peer.torch_recurrent_gated_delta_rule(q, k, v, **settings)
    else:
        heads = (part.repeat_interleave(2, dim=2) for part in (q, k))
        expected = by_entry.recurrent_kimi_delta_attention(*heads, v, **settings)
    actual = recurrence.gated_delta(q / 4, k, v, decay.flatten(2), rate, state)
    for ours, theirs in zip(actual, expected, strict=True):
        assert worst_error(ours.numpy(), theirs.numpy()) <= tolerance("float32", 1, 70)


QUICK = ("ort", "onnx", "torchscript")
TARGETS = [
    pytest.param(target, marks=[] if target in QUICK else [pytest.mark.exhaustive])
    for target in (*QUICK, "onnx-static", "pt2", "ort-cuda", "ort-native")
]


@pytest.mark.parametrize("target", TARGETS)
def test_a_model_with_attention_beside_it_is_certified(target: str, tmp_path: Path) -> None:
    manifest = export(_sources(), target, tmp_path / "a")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    states = [state.past for state in manifest.states if ".0." in state.past]
    assert states == ["past_key_values.0.tail", "past_key_values.0.memory"]
    fused = manifest.operators.get("LinearAttention", 0)
    assert fused == (2 if target.startswith("ort") else 0)


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("ort", {"signature": "mask"}),
        pytest.param("onnx", {"signature": "mask"}, marks=pytest.mark.exhaustive),
        pytest.param("ort", {"weights": "int8"}, marks=pytest.mark.exhaustive),
        pytest.param("ort", {"weights": "int4"}, marks=pytest.mark.exhaustive),
        pytest.param("onnx", {"weights": "int4"}, marks=pytest.mark.exhaustive),
        pytest.param("ort", {"dtype": "float16"}, marks=pytest.mark.exhaustive),
        pytest.param("torchscript", {"dtype": "float16"}, marks=pytest.mark.exhaustive),
    ],
)
def test_it_is_certified_in(target: str, how: Dict[str, str], tmp_path: Path) -> None:
    traced: Any = _sources() if "signature" in how else seeded(hybrid(), 0)
    certificate = export(traced, target, tmp_path / "a", **how).certificate  # type: ignore[arg-type]
    assert certificate is not None and certificate["passed"]


@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_tokens_are_taken_back_and_rows_are_independent(target: str, tmp_path: Path) -> None:
    export(_sources(), target, tmp_path / "a", verify=False)
    model = load(tmp_path / "a", provider="cpu")
    ids = np.random.default_rng(2).integers(0, 61, (2, 60))
    alone = [model.session().prefill(ids[row, None])[0] for row in range(2)]
    session = model.session(rewind=20)
    session.prefill([ids[0, :50], ids[1, :17]])
    for at in range(3):
        session.step(np.array([7, 8 + at]))
    session.rewind([2, 1])
    session.rewind([1, 2])
    rest = session.prefill([ids[0, 50:], ids[1, 17:]])
    for row, count in enumerate((10, 43)):
        bound = tolerance("float32", 3, 48)
        assert worst_error(rest[row][:count], alone[row][-count:]) <= bound


def test_gradients_are_finite_where_much_is_forgotten() -> None:
    model: Any = seeded(hybrid(), 0).train()
    for layer in model.layers[::2]:
        layer.attention.projection.step.value.data.fill_(100.0)
    model(torch.arange(40)[None]).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


REFUSED: Dict[str, Tuple[Dict[str, Any], str]] = {
    "grouped": ({"projection": {"name": "grouped"}}, "projection gated_delta if and only if"),
    "softmax": ({"mechanism": "softmax"}, "projection gated_delta if and only if"),
    "window": ({"sees": {"name": "window", "size": 4}}, "expected sees causal, got window"),
    "rotation": ({"encodings": ({"name": "rope"},)}, "hook embed, since there are no scores"),
    "sinks": ({"sinks": True}, "no head_norm, scale, softcap or sinks, got sinks"),
    "kernel": ({"projection": {"name": "gated_delta", "kernel": 1}}, "kernel of at least 2"),
    "rank": ({"projection": {"name": "gated_delta", "rank": -1}}, "rank of at least 0"),
    "rate": ({"projection": {"name": "gated_delta", "largest_rate": 3.0}}, "rate of at most 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_of_other_attention_are_refused_by_name(case: str) -> None:
    change, message = REFUSED[case]
    plain = block("nope", mechanism="gated_delta")
    with pytest.raises(ValueError, match=message):
        AttentionBlock(replace(plain, attention=replace(plain.attention, **change)))


def test_a_short_form_with_biases_is_refused() -> None:
    with pytest.raises(ValueError, match="no biases with mechanism gated_delta"):
        block_config(48, 6, 64, encoding="nope", mechanism="gated_delta", qkv_bias=True)
