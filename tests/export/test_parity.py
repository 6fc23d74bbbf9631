"""Every encoding on every target, through the whole grid."""

import itertools
from pathlib import Path
from typing import Any, Collection, Iterable, Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from posenc_export.encodings import REGISTRY
from posenc_export.export import TARGETS, export
from posenc_export.export.describe import eager
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime import Model, load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import choice
from tests.tiny import VARIANTS, block, decoder, encoder, works
from tests.traces import sources

# complex_order has a token table of another width; after `integer`, LayerNorm subtracts the mean,
# which cancels the leading digits of x + p.
ENCODERS = [
    v for v in REGISTRY if works(v, "bidirectional") and v not in ("complex_order", "integer")
]
APART = ("ort-cuda", "pt2")  # targets with a separate trace
MASKED = [name for name, target in TARGETS.items() if "mask" in target.layout]
# Models without caches have the same graph for all targets of ONNX but ort.
FIRST = ("ort", "torchscript")
HERE = [name for name in TARGETS if name not in APART]


def _passes(
    config: Any, target: str, folder: Path, verify: Any = "quick", **how: str
) -> dict[str, Any]:
    """Export with one call of each kind, or with the whole grid. Return the certificate."""
    manifest = export(sources(config), target, folder / "artefact", verify=verify, **how)  # type: ignore[arg-type]
    certificate = manifest.certificate
    assert certificate is not None
    assert certificate["passed"] and len(certificate["cells"]) > 3
    return certificate


def _each(
    variants: Iterable[str],
    targets: Iterable[str] = TARGETS,
    quick: Mapping[str, Collection[str]] | None = None,
) -> list[Any]:
    """Every variant on every target. Those that are not in `quick`, variants by target, are
    exhaustive.
    """
    cases = [*itertools.product(variants, targets)]
    taken = {(v, t) for v, t in cases if quick is None or v in quick.get(t, ())}
    return choice(cases, taken, grouped=True)


def _on(targets: Iterable[str], *variants: str) -> dict[str, Collection[str]]:
    return dict.fromkeys(targets, variants)


# Models whose layers have different encodings, by the encoding on their tokens. Those of `FUSED`
# together run every line of export/targets/ that any encoding runs, and have every operator that
# any graph has. The others differ from one of these in a table, a formula of the same operators or
# both, and are compared as TorchScript.
FUSED = {
    "input_rnn": ("kerple", "rope_dynamic", "rope", "fox"),
    "learned": ("alibi", "shaw", "cope", "rope_longrope", "wavlm"),
    "recurrent": ("t5", "transformer_xl", "pope", "deberta"),
    "sinusoidal": ("xpos", "inkling", "fox_pair", "swin_v2", "decomposed_2d"),
}
IN_TURN = {
    **FUSED,
    "multiplicative": ("swin", "dynamic_bias", "sandwich", "fire"),
    "hierarchical": ("infused", "logn", "rope_trained", "rope_yarn"),
    "learned_2d": ("rope_axial", "rope_2d", "nope"),
}
# The first encoding of every set that runs the same methods. The others differ from it in tables
# alone, which tests/encodings/test_oracles.py compares.
METHODS = (
    "embed embed_next rotate bias rescore observe prepare key_size score_scale "
    "embed_states layer_states axes"
).split()


def methods(variant: str) -> tuple[Any, ...]:
    return tuple(getattr(REGISTRY[variant], name) for name in METHODS)


DISTINCT = {methods(variant): variant for variant in reversed(REGISTRY)}.values()
# Encodings with a model of their own: bidirectional, with coordinates, or with a wider token table,
# and others on tokens. ort-cuda, in float16, and pt2 need a separate trace: one encoding with and
# one without GroupQueryAttention, states and content scores.
ALONE = set(DISTINCT) - {*IN_TURN, *itertools.chain(*IN_TURN.values())}
QUICK = {
    "ort": ("mrope", "conditional_conv_2d", "layout_bias"),
    "torchscript": ALONE,
    "ort-cuda": ("rope",),
    "pt2": ("fox",),
}
EVERYWHERE = [  # but what is refused; see the last test
    case for case in _each(REGISTRY, quick=QUICK) if case.values != ("input_rnn", "pt2")
]


def in_turn(config: Any, variants: Iterable[str]) -> Any:
    """Describe a model with one layer for each encoding, in place of its layers."""
    kind = config.kinds[0]
    layers = {
        variant: replace(kind, attention=replace(kind.attention, encodings=(VARIANTS[variant],)))
        for variant in variants
    }
    return replace(config, layers=layers, order=tuple(layers))


GRAPHS = ("ort", "onnx-static", "onnx", "ort-native")
# For each target, another model.
TURNS = {
    target: (name,)
    for name, target in zip(FUSED, ("ort", "onnx", "onnx-static", "ort-native"), strict=True)
}


@pytest.mark.parametrize(
    ("tokens", "target"), _each(FUSED, GRAPHS, TURNS) + _each(IN_TURN, ("torchscript",))
)
def test_layers_with_different_encodings_match_eager(
    tokens: str, target: str, tmp_path: Path
) -> None:
    _passes(in_turn(decoder(tokens), IN_TURN[tokens]), target, tmp_path)


@pytest.mark.parametrize(
    ("tokens", "target"),
    _each(FUSED, GRAPHS, {"onnx-static": ("recurrent",)}) + _each(["rope"], ["ort"]),
)
def test_a_decoder_matches_eager_in_the_whole_grid(
    tokens: str, target: str, tmp_path: Path
) -> None:
    config = in_turn(decoder(tokens), FUSED[tokens]) if tokens in FUSED else decoder(tokens)
    assert len(_passes(config, target, tmp_path, verify=True)["cells"]) > 30


def test_each_set_of_methods_of_an_encoding_is_compared_as_torchscript() -> None:
    compared = {*IN_TURN, *itertools.chain(*IN_TURN.values()), *QUICK["torchscript"]}
    assert {methods(variant) for variant in compared} == {methods(name) for name in REGISTRY}


# Options change the module, but not its lowering: they are tested on the fused target and as
# TorchScript.
@pytest.mark.parametrize(
    ("variant", "target"),
    EVERYWHERE
    + _each([v for v in VARIANTS if v not in REGISTRY], ("ort", "torchscript"), {})
    + _each(["rope_dynamic-short"], ["onnx", "onnx-static", "ort-cuda", "pt2"], {}),
)
def test_decoder_matches_eager_for_every_division_into_calls(
    variant: str, target: str, tmp_path: Path
) -> None:
    _passes(decoder(variant), target, tmp_path)


@pytest.mark.parametrize(
    ("variant", "target"),
    _each(ENCODERS, FIRST, _on(FIRST, "t5", "conditional_conv_2d"))
    + _each(
        ["learned", "deberta", "conditional_conv_2d"], [t for t in TARGETS if t not in FIRST], {}
    ),
)
def test_encoder_matches_eager_full_padded_and_ragged(
    variant: str, target: str, tmp_path: Path
) -> None:
    _passes(encoder(variant), target, tmp_path)
    manifest = manifests.read(tmp_path / "artefact")
    assert not manifest.states
    assert manifest.certificate is not None
    cells = {name.removeprefix("float32 form: ") for name in manifest.certificate["cells"]}
    assert not manifest.axes or {"coordinates", "coordinates: oracle"} <= cells


@pytest.mark.parametrize("target", choice(TARGETS, FIRST))
def test_an_encoder_whose_layers_differ_matches_eager(target: str, tmp_path: Path) -> None:
    variants = ("rope", "deberta", "transformer_xl")
    _passes(in_turn(encoder("learned"), variants), target, tmp_path)


@pytest.mark.parametrize(
    ("variant", "target"),
    _each(
        ["rope", "alibi", "sinusoidal"],
        [name for name, target in TARGETS.items() if "float16" in target.dtypes],
        _on(HERE, "rope"),
    ),
)
def test_block_in_half_precision_matches_eager(variant: str, target: str, tmp_path: Path) -> None:
    _passes(block(variant), target, tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("variant", "target"),
    _each(["rope", "alibi", "learned", "rope_dynamic-short"], MASKED, _on(HERE, "rope")),
)
def test_mask_signature_matches_eager(variant: str, target: str, tmp_path: Path) -> None:
    layers = ("alibi",) if variant == "learned" else (variant, "alibi")  # learned: on tokens
    _passes(in_turn(decoder(variant), layers), target, tmp_path, signature="mask")


@pytest.mark.parametrize(
    ("variant", "target"), _each(["learned", "t5"], MASKED, _on(HERE, "learned"))
)
def test_encoder_with_mask_signature_matches_eager(
    variant: str, target: str, tmp_path: Path
) -> None:
    _passes(encoder(variant), target, tmp_path, signature="mask")


@pytest.mark.parametrize(
    ("tokens", "target"), _each(IN_TURN, ["onnx-static", "ort"], {"ort": ("input_rnn",)})
)
def test_rows_of_other_lengths_and_starts_up_to_the_last_position_match_eager(
    tokens: str, target: str, tmp_path: Path
) -> None:
    traced = sources(in_turn(decoder(tokens), IN_TURN[tokens]))
    export(traced, target, tmp_path / "artefact", verify=False)
    module, manifest = eager(traced.model)
    random = np.random.default_rng(0)
    rows = [random.integers(61, size=n) for n in (40, 4)]
    steps = random.integers(61, size=(2, 2))
    outputs = []
    for session in (
        load(tmp_path / "artefact", provider="cpu").session(),
        Model(TorchGraph(module, manifest)).session(),
    ):
        first = session.prefill(rows, start=[0, manifest.max_positions - 6])
        stepped = [session.step(step) for step in steps]
        outputs.append(np.concatenate([first[0], first[1, :4], *stepped]))
    assert worst_error(outputs[0], outputs[1]) <= tolerance("float32", 4, 48)


@pytest.mark.parametrize(
    ("variant", "target"),
    _each(["rope", "learned", "nope"], quick=_on(("onnx", "torchscript"), "rope"))
    + _each(
        ["input_rnn", "pope", "infused"],
        ("onnx", "torchscript"),
        {"torchscript": ("input_rnn", "pope")},
    ),
)
def test_linear_attention_matches_eager_and_its_quadratic_form(
    variant: str, target: str, tmp_path: Path
) -> None:
    _passes(decoder(variant, mechanism="linear", kv_heads=6), target, tmp_path)
    # No state grows, so that the cost of a step is constant.
    states = manifests.read(tmp_path / "artefact").states
    assert not any(state.past.endswith(("key", "value", "positions")) for state in states)


@pytest.mark.parametrize(
    ("variant", "target"), _each(["rope", "learned"], quick=_on(FIRST, "rope"))
)
def test_linear_attention_over_all_tokens_matches_eager_and_its_quadratic_form(
    variant: str, target: str, tmp_path: Path
) -> None:
    _passes(decoder(variant, mechanism="linear", kv_heads=6, causal=False), target, tmp_path)
    assert not manifests.read(tmp_path / "artefact").states


@pytest.mark.parametrize(
    ("variant", "target"), _each(["alibi", "rope"], FIRST, {"ort": ("alibi",)})
)
def test_unscaled_scores_match_eager(variant: str, target: str, tmp_path: Path) -> None:
    config = block(variant)
    _passes(replace(config, attention=replace(config.attention, scale=1.0)), target, tmp_path)


def test_counts_of_rotated_keys_match_eager_behind_every_start(tmp_path: Path) -> None:
    config = block("rope", max_positions=100)
    encodings = ({"name": "rope"}, {"name": "cope"})
    attention = replace(config.attention, encodings=encodings)
    export(sources(replace(config, attention=attention)), "ort", tmp_path / "a", verify="quick")


@pytest.mark.parametrize(("variant", "target"), _each(["rope", "nope"], quick=_on(FIRST, "rope")))
def test_bidirectional_decoder_matches_eager_full_padded_and_ragged(
    variant: str, target: str, tmp_path: Path
) -> None:
    _passes(decoder(variant, causal=False), target, tmp_path)
    assert not manifests.read(tmp_path / "artefact").states


@pytest.mark.xdist_group("one of a kind")
@pytest.mark.parametrize("target", choice(TARGETS, HERE))
def test_layer_norm_gelu_biases_and_untied_head_match_eager(target: str, tmp_path: Path) -> None:
    attention = block("rope", qkv_bias=True, output_bias=True)
    parts: Any = {"norm": "layer", "mlp": "gelu", "mlp_bias": True, "tied": False}
    _passes(decoder_config(61, 2, 40, attention, **parts), target, tmp_path)


@pytest.mark.parametrize("head_size", choice((12, 8, 24), [12]))
def test_head_sizes_that_the_kernel_does_not_support_are_rotated_outside_and_padded(
    head_size: int, tmp_path: Path
) -> None:
    _passes(block("rope", head_size=head_size), "ort", tmp_path)
    manifest = manifests.read(tmp_path / "artefact")
    assert manifest.operators["GroupQueryAttention"] == 1
    assert {state.axes[3] for state in manifest.states} == {-(-head_size // 8) * 8}


@pytest.mark.xdist_group("rope-interleaved")
def test_interleaved_pairs_are_rotated_by_the_fused_node(tmp_path: Path) -> None:
    _passes(block("rope-interleaved"), "ort", tmp_path)
    operators = manifests.read(tmp_path / "artefact").operators
    assert operators == {"GroupQueryAttention": 1, "MatMul": 2}


def test_a_loop_over_tokens_is_refused_for_pt2(tmp_path: Path) -> None:
    said = "loops over the tokens of a call; choose target torchscript or onnx"
    with pytest.raises(ValueError, match=said):
        export(seeded(decoder("input_rnn")), "pt2", tmp_path / "artefact")
    assert not list(tmp_path.iterdir())
