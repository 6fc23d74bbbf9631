"""Linear layers, token tables and norms, found in a graph by what their operators do."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.expected import eager_session
from posenc_export.export.quantization import calibration
from posenc_export.export.quantization.calibration import smoothed, weights_of
from posenc_export.export.quantization.rounding import rounded
from posenc_export.export.quantization.samples import Sample
from posenc_export.export.read_module import ReadModule, as_model
from posenc_export.reading.products import Products, Scaled
from tests.reading.own_modules import POSITIONS, VOCABULARY, WIDTH, Attends, Decoder
from tests.reading.zoo import ZOO


class ByHand(nn.Module):
    """A norm of one's own: the weight times a normalized value, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x * x.square().mean(-1, True).add(1e-5).rsqrt()) + self.shift


class Gated(nn.Module):
    """Attention and a gated MLP with packed gates, between ids and logits."""

    def __init__(self, norms: tuple[nn.Module, nn.Module], peek: bool = False) -> None:
        super().__init__()
        self.tokens, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attends()
        self.first, self.second = norms
        self.gates, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.low, self.high = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.head, self.peek = nn.Linear(WIDTH, VOCABULARY), peek

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        y = self.first(x)
        x = x + self.attention(y) + (y if self.peek else 0)
        gate, up = self.gates(self.second(x)).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return self.head(x + self.low(x) @ self.high.weight.T + self.high.bias)


def _gated(peek: bool = False, tied: bool = False) -> Gated:
    torch.manual_seed(0)
    norms = ByHand(), nn.RMSNorm(WIDTH)
    if tied:  # both norms read one weight
        norms[1].weight = norms[0].scale
    return Gated(norms, peek).eval()


def _read(module: nn.Module) -> ReadModule:
    made = as_model(module, ReadAs(max_positions=POSITIONS))
    assert isinstance(made, ReadModule)
    return made


def _products(module: nn.Module) -> Products:
    return _read(module).products


def test_products_are_told_apart_by_what_they_read() -> None:
    products = _products(_gated())
    attention = [f"attention.{name}.weight" for name in "qkv"]
    others = ["attention.o", "gates", "down", "low", "high", "head"]
    assert set(products.linear) == {*attention, *(f"{name}.weight" for name in others)}
    assert products.tables == ["tokens.weight"]
    assert products.of_units() == ["down.weight"]  # a product of two products reads no units
    assert products.with_same_input() == dict.fromkeys(attention[1:], attention[0])
    assert list(products.scaled()) == [
        Scaled(("first.scale", "first.shift"), tuple(attention)),
        Scaled(("second.weight",), ("gates.weight",)),
    ]


@pytest.mark.parametrize(
    ("module", "left"),
    [
        (lambda: _gated(peek=True), ["second.weight"]),  # a residual connection reads the norm too
        (lambda: _gated(tied=True), []),
        (lambda: Decoder((Attends(),)).eval(), ["norms.0.weight"]),
    ],
    ids=["read elsewhere", "two norms of one weight", "a tied head"],
)
def test_a_norm_that_others_read_is_not_scaled(module: object, left: list[str]) -> None:
    products = _products(module())  # type: ignore[operator]
    assert [scaled.factors[0] for scaled in products.scaled()] == left


def test_a_smoothed_module_has_the_same_outputs_bit_by_bit() -> None:
    module = _gated()
    with torch.no_grad():
        module.first.scale[7] *= 100.0  # type: ignore[union-attr,operator,index]
    model = _read(module)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    ids = torch.randint(VOCABULARY, (4, 20), generator=torch.Generator().manual_seed(0)).numpy()
    result = smoothed(model, Sample(ids, ""))
    assert isinstance(result, ReadModule) and "calls.first.shift" in result.changed
    expected, actual = (eager_session(one).prefill(ids) for one in (model, result))
    assert (actual == expected).all()
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    query = result.get_parameter("calls.attention.q.weight")
    assert float(query[:, 7].abs().max()) > 4 * float(query.abs().mean())
    exact = [one.exact(ids[0], range(20), []) for one in (model, result)]
    torch.testing.assert_close(*map(torch.from_numpy, exact), rtol=1e-12, atol=1e-12)


def test_weights_of_4_bits_compensate_their_errors_on_the_inputs_of_the_module() -> None:
    model = _read(_gated())
    ids = torch.randint(VOCABULARY, (40, 20), generator=torch.Generator().manual_seed(0)).numpy()
    (moments,) = calibration.moments(model, Sample(ids, ""))
    layers = weights_of(model).linear
    assert set(moments) == set(layers)
    rounded_models = [rounded(model, "int4", given).model for given in ([], [moments])]
    for name, weight in layers.items():
        differences = [(weights_of(m).linear[name] - weight).double() for m in rounded_models]
        plain, compensated = (float((d @ moments[name] * d).sum()) for d in differences)
        assert compensated < plain, name


def test_a_router_stays_in_float32_and_products_before_it_round_no_activations(
    tmp_path: Path,
) -> None:
    """A slightly different input may choose another expert."""
    module, example, positions = ZOO["tokens-flattened"]()
    sources = Sources(module, how=ReadAs(example, positions))
    assert [name.rpartition(".")[0] for name in sources.model.products.routers] == [
        f"layers.{layer}.router" for layer in (0, 1)
    ]
    with pytest.raises(ValueError, match="expected weights of 4 bits for a module that chooses"):
        export(sources, "ort", tmp_path / "artefact", weights="int8")
    manifest = export(sources, "ort", tmp_path / "artefact", weights="int4", verify="quick")
    assert manifest.weights and manifest.weights.activations == "float32"
    assert manifest.certificate and manifest.certificate["passed"]
