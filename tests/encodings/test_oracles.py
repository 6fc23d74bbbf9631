"""Each module compared with its float64 oracle, entry by entry, at small and large positions."""

import dataclasses

import numpy as np
import pytest
import torch

from posenc_export import encodings
from posenc_export.encodings.shared.prepared import Trajectory
from posenc_export.shared import registry
from posenc_export.shared.numerics import entry_errors, tolerance
from posenc_export.testing import against_oracle
from tests.tiny import VARIANTS

FAR = 1 << 15
GEOMETRY = encodings.Geometry(width=24, heads=6, head_size=16, max_positions=FAR, kv_heads=2)
BOUND = tolerance("float32", 1, 1)
POSITIONS = [0, 1, 2, 255, 1000, FAR - 1]


@pytest.mark.parametrize("variant", VARIANTS)
def test_hooks_match_the_oracle_on_both_kinds_of_attention_and_on_grids(variant: str) -> None:
    cls = encodings.REGISTRY[VARIANTS[variant]["name"]]
    hooks = {"embed": ("embed", "embed_next"), "rotate": ("rotate",), "bias": ("bias",)}
    in_turn = issubclass(cls, Trajectory)  # whose rows follow one after the other
    found = against_oracle.check(cls, VARIANTS[variant], 1 << 12 if in_turn else FAR)
    own = {hook for hook, methods in hooks.items() if any(_overrides(cls, m) for m in methods)}
    assert set(found) == own


def _overrides(cls: type, method: str) -> bool:
    return getattr(cls, method) is not getattr(encodings.PositionEncoding, method)


CLASSES = {variant: encodings.REGISTRY[spec["name"]] for variant, spec in VARIANTS.items()}
ROTATING = [variant for variant, cls in CLASSES.items() if _overrides(cls, "rotate")]


@pytest.mark.parametrize("variant", ROTATING)
def test_tables_keep_their_precision_through_a_cast_to_half(variant: str) -> None:
    encoding = encodings.build(VARIANTS[variant], GEOMETRY).eval()
    q, k = torch.randn(1, len(POSITIONS), 6, 16), torch.randn(1, len(POSITIONS), 2, 16)
    places = torch.tensor([POSITIONS])
    places = places.expand(encoding.axes, 1, -1) if encoding.axes else places
    before = encoding.rotate(q, k, places)[0]
    trained = {name: value.detach().clone() for name, value in encoding.named_parameters()}
    encoding.half().float()
    with torch.no_grad():
        for name, value in encoding.named_parameters():
            value.copy_(trained[name])
    assert torch.equal(encoding.rotate(q, k, places)[0], before)


def test_a_computed_sinusoid_is_exact_beyond_the_range_of_any_table() -> None:
    geometry = dataclasses.replace(GEOMETRY, max_positions=1 << 40)
    encoding = encodings.build({"name": "sinusoidal", "angles": "computed"}, geometry)
    far = [1 << 20, (1 << 24) + 1, (1 << 30) - 1]
    actual = encoding.embed(torch.zeros(1, 3, 24), torch.tensor([far])).numpy()[0]
    expected = np.stack([encoding.oracle().embed(np.zeros(24), p) for p in far])
    assert entry_errors(actual, expected).max() <= BOUND


# Values outside of the limits and the words that the parameters of an encoding declare.
OUTSIDE = """
    sinusoidal:offset=-1 learned:offset=-1 sinusoidal:base=1 sinusoidal:angles=guessed
    sinusoidal_2d:first=time sinusoidal_2d:layout=half sinusoidal_2d:rows=-1
    learned_2d:join=product learned_2d:columns=-1 boxes:size=-1
    rope_linear:factor=0 rope_trained:trains=nothing rope_trained:theta=0 rope_yarn:mscale=-1
    rope_yarn:truncate=true
    pope:theta=0 logn:trained=1 logn:form=sqrt
    mrope:order=turns rope_axial:axes=1 rope_axial:spectrum=one
    rope_normalized:rows=-1 rope_normalized:points=corners rope_normalized:highest=0
    rope_axial:theta=0 rope_2d:theta=-1 t5:buckets=1 t5:max_distance=3 t5:scores=half
    kerple:kernel=cubic fire:hidden=0 dynamic_bias:distance=squared dynamic_bias:norm=rms
    dynamic_bias:depth=0 fox:scale=0 fox_pair:size=0 inkling:scores=free inkling:extent=0
    xdrope:alpha=0 layout_bias:buckets=3 layout_bias:box_buckets=2 layout_bias:box_max_distance=9
    layout_bias:added=twice decomposed_2d:rows=-1
    wavlm:buckets=1 wavlm:max_distance=3 shaw:left=-1 infused:base=1
    shaw:values=some
    transformer_xl:clamp=-1 deberta:version=v3 deberta:terms=p2p
    deberta:span=7 cope:positions=1 multiplicative:table=hash floater:step=0 normalized:length=-1
    conditional_conv:kernel=1 complex_order:base=1
""".split()


@pytest.mark.parametrize("spec", OUTSIDE)
def test_a_value_outside_of_what_a_parameter_declares_is_refused(spec: str) -> None:
    parameter = spec.partition(":")[2].partition("=")[0]
    rule = f"expected {parameter} (above|of at least|to be one of) "
    with pytest.raises(ValueError, match=rule):
        encodings.build(encodings.parse(spec), GEOMETRY)


@pytest.mark.parametrize(("spec", "message"), [
    ("ropes", "expected a known name, got .ropes.; did you mean rope"),
    ("rope:thata=1", "expected parameter to be one of"),
    ("rope:theta=big", "type float"),
    ("rope:rotary=7", "expected an even rotary size within"),
    ("rope:rotary=32", "expected an even rotary size within"),
    ("rope:layout=pairs", "expected layout to be one of"),
    ("alibi:max_bias=0", "expected max_bias above 0"),
    ("alibi:scale=0", "expected scale above 0"),
    ("alibi:heads=7", "expected heads within 0 .. 6"),
    ("rope:theta", "name=value"),
    ("rope_linear:factor=inf", "expected factor to be a finite number"),
    ("rope_linear:theta=inf", "expected theta to be a finite number"),
    ("rope_ntk:rotary=2", "even rotary size within 4 .. head size 16"),
    ("rope_yarn:attention_factor=0", "expected attention_factor above 0"),
    ("rope_yarn:attention_factor=nan", "expected attention_factor to be a finite number"),
    ("rope_yarn:beta_fast=1", "expected beta_fast above beta_slow"),
    ("rope_llama3:high_freq_factor=1", "expected high_freq_factor above low_freq_factor"),
    ("rope_proportional:share=0.01", "expected at least one rotated pair"),
    ("dual_chunk:chunk_size=8,local_size=4", "chunk_size above 2 local_size, got 8 and 4"),
    ("rope_longrope:long_factor=1;2", "expected long_factor to be 8 finite numbers above 0"),
    ("rope_longrope:short_factor=a;b", "expected short_factor to be numbers with ; between"),
    ("xpos:scale_base=100", "expected factors of at most"),
    ("logn:form=steps,period=0", "period of at least 1"),
    ("logn:first=0", "expected first of 1, or 0 with form=steps"),
    ("mrope:time=8", "expected sections above 0"),
    ("mrope:order=alternating,time=3",
        "as many alternating pairs for height as for width, and the others of 8 pairs"),
    ("mrope:order=alternating,time=2,height=2", "got time=2, height=2; set time=8 - 2 height"),
    ("mrope:rotary=4", "even rotary size within 6 .. head size 16"),
    ("rope_axial:rotary=6", "a rotary size that is a multiple of 4"),
    ("rope_axial:axes=3", "a rotary size that is a multiple of 6"),
    ("rope_normalized:frames=2", "a rotary size that is a multiple of 6"),
    ("mrope_interleaved:height=6", "expected height within 1 .. 3 and width within 1 .. 2"),
    ("rope_2d:rotary=5", "expected an even rotary size within"),
    ("sandwich:dims=3", "expected an even dims"),
    ("xdrope:text=4,width=2", "expected sections below 8 pairs together, got text=4, width=2"),
    ("decomposed_2d:rows=2,columns=2", "expected a window that holds max_positions"),
    ("swin:rows=2,columns=2", "expected a window that holds max_positions"),
    ("swin_v2:pretrained_rows=1", "expected pretrained_rows to be 0 or at least 2"),
    ("swin_v2:rows=2,columns=2", "expected a window that holds max_positions"),
    ("hierarchical:share=0.5", "expected share between 0 and 1 and not 0.5"),
    ("hierarchical:rows=10", "expected rows whose square is at least"),
    ("conditional_conv:groups=7", "expected groups that divide the width"),
    ("conditional_conv_2d:kernel=4", "expected an odd kernel"),
    ("conditional_conv_2d:rows=3,columns=3", "expected a window that holds max_positions"),
])  # fmt: skip
def test_bad_specifications_are_refused_by_rule_and_value(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encodings.build(encodings.parse(spec), GEOMETRY)


NUMBERS = [
    (name, key, kind)
    for name in encodings.REGISTRY
    for key, parameter in encodings.parameters(name).items()
    for kind in [float if "float" in str(parameter.annotation) else registry.kind_of(parameter)]
    if kind in (float, int)
]
NONE = {
    float: (float("nan"), float("inf"), -float("inf"), 1e39, 10**400, "2", True),
    int: (1 << 62, -(1 << 80), 1.5, 4.0, float("nan"), True),
}


@pytest.mark.parametrize(("name", "key", "kind"), NUMBERS)
def test_a_parameter_that_is_not_a_number_is_refused_by_name(
    name: str, key: str, kind: type
) -> None:
    lists = "Sequence" in str(encodings.parameters(name)[key].annotation)
    for value in ([float("inf")] * 8, "nan;1;1;1;1;1;1;1") if lists else NONE[kind]:
        with pytest.raises(ValueError, match=f"{name}: expected {key} to be .*, got"):
            encodings.build({"name": name, key: value}, GEOMETRY)


@pytest.mark.parametrize(
    "spec", ["learned", "rope", "rope_dynamic", "sandwich", "sinusoidal", "xpos:scale_base=1e30"]
)
def test_tables_that_no_memory_holds_are_refused_with_their_size(spec: str) -> None:
    count = 10**13 if spec == "rope" else 10**15  # beyond 47-bit addresses
    geometry = dataclasses.replace(GEOMETRY, max_positions=count)
    said = r"that fit the memory of this machine, got an allocation of \d+\.\d [TP]iB"
    with pytest.raises(ValueError, match=rf"encoding \w+: expected weights and tables {said}"):
        encodings.build(encodings.parse(spec), geometry)


def test_a_bias_of_coordinates_beside_a_bias_of_positions_is_refused() -> None:
    geometry = dataclasses.replace(GEOMETRY, causal=False)
    with pytest.raises(ValueError, match="biases that all read coordinates, got LayoutBias and T5"):
        encodings.build_all([{"name": "layout_bias"}, {"name": "t5"}], geometry)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sinusoidal", "expected an even width, got 7"),
        ("sinusoidal_2d", "multiple of 4, got 7"),
        ("learned_2d:join=row_column", "choose another width or join=sum"),
        ("boxes:extent=2", "E - 2 extent above 0 and divisible by 4, got 7"),
    ],
)
def test_an_odd_width_is_refused_by_encodings_of_two_halves(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encodings.build(encodings.parse(spec), dataclasses.replace(GEOMETRY, width=7))


@pytest.mark.parametrize("name", ["recurrent", "floater", "rope_trained"])
def test_loading_weights_rebuilds_the_table(name: str) -> None:
    torch.manual_seed(0)
    small = encodings.Geometry(8, 2, 4, 40)
    one = encodings.build({"name": name}, small).eval()
    other = encodings.build({"name": name}, small).eval()
    with torch.no_grad():
        for weight in one.parameters():
            weight.mul_(1.1)
    one.prepare()
    other.load_state_dict(one.state_dict())
    x, places = torch.ones(1, 40, 2, 4), torch.arange(40)[None]
    assert torch.equal(other.embed(x.flatten(2), places), one.embed(x.flatten(2), places))
    assert torch.equal(other.rotate(x, x, places)[0], one.rotate(x, x, places)[0])
