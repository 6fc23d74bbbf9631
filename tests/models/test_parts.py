"""Parts of models: each compared with its formula in float64, and models with these parts on
every target compared with the float64 oracle.
"""

import functools
import itertools
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import pytest
import torch
from msgspec.structs import replace

from posenc_export.export import Sources, export
from posenc_export.export.describe import eager
from posenc_export.models.config import StackConfig
from posenc_export.models.parts import PARTS, build
from posenc_export.models.parts.mlps import ACTIVATIONS
from posenc_export.models.presets import seeded
from posenc_export.runtime import Model
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.shared.places import evaluate
from tests.cases import choice
from tests.tiny import VARIANTS, block, decoder, encoder

RMS: dict[str, Any] = {"name": "rms", "epsilon": 1e-4}
LAYER: dict[str, Any] = {"name": "layer", "epsilon": 1e-4}
TARGETS = ("ort", "onnx", "onnx-static", "torchscript", "pt2")


def _random(module: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.eval()


NORMS = (RMS, LAYER, {"name": "none"})
MLPS = [
    {"name": name, "hidden": 40, "activation": act, "bias": True}
    for name, act in itertools.product(("plain", "gated"), ACTIVATIONS)
]
TOKENWISE = [*(("norm", spec) for spec in NORMS), *(("mlp", spec) for spec in MLPS)]


@pytest.mark.parametrize(("kind", "spec"), TOKENWISE, ids=str)
def test_a_part_matches_its_formula(kind: Any, spec: Any) -> None:
    part: Any = _random(build(kind, spec, 24))
    x = torch.randn(3, 5, 24) * 2
    error = worst_error(part(x).detach().numpy(), part.exact(x.double().numpy()))
    assert error <= tolerance("float32", 1, 40)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_formula_of_an_activation_does_not_overflow(name: str) -> None:
    x = np.array([-1e4, -30.0, 0.0, 30.0, 1e4])  # warnings are errors
    part: Any = ACTIVATIONS[name]()
    assert worst_error(part(torch.tensor(x)).numpy(), part.exact(x)) <= 1e-12


# x: input of the layer, a: attention, m: MLP, then the norms in the order of computation.
ARRANGEMENTS: dict[str, Callable[..., Any]] = {
    "pre": lambda x, a, m, n, o: (between := x + a(n(x))) + m(o(between)),
    "post": lambda x, a, m, n, o: o((between := n(x + a(x))) + m(between)),
}


@pytest.mark.parametrize("name", PARTS["residual"])
def test_an_arrangement_of_norms_and_sums_matches_its_formula(name: str) -> None:
    norms: list[Any] = [_random(build("norm", RMS, 24)) for _ in range(2)]
    for index, norm in enumerate(norms):
        norm.weight.data += index  # so that no norm can stand for another
    part, x = build("residual", {"name": name}, *norms), torch.randn(5, 24)
    a, m = (lambda x: 3 * x - 1), (lambda x: x * x)
    exact = x.double().numpy()
    between = part.after_attention(x, a(part.attention_input(x)))  # as Layer.forward
    y = part.after_mlp(between, m(part.mlp_input(between)))
    expected = ARRANGEMENTS[name](exact, a, m, *(norm.exact for norm in norms))
    assert worst_error(y.detach().numpy(), expected) <= tolerance("float32", 1, 24)
    assert np.allclose(part.exact(exact, a, m), expected, 1e-12)


SIGHTS: dict[str, dict[str, Any]] = {
    "causal": {"name": "causal"},
    "window": {"name": "window", "size": 3},
    "window of one": {"name": "window", "size": 1},
    "chunk": {"name": "chunk", "size": 4},
    "both": {"name": "both"},
    "near": {"name": "near", "reach": 2},
    "only itself": {"name": "near", "reach": 0},
}


@pytest.mark.parametrize("sight", SIGHTS)
def test_mask_numbers_of_a_sight_match_its_rule(sight: str) -> None:
    part = build("sees", SIGHTS[sight])
    for query, key in itertools.product(range(12), repeat=2):
        seen = (
            (part.before < 0 or query - key <= part.before)
            and (part.after < 0 or key - query <= part.after)
            and (part.chunk == 0 or query // part.chunk == key // part.chunk)
        )
        assert evaluate(part.rule, {"q": query, "k": key}) == seen


def _kinds(**changes: Any) -> StackConfig:
    """Describe three layers: the attention of the first and last has these changes, the second
    is plain.
    """
    plain = decoder("rope")
    kind = plain.layers["layer"]
    changed = replace(kind, attention=replace(kind.attention, **changes))
    order = ("changed", "plain", "changed")
    return replace(plain, layers={"changed": changed, "plain": kind}, order=order)


def _of_encoder(**changes: Any) -> StackConfig:
    plain = encoder("rope")
    kind = plain.layers["layer"]
    changed = replace(kind, attention=replace(kind.attention, **changes))
    return replace(plain, layers={"layer": changed})


ROPE, ALIBI, WINDOW = VARIANTS["rope"], VARIANTS["alibi"], {"name": "window", "size": 5}
# Models for every target, with the number of GroupQueryAttention nodes on `ort`.
MODELS: dict[str, Any] = {
    "window": (_kinds(sees=WINDOW), 3),
    "window and bias": (_kinds(sees=WINDOW, encodings=(ALIBI,)), 3),
    "chunk": (_kinds(sees={"name": "chunk", "size": 7}), 3),
    "softcap": (_kinds(softcap=0.3), 3),
    "sinks": (_kinds(sinks=True), 3),
    "sinks beside smaller values": (_kinds(sinks=True, encodings=(VARIANTS["pope"],)), 3),
    "all of them": (
        _kinds(sinks=True, softcap=0.3, sees=WINDOW, encodings=(ROPE, ALIBI), scale=0.5), 3),
    "temperature beside a rotation": (_kinds(encodings=(ROPE, VARIANTS["logn-steps"])), 3),
    "content beside a bias": (_kinds(encodings=(VARIANTS["shaw"], ALIBI)), 3),
    "another theta": (_kinds(encodings=({"name": "rope", "theta": 100.0},)), 3),
    "near": (_of_encoder(sees=SIGHTS["near"]), 0),
}  # fmt: skip
QUICK = [
    ("all of them", "ort"), ("all of them", "torchscript"), ("chunk", "torchscript"),
    ("near", "torchscript"), ("sinks beside smaller values", "pt2"),
]  # fmt: skip


@functools.cache
def _sources(name: str) -> Sources:
    """Return the sources of a model, traced once for all targets."""
    return Sources(_spread(seeded(MODELS[name][0])))


def _spread(model: Any) -> Any:
    """Set weights with which windows, softcaps and sinks affect the outputs."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
            elif "qkv.weight" in name:
                parameter.mul_(3.0)
    return model


@pytest.mark.parametrize(("name", "target"), choice(itertools.product(MODELS, TARGETS), QUICK))
def test_a_model_of_these_parts_is_certified(name: str, target: str, tmp_path: Path) -> None:
    config, nodes = MODELS[name]
    manifest = export(_sources(name), target, tmp_path / "a", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert target != "ort" or manifest.operators.get("GroupQueryAttention", 0) == nodes


def test_layers_of_several_kinds_share_one_table_of_angles(tmp_path: Path) -> None:
    export(_sources("window"), "onnx", tmp_path / "a", verify=False)
    graph = onnx.load(tmp_path / "a" / "model.onnx", load_external_data=False).graph
    shapes = [tuple(value.dims) for value in graph.initializer]
    assert shapes.count((1100, 8)) == 2  # cosines and sines


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["all of them", "chunk", "window and bias"])
@pytest.mark.parametrize("target", ["ort", "onnx", "ort-cuda"])
def test_parts_are_certified_in_float16(name: str, target: str, tmp_path: Path) -> None:
    manifest = export(_sources(name), target, tmp_path / "a", dtype="float16")
    assert manifest.certificate is not None and manifest.certificate["passed"]


def _steps(config: StackConfig, tokens: np.ndarray) -> np.ndarray:
    module, manifest = eager(_spread(seeded(config)))
    return Model(TorchGraph(module, manifest)).session().prefill(tokens)


CHANGES: dict[str, Any] = {
    "a window one short": ({"sees": WINDOW}, {"sees": {**WINDOW, "size": 4}}),
    "a window one long": ({"sees": WINDOW}, {"sees": {**WINDOW, "size": 6}}),
    "a chunk for a window": ({"sees": WINDOW}, {"sees": {**WINDOW, "name": "chunk"}}),
    "no cap": ({"softcap": 0.3}, {}),
    "another cap": ({"softcap": 0.3}, {"softcap": 0.31}),
    "another scale": ({"scale": 0.25}, {"scale": 0.26}),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changes_of_attention_change_outputs(case: str) -> None:
    tokens = np.arange(24)[None] * 7 % 61
    one, other = (_steps(_kinds(**changes), tokens) for changes in CHANGES[case])
    assert np.abs(one - other).max() > 1e-4


def test_a_row_without_visible_keys_gives_zero_with_softcap_and_sinks() -> None:
    from posenc_export import ops

    q, keys = torch.randn(1, 2, 6, 8), torch.randn(1, 3, 5, 8)
    mask = torch.zeros(1, 1, 2, 5)
    mask[0, 0, 1] = float("-inf")
    for softcap, sinks in ((0.0, None), (2.0, None), (0.0, torch.randn(6)), (2.0, torch.randn(6))):
        y = ops.attend(q, keys, keys, mask, None, 0.3, softcap, sinks)
        assert torch.isfinite(y).all() and not y[0, 1].any() and y[0, 0].any()


def test_a_block_supports_the_parts_of_a_decoder(tmp_path: Path) -> None:
    plain = block("rope")
    attention = replace(plain.attention, sees=WINDOW, softcap=0.5, sinks=True)
    model = _spread(seeded(replace(plain, attention=attention)))
    manifest = export(model, "ort", tmp_path / "a")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert manifest.operators["GroupQueryAttention"] == 1
