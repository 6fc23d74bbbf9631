"""Graphs compute the rows of large tables of rotations from two small tables."""

import functools
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.utils import Extractor

from posenc_export.encodings.shared import tables
from posenc_export.export import Sources, export
from posenc_export.export.targets import standard
from posenc_export.export.targets.builder import Builder
from posenc_export.export.verify import VerificationError
from posenc_export.models.presets import seeded
from posenc_export.runtime import load
from posenc_export.runtime.artefact.certificate import failed_checks
from tests.tiny import decoder

pytestmark = pytest.mark.xdist_group("two levels")
RANGE, THETA = 700, 10000.0
HALF_ULP = 2.0**-25  # of numbers in 0.5 .. 1, the largest that cosines and sines have


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all tables be large enough for two levels."""
    monkeypatch.setattr(tables, "LARGE", 1)


def _sources(variant: str) -> Sources:
    return _traced(variant, tables.LARGE)


@functools.cache
def _traced(variant: str, large: int) -> Sources:
    return Sources(seeded(decoder(variant, max_positions=RANGE)))


def _graph(folder: Path) -> Any:
    return onnx.load(str(folder / "model.onnx"))


def _computed(model: Any, positions: np.ndarray) -> Any:
    """Return the cosines and sines [B,S,r/2] that the first rotation of a graph reads."""
    rotation = next(node for node in model.graph.node if node.op_type == "RotaryEmbedding")
    wanted = list(rotation.input[1:3])
    for node in model.graph.node:
        for name in wanted:
            if name in node.output and name not in [value.name for value in model.graph.value_info]:
                info = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
                model.graph.value_info.append(info)
    part = Extractor(model).extract_model(["position_ids"], wanted)
    return ReferenceEvaluator(part).run(None, {"position_ids": positions})


@pytest.mark.parametrize("target", ["onnx", "ort", "ort-native"])
def test_every_row_is_that_of_float64_rounded_once(target: str, tmp_path: Path) -> None:
    export(_sources("rope"), target, tmp_path / "a", verify=False)
    model = _graph(tmp_path / "a")
    assert all(RANGE not in tensor.dims for tensor in model.graph.initializer)
    waves = _computed(model, np.arange(RANGE)[None])
    size = 2 * waves[0].shape[2]
    angles = np.arange(RANGE)[:, None] / THETA ** (np.arange(0, size, 2) / size)
    for computed, exact in zip(waves, (np.cos(angles), np.sin(angles)), strict=True):
        assert np.abs(computed[0] - exact).max() <= HALF_ULP * (1 + 1e-3)


def test_a_module_has_the_rows_that_its_graph_computes(tmp_path: Path) -> None:
    source = _sources("rope")
    export(source, "onnx", tmp_path / "a", verify=False)
    computed = _computed(_graph(tmp_path / "a"), np.arange(RANGE)[None])
    encoding = source.model.attentions()[0].encoding
    for rows, table in zip(computed, (encoding.cos, encoding.sin), strict=True):
        assert np.array_equal(rows[0], table.rows.numpy())


@pytest.mark.parametrize(
    ("variant", "target"),
    [
        ("rope", "ort"),
        ("rope_longrope", "onnx-static"),
        pytest.param("rope_yarn", "onnx", marks=pytest.mark.exhaustive),
        pytest.param("mrope", "ort", marks=pytest.mark.exhaustive),
    ],
)
def test_an_artefact_passes_its_proof(variant: str, target: str, tmp_path: Path) -> None:
    manifest = export(_sources(variant), target, tmp_path / "a", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    names = {tensor.name.rpartition(".")[2] for tensor in _graph(tmp_path / "a").graph.initializer}
    assert {"coarse", "fine"} <= names and "rows" not in names


def test_outputs_are_those_of_whole_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    export(_sources("rope"), "ort", tmp_path / "levels", verify=False)
    monkeypatch.setattr(tables, "LARGE", 1 << 20)
    export(_sources("rope"), "ort", tmp_path / "whole", verify=False)
    tokens = np.random.default_rng(0).integers(0, 60, (1, 300))
    logits = [
        load(tmp_path / name, threads=1).session().prefill(tokens) for name in ("levels", "whole")
    ]
    assert np.abs(logits[0] - logits[1]).max() <= 1e-5 * np.abs(logits[1]).max()


def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the rows of the position after a token's, which changes no difference of positions."""
    rows = standard.rows_of_levels

    def late(op: Any, table: Any, positions: Any) -> Any:
        return rows(op, table, op.Min(op.Add(positions, 1), RANGE - 1))

    monkeypatch.setattr(standard, "rows_of_levels", late)


def _next_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Store another number of the fine table."""
    weight = Builder.weight

    def other(op: Builder, name: str, made: Any, *dtype: Any) -> Any:
        def changed() -> np.ndarray:
            numbers = made().copy()
            numbers[200, 1] = np.nextafter(numbers[200, 1], 2)
            return numbers

        return weight(op, name, changed if name.endswith(".fine") else made, *dtype)

    monkeypatch.setattr(Builder, "weight", other)


@pytest.mark.parametrize(("fault", "part"), [(_late, "indices"), (_next_number, "numbers")])
def test_a_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fault(monkeypatch)
    with pytest.raises(VerificationError) as error:
        export(_sources("rope"), "ort", tmp_path / "a", verify="quick")
    assert part in failed_checks(error.value.certificate)
