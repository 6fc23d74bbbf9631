"""Weights of few bits on target ort-cuda: forms that CUDA's kernels read as the CPU's do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.export import Sources, export, verify
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.models.presets import seeded
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import load
from posenc_export.runtime.graphs import cuda, cuda_placement, ort_options
from posenc_export.runtime.graphs.onnx_nodes import Node, read_nodes
from tests.cases import combinations
from tests.traces import exported, sources

pytestmark = pytest.mark.xdist_group("rope")
ROWS = "GatherBlockQuantized"


def tied(width: int) -> Any:
    """A decoder whose head is its token table."""
    return decoder_config(
        61, 1, 64, block_config(width, 4, 1100, encoding={"name": "rope"}), tied=True
    )


def rows_on_cuda(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, block: int
) -> np.ndarray:
    """Return all rows of a table as CUDA's GatherBlockQuantized indexes it: blocks, their scales
    and packed zero points are counted through the whole table, and no zero points are 0.
    """

    def number(packed: np.ndarray, at: np.ndarray) -> np.ndarray:
        each = 8 // bits
        return packed.reshape(-1)[at // each] >> (at % each * bits).astype(np.uint8) & (
            (1 << bits) - 1
        )

    at = np.arange(codes.size * 8 // bits)
    of_block = at // block
    zero = np.zeros(1) if zeros is None else number(zeros, of_block).astype(np.float64)
    numbers = (number(codes, at) - zero) * scales.reshape(-1)[of_block].astype(np.float64)
    return numbers.reshape(len(codes), -1)


def rows_of(folder: Path) -> tuple[dict[str, Any], Node]:
    """Return codes, scales and zero points of the token table, and the node that reads them."""
    graph = read_nodes(folder / "model.onnx")
    makers = {output: node for node in graph.nodes for output in node.outputs}
    (node,) = [node for node in graph.nodes if node.operator == ROWS]

    def numbers(name: str) -> np.ndarray:
        while name in makers:  # nodes that change the shape or the dtype alone
            name = makers[name].inputs[0]
        return graph.constants[name].array(folder)

    codes, _, scales, *zeros = node.inputs
    read_of = {"codes": codes, "scales": scales, **dict(zip(["zeros"], zeros, strict=False))}
    return {"zeros": None, **{part: numbers(name) for part, name in read_of.items()}}, node


@pytest.mark.parametrize(
    ("weights", "width"),
    combinations(["int4", "int8-32", "int4-128"], [32, 48, 96, 128]),  # 1 to 4 blocks of 32
)
def test_rows_of_a_token_table_are_right_with_the_indices_of_cuda(
    weights: str, width: int, tmp_path: Path
) -> None:
    of_model = sources(tied(width))
    export(of_model, "ort-cuda", tmp_path / "made", weights=weights, verify=False)
    parts, node = rows_of(tmp_path / "made")
    bits, block = node.attributes["bits"], node.attributes["block_size"]
    table = of_model.of("float16", weights).exact.tokens.embedding.weight.detach().numpy()
    on_cuda = rows_on_cuda(**parts, bits=bits, block=block)
    assert np.array_equal(on_cuda[:, :width], table)
    assert not on_cuda[:, width:].any() and not on_cuda.shape[1] % block


def test_a_byte_for_each_zero_point_would_be_read_wrong_and_so_would_none(tmp_path: Path) -> None:
    exported(tmp_path / "made", tied(48), "ort", weights="int4")
    parts, _ = rows_of(tmp_path / "made")
    codes = parts["codes"].reshape(len(parts["codes"]), -1)
    table = sources(tied(48)).of("float32", "int4").model.tokens.embedding.weight.detach().numpy()
    for zeros in (parts["zeros"], None):
        on_cuda = rows_on_cuda(codes, parts["scales"], zeros, bits=4, block=32)
        assert np.abs(on_cuda[:, :48] - table).max() > np.abs(table).max() / 2


@pytest.mark.parametrize(("weights", "dtype"), combinations(list(FORMATS), ["float16", "bfloat16"]))
def test_a_cuda_kernel_takes_every_node_with_scales_in_the_dtype_of_activations(
    weights: str, dtype: str, tmp_path: Path
) -> None:
    folder = tmp_path / "made"
    how = {"weights": weights, "dtype": dtype, "verify": "quick"}
    manifest = export(sources(tied(48)), "ort-cuda", folder, **how)  # type: ignore[arg-type]
    graph, placed = read_nodes(folder / "model.onnx"), cuda_placement.placed(folder / "model.onnx")
    assert placed.runs and placed.captured and not placed.copied
    assert "DequantizeLinear" not in manifest.operators and manifest.weights.activations == dtype
    nodes = [node for node in graph.nodes if node.operator in ("MatMulNBits", ROWS)]
    assert len(nodes) == manifest.weights.matrices + 1  # the table is read by two nodes
    for node in nodes:
        scales, *zeros = (graph.constants[name].element for name in node.inputs[2:4])
        assert scales == dtype and set(zeros) <= {"uint8"}
    if dtype == "float16":  # the CPU does not run bfloat16
        proof = manifest.certificate
        assert proof is not None and proof["passed"] and proof["checks"]["operators"]["compared"]
        assert manifest.quality is not None


@pytest.mark.parametrize(  # with offsets, and without
    "kind", ["Q4_K", pytest.param("Q4_1", marks=pytest.mark.exhaustive), "Q8_0"]
)
def test_the_blocks_of_a_file_are_kept_with_scales_in_half_precision(
    kind: str, tmp_path: Path
) -> None:
    types = pytest.importorskip("gguf", reason="gguf is not installed").GGMLQuantizationType
    files = pytest.importorskip("tests.models.gguf_files")
    files.write("llama wide", files.made("llama wide"), tmp_path / "model.gguf", types[kind])
    of_model, folder = Sources(from_pretrained(tmp_path / "model.gguf")), tmp_path / "made"
    manifest = export(of_model, "ort-cuda", folder, weights="keep", verify="quick")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert cuda_placement.placed(folder / "model.onnx").captured
    parts, node = rows_of(folder)
    on_cuda = rows_on_cuda(**parts, bits=node.attributes["bits"], block=32)
    codes = of_model.of("float16", "keep").on_grid["calls.model.model.embed_tokens.weight"][1]
    assert np.array_equal(on_cuda.reshape(codes.codes.shape), codes.codes * codes.scales[..., None])


def test_an_artefact_is_verified_again_with_its_module(tmp_path: Path) -> None:
    model = seeded(tied(48))
    export(Sources(model), "ort-cuda", tmp_path / "made", weights="int8-32", verify=False)
    assert verify(tmp_path / "made", model)["passed"]


def test_the_float32_form_is_verified_in_bfloat16(tmp_path: Path) -> None:
    manifest = export(
        sources(tied(48)),
        "ort-cuda",
        tmp_path / "made",
        dtype="bfloat16",
        weights="int4",
        verify="quick",
    )
    assert manifest.certificate is None and manifest.reference is not None


def test_auto_takes_the_device_and_the_products_of_mixed_dtypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "cuda", tied(48), "ort-cuda", weights="int4")
    exported(tmp_path / "onnx", tied(48), "onnx", weights="int4")
    manifests = [load(tmp_path / name, "cpu").manifest for name in ("cuda", "onnx")]
    monkeypatch.setattr(
        ort_options.onnxruntime, "get_available_providers", lambda: [cuda.NAME, "CPU"]
    )
    monkeypatch.setattr(cuda, "obstacle", lambda: None)
    chosen = [ort_options.choose_provider("auto", manifest) for manifest in manifests]
    assert chosen == ["cuda", "cpu"]
    options = [ort_options.session_options(manifest, None) for manifest in manifests]
    name, value = ort_options.MIXED_PRODUCTS
    assert options[0].get_session_config_entry(name) == value
    with pytest.raises(RuntimeError, match=name):
        options[1].get_session_config_entry(name)
