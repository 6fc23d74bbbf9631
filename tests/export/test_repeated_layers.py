"""A graph of which one layer of each kind was traced has the nodes, weights and states of one of
which all were.
"""

from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from posenc_export.export.describe import describe
from posenc_export.export.read_module import ReadAs, as_model
from posenc_export.export.sources import in_dtype
from posenc_export.export.targets import WRITERS
from posenc_export.export.trace import Source
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config, encoder_config
from posenc_export.models.stack import Stack
from posenc_export.reading import parts
from posenc_export.reading.layers_once import LayersOnce
from tests.cases import choice
from tests.export.graph_digests import outputs_of
from tests.reading.own_modules import Decoder, Rotated, Windowed

LAYERS = 5
# Further layers of both kinds, in any order.
MIXED = [{"name": name} for name in ("rope", "nope", "nope", "rope")]


def decoder(encoding: str, further=()) -> Stack:
    block = block_config(encoding={"name": encoding}, width=16, heads=2, max_positions=64)
    layers = len(further) or LAYERS
    return seeded(decoder_config(32, layers, 16, block, layer_encodings=further), 0).eval()


def traced(model: Stack) -> list:
    """Return the indices of the layers that are no copies."""
    templates = LayersOnce(model).templates
    return [index for index in range(len(model.layers)) if f"layers.{index}" not in templates]


def trace_all(*_: object) -> None:
    """Replace LayersOnce._add."""


def digests(model: Stack, signature: str, target: str, folder: Path) -> dict:
    """Write a graph and return a digest of each output."""
    folder.mkdir()
    WRITERS[target](Source(model), describe(model, target, signature), folder)
    return outputs_of(ir.load(folder / "model.onnx").graph)


@pytest.fixture
def alike(tmp_path, monkeypatch):
    """Return a function that says whether the graph of a model is that of a whole trace."""

    def compare(model: Stack, signature: str = "positions", target: str = "onnx") -> bool:
        few = digests(model, signature, target, tmp_path / "few")
        monkeypatch.setattr(LayersOnce, "_add", trace_all)
        return few == digests(model, signature, target, tmp_path / "whole")

    return compare


def test_hidden_states_of_the_last_layer_can_be_an_output(alike):
    how = {"width": 16, "heads": 2, "max_positions": 64, "causal": False}
    block = block_config(encoding={"name": "rope"}, **how)
    assert alike(seeded(encoder_config(vocabulary=32, layers=3, hidden=16, block=block), 0).eval())


KINDS = [
    (0, "rope", "positions", "ort"),
    (4, "rope", "positions", "onnx"),
    (0, "cope", "positions", "onnx-static"),  # scores that each layer computes from its weights
    (0, "t5", "mask", "onnx"),  # a bias that all layers share
]


@pytest.mark.parametrize(("mixed", "encoding", "signature", "target"), choice(KINDS, KINDS[1:2]))
def test_copied_layers_are_those_of_a_whole_trace(alike, mixed, encoding, signature, target):
    model = decoder(encoding, MIXED[:mixed])
    assert len(traced(model)) < len(model.layers)
    assert alike(model, signature, target)


@pytest.mark.parametrize("dtype", choice(["float32", "float16"], ["float32"]))
def test_copied_parts_of_a_module_that_is_read_are_those_of_a_whole_trace(
    tmp_path, monkeypatch, dtype
):
    monkeypatch.setattr(parts, "FEWEST", 10)
    layers = tuple(kind() for kind in (Windowed, Rotated) * 2)
    read = as_model(Decoder(layers).eval(), ReadAs(max_positions=40))
    model, target = in_dtype(read, dtype), "ort" if dtype == "float32" else "ort-cuda"
    assert {"layers.2": "layers.0", "layers.3": "layers.1"}.items() <= model.repeated.copies.items()
    few = digests(model, "positions", target, tmp_path / "few")
    model.repeated = None
    assert few == digests(model, "positions", target, tmp_path / "whole")


def test_one_layer_of_each_kind_is_traced():
    assert traced(decoder("rope", MIXED)) == [0, 1]


class Wrapped(torch.nn.Module):
    """A linear layer with an update of low rank, which renames its parameters."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.inner = inner
        self.first = torch.nn.Parameter(torch.randn(2, inner.in_features, generator=random))
        self.second = torch.nn.Parameter(torch.randn(inner.out_features, 2, generator=random))

    def forward(self, x):
        return self.inner(x) + x @ self.first.T @ self.second.T


class WrappedLayer(torch.nn.Module):
    """A whole layer with an update of low rank of what it returns."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.attention = inner, inner.attention
        self.update = Wrapped(torch.nn.Linear(16, 16))

    def forward(self, x, *others):
        x, present = self.inner(x, *others)
        return x + self.update(x), present


def _with_wrapper(layers):
    layers[3].mlp.down = Wrapped(layers[3].mlp.down)


def _with_wrapped_layer(layers):
    layers[3] = WrappedLayer(layers[3])


def _with_number(layers):
    layers[3].residual.attention_norm.eps = 0.5


def _with_hook(layers):
    layers[3].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)


def _with_function(layers):
    forward, factor = layers[3].mlp.forward, 3.0
    layers[3].mlp.forward = lambda x: factor * forward(x)


def _with_constant(layers):
    layers[3].mlp.shift = torch.full((16,), 2.0)
    layers[3].mlp.register_forward_hook(lambda module, inputs, output: output + module.shift)


CHANGES = {
    "a wrapper that renames weights": _with_wrapper,
    "a wrapper around the whole layer": _with_wrapped_layer,
    "an attribute": _with_number,
    "a hook": _with_hook,
    "a function": _with_function,
    "a constant": _with_constant,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_was_changed_is_a_kind_of_its_own(change):
    model = decoder("nope")
    CHANGES[change](model.layers)
    assert traced(model) == [0, 3]


@pytest.mark.parametrize("change", choice(CHANGES, ["a wrapper that renames weights"]))
def test_a_layer_that_was_changed_is_that_of_a_whole_trace(alike, change):
    model = decoder("nope")
    CHANGES[change](model.layers)
    assert alike(model)


def test_functions_that_capture_other_values_make_layers_of_other_kinds():
    model = decoder("rope", [{"name": "rope"}] * 6)
    for index, layer in enumerate(model.layers):
        factor = 1.0 + (index > 3)
        layer.mlp.register_forward_hook(lambda module, inputs, output, by=factor: by * output)
    assert traced(model) == [0, 4]


def test_weights_that_some_layers_share_are_read_by_these_layers_only(alike):
    model = decoder("nope", [{"name": "nope"}] * 6)
    for first, second in ((0, 1), (2, 3)):
        model.layers[second].mlp.down.weight = model.layers[first].mlp.down.weight
    assert traced(model) == [0, 2, 4]
    assert alike(model)
