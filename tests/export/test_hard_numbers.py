"""Large numbers, NaN and infinities: an artefact stays exact, and rows of a batch do not affect
each other.
"""

import itertools
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import pytest

from posenc_export.encodings import REGISTRY
from posenc_export.export import Sources, export
from posenc_export.export.describe import eager
from posenc_export.models.presets import seeded
from posenc_export.models.whole_pass import exact_pass
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import choice, covering
from tests.tiny import block, decoder
from tests.traces import sources

TARGETS = ("onnx", "onnx-static", "ort", "torchscript")
# complex_order acts on token ids: a block cannot contain it, and ids are never NaN.
NUMBERS = [name for name in REGISTRY if name != "complex_order"]


# One encoding per way of computing scores: `make test` runs each of these on some target and each
# target, `make test-all` every encoding on every target.
QUICK = ("rope", "cope", "fox")


def _each(variants: Sequence[str], targets: Sequence[str] = TARGETS) -> list[Any]:
    taken = covering([variant for variant in QUICK if variant in variants], targets)
    taken.append(("cope", "ort"))  # lowered in another way in float16
    return choice(itertools.product(variants, targets), taken, grouped=True)


def _session(source: Sources, target: str, folder: Path, **how: Any) -> Session:
    export(source, target, folder / "artefact", verify=False, **how)
    return load(folder / "artefact", provider="cpu").session()


def _eager(model: Any) -> Session:
    module, manifest = eager(model)
    return Model(TorchGraph(module, manifest)).session()


def _numbers(*shape: int, scale: float = 1.0, dtype: str = "float32") -> np.ndarray:
    return (scale * np.random.default_rng(0).standard_normal(shape)).astype(dtype)


def _calls(session: Session, x: np.ndarray) -> list[np.ndarray]:
    """Read x [B,S,E] in a prefill, a chunk on the filled cache and a step; a bidirectional model
    reads it in one call.
    """
    session.reset()
    if not session.manifest.states:
        return [session.prefill(x)]
    return [session.prefill(x[:, :6]), session.prefill(x[:, 6:9]), session.step(x[:, 9])]


@pytest.mark.parametrize(("variant", "target"), _each(NUMBERS))
def test_nan_in_one_row_does_not_affect_other_rows(
    variant: str, target: str, tmp_path: Path
) -> None:
    session = _session(sources(block(variant)), target, tmp_path)
    x = _numbers(3, 10, 48)
    right = _calls(session, x)
    for value in (np.nan, np.inf, -np.inf):
        for column in (2, 7, 9):
            broken = x.copy()
            broken[1, column, 5] = value
            for expected, actual in zip(right, _calls(session, broken), strict=True):
                assert worst_error(actual[[0, 2]], expected[[0, 2]]) <= tolerance("float32", 1, 48)


IN_HALF = TARGETS[:3]
LEARNED = ["rope", "alibi", "learned"]


@pytest.mark.parametrize(
    ("variant", "target", "dtype"),
    [
        *(pytest.param(*case.values, "float32", marks=case.marks) for case in _each(LEARNED)),
        *(
            pytest.param(*case.values, "float16", marks=[*case.marks, pytest.mark.exhaustive])
            for case in _each(LEARNED, IN_HALF)
        ),
    ],
)
def test_a_row_that_sees_no_key_is_finite_and_other_rows_are_correct(
    variant: str, target: str, dtype: str, tmp_path: Path
) -> None:
    model = sources(decoder(variant))
    session = _session(model, target, tmp_path, signature="mask", dtype=dtype)
    alone = _eager(model.of(dtype).model if dtype == "float32" else seeded(decoder(variant)))
    bound = tolerance(dtype, 2, 48)
    for first in ([[], [1]], [[], [1, 2, 3]]):
        session.reset()
        outputs = [session.prefill(rows) for rows in (first, [[2, 3], [4, 5]], [[], [6]])]
        stepped = session.step(np.array([7, 8]))
        for row, tokens in enumerate(([2, 3, 7], [*first[1], 4, 5, 6, 8])):
            expected = alone.prefill(np.array([tokens]))[0]
            alone.reset()
            read = len(first[row])
            assert worst_error(outputs[1][row], expected[read : read + 2]) <= bound
            assert worst_error(stepped[row], expected[-1]) <= bound
        assert all(np.isfinite(output).all() for output in outputs)


WITH_CACHE = [name for name in NUMBERS if "causal" in REGISTRY[name].works_in]


@pytest.mark.parametrize(("variant", "target"), _each(WITH_CACHE, ("onnx",)))
def test_a_cache_may_have_more_columns_than_there_are_positions(
    variant: str, target: str, tmp_path: Path
) -> None:
    source = sources(block(variant, 48))
    session, alone = _session(source, target, tmp_path), _eager(source.model)
    x, nothing = _numbers(2, 40, 48), np.zeros((0, 48), np.float32)
    expected = alone.prefill(x)
    for first in (0, 20):
        session.prefill([x[0, first : first + 19], nothing])
        session.prefill([nothing, x[1, first : first + 19]])
        stepped = session.step(x[:, first + 19])
    assert worst_error(stepped, expected[:, 39]) <= tolerance("float32", 1, 48)


# Encodings whose scores at such magnitudes depend on more than the rounding of queries and keys to
# float16.
CLEAR = (
    "rope alibi sinusoidal transformer_xl deberta shaw shaw-plain cope fox rope_longrope xpos t5"
).split()


@pytest.mark.parametrize(("variant", "target"), _each(CLEAR, IN_HALF))
def test_large_activations_in_half_precision_match_the_float32_module(
    variant: str, target: str, tmp_path: Path
) -> None:
    source = sources(block(variant))
    session = _session(source, target, tmp_path, dtype="float16")
    exact = _eager(seeded(block(variant)).half().float())
    for scale in (300.0, 1000.0):
        x = _numbers(2, 10, 48, scale=scale, dtype="float16")
        wide = x.astype(np.float32)
        for actual, expected in zip(_calls(session, x), _calls(exact, wide), strict=True):
            assert worst_error(actual, expected) <= tolerance("float16", 1, 48)


@pytest.mark.parametrize(
    ("variant", "target"), _each([name for name in NUMBERS if name not in CLEAR], ("onnx",))
)
def test_large_activations_in_half_precision_stay_finite(
    variant: str, target: str, tmp_path: Path
) -> None:
    session = _session(sources(block(variant)), target, tmp_path, dtype="float16")
    for scale in (300.0, 1000.0):
        x = _numbers(2, 10, 48, scale=scale, dtype="float16")
        assert all(np.isfinite(y).all() for y in _calls(session, x))


REMEMBERED = [*itertools.product((30.0, -1.0, -30.0, -900.0), TARGETS)]


@pytest.mark.parametrize(
    ("remember", "target"),
    choice(REMEMBERED, [case for case in REMEMBERED if case[0] == -30.0], grouped=True),
)
def test_forget_gates_of_any_size_match_the_oracle(
    remember: float, target: str, tmp_path: Path
) -> None:
    source = sources(block("fox", encoding={"name": "fox", "remember": remember}))
    session, x = _session(source, target, tmp_path), _numbers(1, 90, 48)
    expected = exact_pass(source.model, x[0], 0)
    actual = np.concatenate(
        [session.prefill(x[:, :60], chunk=25)[0], *(session.step(x[:, n]) for n in range(60, 90))]
    )
    assert worst_error(actual, expected) <= tolerance("float32", 1, 48)


OUTPUT = "attention.projection.output"
UNFINITE: list[Any] = [
    ("float32", np.nan, rf"in {OUTPUT}.weight \(float32\); correct the weights"),
    (
        "float16",
        1e5,
        rf"in {OUTPUT}.weight \(float16\), which holds numbers up to 65504; export in",
    ),
    ("float32", 3e38, rf"finite outputs of each layer, got NaN or infinity from {OUTPUT};"),
]


@pytest.mark.parametrize(("dtype", "number", "message"), UNFINITE)
def test_numbers_that_are_not_finite_are_refused_with_their_place_and_dtype(
    dtype: str, number: float, message: str, tmp_path: Path
) -> None:
    model = seeded(block("rope"))
    model.attentions()[0].projection.output.weight.data[:] = number
    with pytest.raises(ValueError, match=message):
        export(model, "onnx", tmp_path / "block", dtype=dtype, verify="quick")
