"""Second outputs of encoders: in the graph of every target, and proved by the parity grid."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export.export import TARGETS, VerificationError, export
from posenc_export.models.parts.readout import POOLINGS, Mean, Readout
from posenc_export.runtime import load, verify
from tests.cases import choice, covering
from tests.models.readouts import encoder, sources

QUICK = ("onnx", "ort", "torchscript")  # others have a graph of these or a separate trace
EACH = choice(itertools.product(TARGETS, POOLINGS), covering(QUICK, [*POOLINGS]))
READ_OUTS = ("at once", "padding", "ragged rows")


@pytest.mark.parametrize(("target", "pooling"), EACH)
def test_the_grid_proves_a_pooled_output_on_every_target(
    target: str, pooling: str, tmp_path: Path
) -> None:
    model = sources(pooling, after=True)
    manifest = export(model, target, tmp_path / "artefact", verify="quick")
    assert [(value.name, value.axes) for value in manifest.outputs[1:]] == [
        ("sentence_embedding", ("batch_size", 7))
    ]
    cells = manifest.certificate["cells"] if manifest.certificate else {}
    assert {f"sentence_embedding, {cell}" for cell in READ_OUTS} | {"sentence_embedding"} <= {
        name.rpartition(": ")[2] for name in cells
    }


def test_an_artefact_proves_its_second_output_without_its_module(tmp_path: Path) -> None:
    export(sources("cls"), "ort", tmp_path / "artefact", "mask", verify="quick")
    proof = verify(tmp_path / "artefact")
    assert proof["passed"] and "batch 1, start 0: sentence_embedding, padding" in proof["cells"]


class MeanWithPadding(Mean):
    """A mean that counts padding."""

    def forward(self, x: Tensor, counted: Tensor) -> Tensor:
        return x.mean(1)


def test_a_pooling_that_reads_padding_is_caught(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(POOLINGS, "mean", MeanWithPadding)
    with pytest.raises(VerificationError, match="sentence_embedding, (padding|ragged rows)"):
        export(encoder("mean"), "torchscript", tmp_path / "artefact", verify="quick")


def test_read_out_needs_a_second_output_and_a_token_in_every_row(tmp_path: Path) -> None:
    export(sources(), "torchscript", tmp_path / "plain", verify=False)
    export(sources("mean"), "torchscript", tmp_path / "pooled", verify=False)
    with pytest.raises(ValueError, match="expected a model with a second output"):
        load(tmp_path / "plain").session().read_out(np.arange(3)[None])
    with pytest.raises(ValueError, match="expected at least one token in every row"):
        load(tmp_path / "pooled").session().read_out([np.arange(3), np.arange(0)])


def test_half_precision_pools_in_float32() -> None:
    x = torch.full((1, 4096, 1), 100.0, dtype=torch.float16)
    assert Readout(Mean())(x, torch.arange(4096)[None]).item() == 100.0


def test_a_readout_is_compared_in_float32_if_activations_are_rounded(tmp_path: Path) -> None:
    model = sources("mean", after=True)
    manifest = export(model, "ort", tmp_path / "artefact", weights="int8", verify="quick")
    result = manifest.certificate
    assert result is not None and result["passed"] and result["tolerance"] < 1e-4
    cells = [name for name in result["cells"] if name.startswith("float32 form: ")]
    own = [name for name in cells if "sentence_embedding," in name]
    assert len(own) == len(READ_OUTS) and not result["bounds"].keys() & {*own}
    assert all(result["cells"][name] <= result["tolerance"] for name in own)


def test_an_encoder_in_half_precision_proves_its_hidden_states_without_its_module(
    tmp_path: Path,
) -> None:
    export(sources(), "onnx", tmp_path / "artefact", dtype="float16", verify="quick")
    assert verify(tmp_path / "artefact")["passed"]
