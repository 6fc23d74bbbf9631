"""The number of threads that load chooses."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from posenc_export.commands.cli import main
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import File
from posenc_export.runtime.artefact.records import Weights
from posenc_export.runtime.graphs import providers
from tests.tiny import decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("alibi")  # one worker, which traces the model once


@pytest.fixture(scope="module")
def folder() -> Path:
    return artefact(decoder("alibi"), "ort")


@pytest.mark.parametrize(
    ("cores", "weights", "count"),
    [
        (1, 1 << 10, None),
        (2, 1 << 10, None),
        (64, 1 << 10, 2),
        (64, 11 * 15 * providers.SHARE, 15),
        (64, 1 << 30, None),
        (8, 11 * 15 * providers.SHARE, None),
    ],
)
def test_a_small_model_takes_two_threads_and_a_large_one_all_cores(
    cores: int, weights: int, count: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = replace(manifests.read(folder), step_weights=weights)
    monkeypatch.setattr(providers, "cores", lambda: cores)
    assert (
        sum(count for name, count in manifest.operators.items() if name in providers.PRODUCTS) == 11
    )  # 5 for each layer, and the head
    assert providers.threads_for(providers.AUTO, manifest) == count
    assert providers.threads_for(3, manifest) == 3 and providers.threads_for(None, manifest) is None


@pytest.mark.parametrize("bits", [4, 8])
def test_the_number_of_threads_does_not_depend_on_the_bits_of_the_weights(
    bits: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "cores", lambda: 64)
    weights = 11 * 15 * providers.SHARE
    manifest = replace(
        manifests.read(folder),
        step_weights=weights,
        operators={"MatMulNBits": 11},
        weights=Weights(f"int{bits}", 11),
        files={"model.onnx.data": File("0" * 64, weights * bits // 8)},
    )
    assert providers.threads_for(providers.AUTO, manifest) == 15


def test_load_uses_the_number_that_inspect_prints(
    folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "cores", lambda: 64)
    options = load(folder, provider="cpu").graph.ort_session.get_session_options()
    assert options.intra_op_num_threads == 2
    assert main(["inspect", str(folder)]) == 0
    assert "2 of 64 cores, by the size of its matrices" in capsys.readouterr().out
