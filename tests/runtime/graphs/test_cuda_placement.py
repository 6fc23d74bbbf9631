"""What the CUDA provider makes of every encoding's graph, by the table of its kernels. `make
cuda-dry-run` compares this with the provider itself.
"""

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from posenc_export.commands.cli import main
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.export.describe import describe
from posenc_export.export.targets import ort
from posenc_export.runtime.graphs import cuda
from posenc_export.runtime.graphs.cuda_placement import Placement, placed, table
from tests.cases import choice
from tests.export.test_parity import FUSED
from tests.rooms import TOP
from tests.tiny import block, decoder
from tests.traces import sources

CAPTURED = (0, 0, "captured", "")
# For blocks that are not CAPTURED: nodes on the CPU, copies of a step, whether a step can be
# captured, and the first operator that needs cuDNN.
PINNED: dict[str, tuple[int, int, str, str]] = {
    # the condition of If, whether a query is beyond the trained range
    "rope_dynamic": (4, 1, "not captured", "ReduceMax"),
    "input_rnn": (0, 1, "not captured", "GRU"),  # lengths of rows
    "conditional_conv": (0, 0, "captured", "Conv"),
    "conditional_conv_2d": (2, 0, "captured", "Conv"),
    "rope_2d": (2, 0, "captured", ""),
    "shaw": (2, 0, "captured", ""),
    **dict.fromkeys(  # a shape, computed from sizes of inputs
        ("cope", "inkling", "fox_pair", "boxes", "fire", "wavlm"), (1, 0, "captured", "")
    ),
    # a matrix for each head, which MatMul addresses from the host
    "deberta": (0, 0, "not captured", ""),
    "transformer_xl": (0, 0, "not captured", ""),
}


def placement_of(name: str, folder: Path) -> Placement:
    """Write the graph of a model for ort-cuda, and place its nodes."""
    # complex_order has a token table that is wider than a block.
    config = decoder(name) if name == "complex_order" else block(name)
    source = sources(config).of("float16")
    manifest = describe(source.model, "ort-cuda", "positions")
    ort.write_cuda(source, manifest, folder)
    return placed(folder / "model.onnx")


@pytest.mark.parametrize("name", choice(REGISTRY, FUSED, grouped=True))
def test_nodes_of_an_encoding_are_placed_as_pinned(name: str, tmp_path: Path) -> None:
    found = placement_of(name, tmp_path)
    assert found.runs
    graph = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph
    needing = min(cuda.CUDNN_OPERATORS & {node.op_type for node in graph.node}, default="")
    captured = "captured" if found.captured else "not captured"
    placement = (len(found.on_cpu), found.copied, captured, needing)
    assert placement == PINNED.get(name, CAPTURED)


def test_the_table_belongs_to_the_onnxruntime_gpu_of_the_constraints() -> None:
    lines = (TOP / "constraints.txt").read_text(encoding="utf-8").split()
    assert f"onnxruntime-gpu=={table()[0]}" in lines, (
        "run make cuda-dry-run with --write-table, and compare the pinned placements"
    )


def planted(folder: Path, *nodes: Any) -> Placement:
    """Place the nodes of the block of rope with nodes added at its end."""
    placement_of("rope", folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    model.graph.node.extend(nodes)
    onnx.save(model, folder / "planted.onnx")
    return placed(folder / "planted.onnx")


@pytest.mark.xdist_group("rope")
def test_a_node_without_a_kernel_is_found(tmp_path: Path) -> None:
    found = planted(
        tmp_path,
        helper.make_node("Einsum", ["output", "output"], ["planted"], equation="bse,bse->bs"),
        helper.make_node("Det", ["output"], ["det"]),
    )
    assert not found.runs and found.without_kernel == ["Det of float16"]
    assert found.said() == "cannot run: no kernel for Det of float16"
    assert found.to_host == ["output"]


def test_nodes_without_a_kernel_that_are_alike_are_named_once() -> None:
    placement = Placement(without_kernel=["Det of float", "Clip of bfloat16", "Det of float"])
    assert placement.said() == (
        "cannot run: no kernel for Det of float (2 nodes); no kernel for Clip of bfloat16"
    )


@pytest.mark.xdist_group("rope")
def test_a_kernel_for_other_element_types_is_none(tmp_path: Path) -> None:
    half = helper.make_node("Cast", ["output"], ["bits"], to=TensorProto.BFLOAT16)
    found = planted(tmp_path, half, helper.make_node("CumSum", ["bits", "axis"], ["planted"]))
    assert found.without_kernel[0].startswith("CumSum of bfloat16")


@pytest.mark.xdist_group("rope")
def test_a_range_on_the_device_is_copied_to_the_host(tmp_path: Path) -> None:
    total = helper.make_node("Cast", ["total_sequence_length"], ["total"], to=TensorProto.INT64)
    zero = helper.make_node("Constant", [], ["zero"], value_int=0)
    one = helper.make_node("Constant", [], ["one"], value_int=1)
    made = helper.make_node("Range", ["zero", "total", "one"], ["planted"])
    found = planted(tmp_path, total, zero, one, made)
    assert found.to_host == ["total"] and found.to_device == ["total_sequence_length"]
    assert not found.captured
    assert found.said().endswith("2 copies a step, cannot be captured")


@pytest.mark.xdist_group("rope")
def test_a_choice_of_branches_cannot_be_captured(tmp_path: Path) -> None:
    read = helper.make_tensor_value_info("branch", TensorProto.FLOAT16, None)
    inner = helper.make_node("Neg", ["output"], ["branch"])
    body = helper.make_graph([inner], "branch", [], [read])
    flag = helper.make_node("Cast", ["total_sequence_length"], ["flag"], to=TensorProto.BOOL)
    made = helper.make_node("If", ["flag"], ["planted"], then_branch=body, else_branch=body)
    found = planted(tmp_path, flag, made)
    assert found.control_flow == ["If"] and found.to_host == ["flag"] and not found.captured


@pytest.mark.xdist_group("rope")
def test_what_a_kernel_refuses_at_each_run_is_found(tmp_path: Path) -> None:
    bias_and_sinks = ["seqlens_k", "total_sequence_length", "", "", "", "output", "output"]
    names = ["output", "", "", "", "", *bias_and_sinks]
    node = helper.make_node("GroupQueryAttention", names, ["planted"], domain="com.microsoft")
    said = "cannot run: GroupQueryAttention with attention_bias does not take head_sink (sinks)"
    assert planted(tmp_path, node).said() == said


@pytest.mark.xdist_group("rope")
@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("ort-cuda", r"0 of 3 nodes run on the CPU, 0 copies a step, can be captured"),
        ("onnx", r"\d of \d+ nodes runs? on the CPU, 0 copies a step, cannot be captured"),
        ("ort", "cannot run: no kernel for GroupQueryAttention of float float float int32 .*"),
    ],
)
def test_inspect_prints_the_placement_and_that_it_proves_no_value(
    target: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    export(sources(block("rope")), target, tmp_path / "artefact", verify=False)
    assert main(["inspect", str(tmp_path / "artefact")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(
        rf"on CUDA {line} \(from the kernels of onnxruntime-gpu {table()[0]}; this proves no "
        r"value\)",
        printed,
    ), printed
