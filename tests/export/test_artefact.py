"""Content of artefact folders, and content that they must not have."""

import dataclasses
import inspect
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export import TARGETS, ExportOptions, ReadAs, Sources, export
from posenc_export.models.presets import seeded
from tests.cases import choice
from tests.tiny import block, decoder, encoder
from tests.traces import sources

PROGRAM = """
from posenc_export.export import Sources, export
from posenc_export.models.presets import seeded
from tests.tiny import block
sources = Sources(seeded(block("alibi")))
for target in {!r}:
    export(sources, target, {!r} + "/" + target, verify=target == "ort" and "quick")
"""
# Other seeds and targets are exhaustive.
HASHED = [
    pytest.param("1", ("ort", "torchscript"), id="1"),
    pytest.param("2", tuple(TARGETS), id="2", marks=pytest.mark.exhaustive),
]


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize(("seed", "targets"), HASHED)
def test_same_input_gives_the_same_bytes_in_another_folder_and_process(
    seed: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    export(sources(block("rope")), "torchscript", tmp_path / "warm", verify=False)
    traced = sources(block("alibi"))
    there = tmp_path / "some/other/place"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())}
    program = PROGRAM.format(targets, str(there))
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, env=environment)
    for target in targets:
        export(traced, target, tmp_path / "here" / target, verify=target == "ort" and "quick")
        assert _bytes(there / target) == _bytes(tmp_path / "here" / target)


@pytest.mark.parametrize(
    "targets",
    [("onnx", "ort"), pytest.param(tuple(TARGETS), marks=pytest.mark.exhaustive)],
    ids=["of one dtype", "all"],
)
def test_targets_that_share_a_trace_are_equal_to_targets_with_separate_traces(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = seeded(block("fox"))
    together = Sources(model)
    export(together, targets[0], tmp_path / "first", verify=False)  # traces
    for target in targets[1:]:
        export(together, target, tmp_path / "together" / target, verify=False)
        export(model, target, tmp_path / "alone" / target, verify=False)
        assert _bytes(tmp_path / "together" / target) == _bytes(tmp_path / "alone" / target)


@pytest.mark.parametrize("target", choice(TARGETS, ["ort", "torchscript", "pt2"]))  # of each writer
def test_no_artefact_holds_a_local_path(target: str, tmp_path: Path) -> None:
    export(sources(block("rope")), target, tmp_path / "artefact", verify=False)
    contents = list(_bytes(tmp_path / "artefact").values())
    if target == "torchscript":
        with zipfile.ZipFile(tmp_path / "artefact" / "model.pt") as archive:
            contents += [archive.read(name) for name in archive.namelist()]
    for path in (str(Path.cwd()), str(tmp_path), sys.prefix, str(Path.home())):
        assert not any(path.encode() in content for content in contents), path


def test_rope_block_for_ort_is_two_projections_and_one_fused_node(tmp_path: Path) -> None:
    manifest = export(sources(block("rope")), "ort", tmp_path / "artefact", verify=False)
    assert manifest.operators == {"GroupQueryAttention": 1, "MatMul": 2}


def test_no_artefact_stores_a_bias_matrix(tmp_path: Path) -> None:
    long = sources(block("alibi", max_positions=100_000))
    export(long, "ort", tmp_path / "artefact", verify=False)
    assert (tmp_path / "artefact" / "model.onnx").stat().st_size < 100_000


def test_export_takes_the_fields_of_its_options_with_their_defaults() -> None:
    taken = list(inspect.signature(export).parameters.values())[3:]
    assert [(one.name, one.annotation, one.default) for one in taken] == [
        (field.name, field.type, field.default)
        for options in (ExportOptions, ReadAs)
        for field in dataclasses.fields(options)
        if field.name != "memory"  # which a part of a published model states
    ]


def test_options_are_checked_without_a_model() -> None:
    for options, rule in (
        (ExportOptions(tolerance=1.5), "tolerance"),
        (ExportOptions(max_loss=0.5), "at least 1, the perplexity of float32, got 0.5"),
        (ExportOptions(cache="int8"), "calibration data"),
        (ExportOptions("masks"), "did you mean mask"),
    ):
        with pytest.raises(ValueError, match=rule):
            options.check(["ort"])
    with pytest.raises(ValueError, match="did you mean onnx-static"):
        ExportOptions().check(["onnx-statick"])


class Counting(PositionEncoding):
    """Counts its calls in a buffer, a state that an ONNX graph would drop silently."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def embed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.calls[:1].add_(1)  # through a view
        return x + self.calls


@pytest.mark.parametrize("target", choice(["onnx", "pt2", "onnx-static", "ort"], ["onnx", "pt2"]))
def test_a_module_that_mutates_a_buffer_is_refused_and_nothing_is_written(
    target: str, tmp_path: Path
) -> None:
    model = seeded(block("nope"))
    model.token_encoding = Counting()
    said = "state as inputs and outputs of the graph, got mutation of .*calls"
    with pytest.raises(ValueError, match=said):
        export(model, target, tmp_path / "artefact")
    assert not list(tmp_path.iterdir())


def test_cuda_target_takes_half_precision_and_positions_only(tmp_path: Path) -> None:
    for option, got in (
        ({"dtype": "float32"}, "dtype float16 or bfloat16 for target ort-cuda, got float32"),
        ({"signature": "mask"}, "signature positions for target ort-cuda, got mask"),
    ):
        with pytest.raises(ValueError, match=f"expected {got}"):
            export(sources(block("rope")), "ort-cuda", tmp_path / "artefact", **option)


SIZED = {
    "learned": encoder("learned"),
    "rope": decoder("rope"),
    "alibi": block("alibi", causal=False),
}
SIGNED = [*itertools.product(SIZED, ("positions", "mask"))]
SIZES = "batch_size sequence_length past_sequence_length total_sequence_length logits_count"


@pytest.mark.parametrize(
    ("name", "signature"),
    choice(SIGNED, [("learned", "positions"), ("rope", "mask")], grouped=True),
)
def test_sizes_of_a_graph_have_names(name: str, signature: Any, tmp_path: Path) -> None:
    place = tmp_path / "artefact"
    export(sources(SIZED[name]), "onnx", place, signature=signature, verify=False)
    graph = onnx.load(place / "model.onnx").graph
    values = (*graph.input, graph.output[0])
    axes = [axis for value in values for axis in value.type.tensor_type.shape.dim]
    assert {axis.dim_param for axis in axes} - {""} <= {*SIZES.split()}
