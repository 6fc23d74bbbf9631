"""Modules that are read in half precision: products are rounded, nothing else is."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posenc_export import load
from posenc_export.export import ReadAs, Sources, VerificationError, export
from posenc_export.export.read_module import ReadModule
from posenc_export.export.sources import check_half, in_dtype
from posenc_export.shared.numerics import NOISE, worst_error
from tests.reading.compare import outputs
from tests.reading.zoo import OPTIONS, ZOO
from tests.reading.zoo.base import HEADS, SIZE, VOCABULARY, WIDTH

pytestmark = pytest.mark.xdist_group("modules that are read")


class Extremes(nn.Module):
    """Masks of -1e9, epsilons of 1e-12, sums of squares and activations beyond float16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.gain = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.full((WIDTH,), 2e5))

    def norm(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        x = self.embed(ids) * self.gain  # up to 5e5
        shape = (rows, length, 3, HEADS, SIZE)
        q, k, v = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        hidden = torch.full((length, length), -1e9).triu(1)
        y = (q @ k.transpose(2, 3) / 8**0.5 + hidden).softmax(-1) @ v
        x = x + self.gain * y.transpose(1, 2).flatten(2)
        return self.head(self.norm(x) * 1e-7 * 1e7)


def _sources(name: str) -> Sources:
    if name == "extremes":
        torch.manual_seed(0)
        return Sources(Extremes().eval(), how=ReadAs(max_positions=40))
    module, example, positions = ZOO[name]()
    return Sources(module, how=ReadAs(example, positions, **OPTIONS[name]))


def _quick(name: str, target: str, dtype: str, weights: str | None = None) -> object:
    return pytest.param(name, target, dtype, weights)


def _all(name: str, target: str, dtype: str, weights: str | None = None) -> object:
    return pytest.param(name, target, dtype, weights, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    ("name", "target", "dtype", "weights"),
    [
        _quick("extremes", "ort", "float16"),
        _quick("rope-cut", "ort-cuda", "float16"),
        _quick("multihead-float-weights", "ort", "float16"),
        _quick("wavenet", "ort", "float16"),
        _all("extremes", "onnx", "float16"),
        _all("nanogpt-flash", "onnx-static", "float16"),
        _all("nanogpt-flash", "ort-cuda", "bfloat16"),
        _all("nanogpt-flash", "ort-cuda", "float16", "int4"),
        _all("nanochat", "ort-cuda", "float16"),
        _all("shift-by-pad", "ort-cuda", "float16"),
        _all("experts-by-mask", "ort-cuda", "float16"),
        _all("encoder-mask", "ort-cuda", "float16"),
    ],
)
def test_artefacts_in_half_precision_agree_with_the_module(
    name: str, target: str, dtype: str, weights: str | None, tmp_path: Path
) -> None:
    sources = _sources(name)
    how = {"dtype": dtype, "weights": weights, "verify": "quick"}
    manifest = export(sources, target, tmp_path / "artefact", **how)  # type: ignore[arg-type]
    assert manifest.dtype == dtype
    assert {state.dtype for state in manifest.states} <= {dtype, "int64"}
    assert dtype == "bfloat16" or (manifest.certificate or {})["passed"]
    if weights is not None or dtype == "bfloat16":
        return
    model = sources.model
    assert isinstance(model, ReadModule)
    x = model.captured.example[:1]
    session = load(tmp_path / "artefact", provider="cpu").session()
    given = x.numpy() if model.vocabulary else x.half().numpy()
    got = session.prefill(given).astype(np.float64)
    with torch.no_grad():
        wanted = outputs(model.captured.module, x).numpy()
    assert worst_error(got, wanted) <= 40 * NOISE["float16"]


def test_only_weights_of_products_are_rounded() -> None:
    model = _sources("extremes").model
    half = in_dtype(model, "float16")
    dtypes = {name: weight.dtype for name, weight in half.named_parameters()}
    assert dtypes["calls.qkv.weight"] is dtypes["calls.embed.weight"] is torch.float16
    assert dtypes["calls.gain"] is torch.float32
    assert all(b.dtype is torch.float32 for b in half.buffers() if b.is_floating_point())
    wide = in_dtype(half, "float32")
    assert {weight.dtype for weight in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.get_parameter("calls.gain"), model.get_parameter("calls.gain"))
    rounded = model.get_parameter("calls.qkv.weight").half().float()
    assert torch.equal(wide.get_parameter("calls.qkv.weight"), rounded)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_routers_stay_in_float32() -> None:
    half = in_dtype(_sources("experts-by-mask").model, "bfloat16")
    assert isinstance(half, ReadModule)
    routers = [half.get_parameter(f"calls.{name}") for name in half.products.routers]
    assert {weight.dtype for weight in routers} == {torch.float32}
    assert torch.bfloat16 in {weight.dtype for weight in half.parameters()}


class PairsOfTokens(nn.Module):
    """Rows of a table for a token, and for the one before it."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed, self.before = nn.Embedding(words, WIDTH), nn.Embedding(words, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        before = torch.cat((torch.zeros_like(ids[:, :1]), ids[:, :-1]), 1)
        return self.embed(ids) + self.before(before)


def _pairs(words: int) -> Sources:
    torch.manual_seed(0)
    return Sources(PairsOfTokens(words), how=ReadAs(max_positions=40))


def test_ids_that_a_dtype_rounds_in_caches_are_refused_with_the_largest() -> None:
    few, many = _pairs(900).model, _pairs(2900).model
    check_half(few, "ort-cuda", "float16")
    for model, dtype in ((many, "float16"), (few, "bfloat16")):
        with pytest.raises(ValueError, match="whose caches keep whole numbers up to .*, got"):
            check_half(model, "ort-cuda", dtype)


@pytest.mark.parametrize(("words", "finds"), [(200, []), (900, ["bfloat16"]), (2900, ["float16"])])
def test_ids_that_a_dtype_rounds_in_caches_are_found_in_the_artefact_as_exported(
    words: int, finds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posenc_export.export.artefact.check_half", lambda *_: None)
    for dtype in finds or ("float16", "bfloat16"):
        found = contextlib.nullcontext()
        if finds:
            found = pytest.raises(VerificationError, match="within .*e-0[23], .* 'as exported: ")
        with found:
            export(_pairs(words), "ort-cuda", tmp_path / dtype, dtype=dtype, verify="quick")
