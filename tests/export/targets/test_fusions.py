"""Standard nodes around attention that targets `ort` and `ort-cuda` replace by fewer: how many
are left, which patterns hold, and that numbers stay.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from posenc_export.export import export
from posenc_export.export.targets.builder import Builder, finish, replace_nodes
from posenc_export.export.targets.ort import CUDA_FUSIONS
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime.graphs.ort_options import SLOWER
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import choice
from tests.tiny import block
from tests.traces import sources

# The exporter transposes smaller token tables itself.
GATED = decoder_config(1000, 2, 40, block("rope"))
BIASED = block("rope", qkv_bias=True, output_bias=True)
PLAIN = decoder_config(61, 2, 40, BIASED, norm="layer", mlp="gelu", mlp_bias=True, tied=False)


LAST = {"Unsqueeze": 1, "GatherND": 1}  # select the tokens with logits
# For each model: nodes of a layer, and nodes before and after its two layers.
LAYERS: dict[str, Any] = {
    "gated": (GATED, {"RMSNormalization": 2, "MatMul": 5, "GroupQueryAttention": 1, "Add": 2,
        "Sigmoid": 1, "Mul": 2}, {"Gather": 1, "RMSNormalization": 1, "FusedMatMul": 1, **LAST}),
    "plain": (PLAIN,
        {"LayerNormalization": 2, "MatMul": 4, "GroupQueryAttention": 1, "Add": 6, "Gelu": 1},
        {"Gather": 1, "LayerNormalization": 1, "MatMul": 1, **LAST}),
}  # fmt: skip


@pytest.mark.parametrize("kind", choice(LAYERS, ["gated"]))
def test_a_layer_has_no_more_nodes_than_its_kernels_need_and_shares_a_tied_table(
    kind: str, tmp_path: Path
) -> None:
    config, layer, ends = LAYERS[kind]
    manifest = export(sources(config), "ort", tmp_path / "artefact", verify=False)
    wanted = Counter(ends)
    for _ in config.order:
        wanted.update(layer)
    assert manifest.operators == dict(wanted)
    graph = onnx.load(tmp_path / "artefact" / "model.onnx", load_external_data=False).graph
    tables = [one.name for one in graph.initializer if config.tokens.vocabulary in one.dims]
    assert len(tables) == (1 if config.head is not None and config.head.tied else 2)


def test_sums_and_norms_stay_apart_when_a_graph_is_loaded_on_a_cpu(tmp_path: Path) -> None:
    graph = _written("a = Add(x, x) y = LayerNormalization(a, four, four)")
    onnx.save(graph, tmp_path / "model.onnx")
    for disabled, norm in ((SLOWER["cpu"], "LayerNorm"), ([], "SkipLayerNorm")):
        found = [name for name in _loaded(tmp_path, disabled) if "LayerNorm" in name]
        assert found == [f"{norm}alization"]


def _loaded(folder: Path, disabled: list[str]) -> list[str]:
    """Return the operators of a graph that ONNX Runtime optimised for the CPU with some
    optimisers disabled.
    """
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath, options.log_severity_level = str(folder / "optimised.onnx"), 3
    how: Any = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": disabled}
    onnxruntime.InferenceSession(str(folder / "model.onnx"), options, **how)
    return [node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node]


PATTERNS: dict[str, Any] = {
    "a transposed constant": ("t = Transpose<perm=[1,0]>(turned) y = MatMul(x, t)",
        {"FusedMatMul": 1}),
    "a transposed constant without perm": ("t = Transpose(turned) y = MatMul(x, t)",
        {"FusedMatMul": 1}),
    "a constant that is not turned": ("t = Transpose<perm=[0,1]>(w1) y = MatMul(x, t)",
        {"Transpose": 1, "MatMul": 1}),
    "a sum and its norm": ("a = Add(x, x) y = RMSNormalization<epsilon=0.01>(a, four)",
        {"SkipSimplifiedLayerNormalization": 1}),
    "a sum that is read again":
        ("a = Add(x, x) b = Mul(a, four) n = RMSNormalization(a, four) y = Sub(b, n)",
        {"SkipSimplifiedLayerNormalization": 1, "Mul": 1, "Sub": 1}),
    "a sum with one row": ("a = Add(x, four) y = RMSNormalization(a, four)",
        {"Add": 1, "RMSNormalization": 1}),
    "a norm over several axes": ("a = Add(x, x) y = RMSNormalization<axis=-2>(a, four)",
        {"Add": 1, "RMSNormalization": 1}),
    "a transposed value": ("t = Transpose<perm=[0,2,1]>(x) y = MatMul(x, t)",
        {"Transpose": 1, "MatMul": 1}),
}  # fmt: skip
RANDOM = np.random.default_rng(0)
SHAPES = {"w1": (4, 6), "turned": (7, 4)}
CONSTANTS = {n: RANDOM.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
CONSTANTS["four"] = np.ones(4, np.float32)


def _written(nodes: str) -> onnx.ModelProto:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]> g (float[b,s,4] x) => '
        f"(float[b,s,n] y) {{ {nodes} }}"
    )
    read = {name for node in model.graph.node for name in node.input}
    for name in read & {*CONSTANTS}:
        model.graph.initializer.append(numpy_helper.from_array(CONSTANTS[name], name))
    return model


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_matching_pattern_is_replaced_and_agrees_with_the_reference_evaluator(
    pattern: str,
) -> None:
    nodes, wanted = PATTERNS[pattern]
    plain = _written(nodes)
    model = ir.from_proto(plain)
    op = Builder(model, "float32", 64)
    replace_nodes(op, CUDA_FUSIONS)  # which contain those of ort
    finish(op)
    assert Counter(node.op_type for node in model.graph) == wanted
    x = {"x": np.random.default_rng(1).standard_normal((2, 3, 4)).astype(np.float32)}
    content = ir.to_proto(model).SerializeToString()
    fused = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    error = worst_error(fused.run(None, x)[0], ReferenceEvaluator(plain).run(None, x)[0])
    assert error <= tolerance("float32", 1, 4)
