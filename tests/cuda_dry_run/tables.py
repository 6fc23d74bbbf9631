"""Write the table of CUDA kernels that the static check reads, from the shipped provider: `python
-m tests.cuda_dry_run.tables FILE`.

Needs the stub libraries, and DRY_RUN with the folder of setup.sh. ONNX Runtime lists kernels by
creating every provider of the build, TensorRT's included, which cannot load here. A library that
creates the CUDA provider instead (stub/tensorrt_shim.cc) is in its place meanwhile.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

OPSETS = {"": (23, 24), "com.microsoft": (1,)}  # of our graphs
PROVIDER = "CUDAExecutionProvider"
SHIM = "libonnxruntime_providers_tensorrt.so"
# TensorProto.DataType of the inputs that are tried.
OTHER = {"float16": 10, "int64": 7, "int32": 6, "bool": 9}
# Inputs of operators whose kernels may want some of them in host memory: element type and shape,
# None for one that is left out; further attributes.
HALF, INDEX = ("float16", (4, 4)), ("int64", (4, 4))
SCALAR, ONE, TWO = ("int64", ()), ("int64", (1,)), ("int64", (2,))
HEADS, CACHE = ("float16", (1, 2, 3, 16)), ("float16", (1, 1, 8, 16))
TRIED: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    "ConstantOfShape": ([TWO], {}),
    "CumSum": ([HALF, SCALAR], {}),
    "Expand": ([("float16", (1, 4)), TWO], {}),
    "Gather": ([HALF, TWO], {}),
    "GatherElements": ([HALF, INDEX], {}),
    "GatherND": ([HALF, ("int64", (2, 1))], {}),
    "OneHot": ([("int64", (4,)), SCALAR, ("float16", (2,))], {}),
    "Pad": ([HALF, TWO, ("float16", ()), ONE], {}),
    "Range": ([SCALAR, SCALAR, SCALAR], {}),
    "ReduceMax": ([HALF, ONE], {}),
    "ReduceMin": ([HALF, ONE], {}),
    "ReduceSum": ([HALF, ONE], {}),
    "Reshape": ([HALF, TWO], {}),
    "RotaryEmbedding": ([HEADS, ("float16", (9, 8)), ("float16", (9, 8)), ("int64", (1, 3))], {}),
    "ScatterElements": ([HALF, INDEX, HALF], {}),
    "Slice": ([HALF, ONE, ONE, ONE, ONE], {}),
    "Split": ([HALF, TWO], {}),
    "Squeeze": ([("float16", (4, 1)), ONE], {}),
    "TensorScatter": ([("float16", (2, 2, 8, 4)), ("float16", (2, 2, 1, 4)), TWO], {"axis": 2}),
    "Tile": ([HALF, TWO], {}),
    "TopK": ([HALF, ONE], {}),
    "Trilu": ([HALF, SCALAR], {}),
    "Unsqueeze": ([("float16", (4,)), ONE], {}),
    "Where": ([("bool", (4,)), ("float16", (4,)), ("float16", (4,))], {}),
    "GroupQueryAttention": (
        [
            *(("float16", (1, 1, 32)), *[("float16", (1, 1, 16))] * 2, CACHE, CACHE),
            *(("int32", (1,)), ("int32", ()), *[("float16", (8, 8))] * 2),
        ],
        {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1},
    ),
    "MoE": (
        [
            *(("float16", (2, 16)), ("float16", (2, 4)), ("float16", (4, 64, 16))),
            *(None, ("float16", (4, 16, 32))),
        ],
        {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1},
    ),
}
# If cannot be tried with one node; GRU needs cuDNN, which the dry run lacks.
ALSO = {"If": [0], "GRU": [4]}
OUTPUTS = {"Shape": [0], "Size": [0]}  # kernels whose outputs are in host memory
# ONNX Runtime does not list the schema of this operator.
SCATTER = (["T", "T", "tensor(int64)"], ["T"])


def rows() -> list[list[Any]]:
    """Return [domain, operator, version, input types, output types, kernels, inputs in host memory,
    outputs in host memory] for each operator.

    Types name a type parameter or an element type. A kernel gives the element types of each
    parameter.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as states

    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in states.get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    kernels: dict[tuple[str, str], list[Any]] = {}
    for kernel in states.get_all_opkernel_def():
        if kernel.provider == PROVIDER and kernel.domain in OPSETS:
            kernels.setdefault((kernel.domain, kernel.op_name), []).append(kernel)
    table = []
    for (domain, operator), listed in sorted(kernels.items()):
        versions = schemas.get((domain, operator), {24: None})
        last = (max((v for v in versions if v <= opset), default=0) for opset in OPSETS[domain])
        for version in sorted(set(last)):
            of = [k for k in listed if k.version_range[0] <= version <= k.version_range[1]]
            if of:
                types, host = _types(versions[version]), host_inputs(domain, operator)
                memory = host, OUTPUTS.get(operator, [])
                table.append([domain, operator, version, *types, _merged(of), *memory])
    return table


def _types(schema: Any) -> tuple[list[str], list[str]]:
    """Return the types of inputs and outputs; "..." repeats the one before it."""
    if schema is None:
        return SCATTER
    takes, gives = ([_short(one.typeStr) for one in of] for of in (schema.inputs, schema.outputs))
    variadic = schema.inputs and str(schema.inputs[-1].option).endswith("Variadic")
    return [*takes, *(["..."] if variadic else [])], gives


def _merged(kernels: Sequence[Any]) -> list[dict[str, str]]:
    """Return the element types of kernels, by type parameter; kernels with one parameter are
    merged.
    """
    merged: list[dict[str, list[str]]] = []
    for kernel in kernels:
        constraints = kernel.type_constraints.items()
        types = {name: sorted(map(_short, kinds)) for name, kinds in constraints}
        same = [other for other in merged if len(types) == 1 and other.keys() == types.keys()]
        for other in same:
            other.update({name: sorted({*other[name], *kinds}) for name, kinds in types.items()})
        merged += [types] if not same and types not in merged else []
    return [{name: " ".join(kinds) for name, kinds in types.items()} for types in merged]


def _short(kind: str) -> str:
    return kind.removeprefix("tensor(").removesuffix(")") if kind.startswith("tensor(") else kind


def host_inputs(domain: str, operator: str) -> list[int]:
    """Return the inputs that a kernel wants in host memory: those that ONNX Runtime copies there
    if a node on the device makes each of them.
    """
    import onnx
    import onnxruntime

    of_microsoft = operator in ("GroupQueryAttention", "MoE")
    if operator not in TRIED or domain != ("com.microsoft" if of_microsoft else ""):
        return ALSO.get(operator, []) if not domain else []
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory() as temporary:
        options.optimized_model_filepath = f"{temporary}/partitioned.onnx"
        model = _graph_of(domain, operator)
        onnxruntime.InferenceSession(model, options, providers=[PROVIDER], enable_fallback=0)
        nodes = onnx.load(options.optimized_model_filepath).graph.node
    copied = {node.output[0] for node in nodes if node.op_type == "MemcpyToHost"}
    (inputs,) = [node.input for node in nodes if node.op_type == operator]
    return [index for index, tensor in enumerate(inputs) if tensor in copied]


def _graph_of(domain: str, operator: str) -> bytes:
    """Return a graph in which a Cast makes every input of the operator."""
    from onnx import helper

    given, attributes = TRIED[operator]
    names, nodes, sources = [], [], []
    for index, value in enumerate(given):
        names.append(f"on_device_{index}" if value else "")
        if value:
            source, (kind, shape) = f"given_{index}", value
            other = OTHER["int32" if kind != "int32" else "int64"]
            sources.append(helper.make_tensor_value_info(source, other, shape))
            nodes.append(helper.make_node("Cast", [source], [names[-1]], to=OTHER[kind]))
    count = {"GroupQueryAttention": 3, "Split": 2, "TopK": 2}.get(operator, 1)
    outputs = [f"output_{index}" for index in range(count)]
    nodes.append(helper.make_node(operator, names, outputs, domain=domain, **attributes))
    kind = OTHER.get("int64" if operator == "Range" else "float16")
    kinds = [1 if operator == "ConstantOfShape" else kind, OTHER["int64"]]
    if operator != "TopK":
        kinds[1] = kinds[0]
    each = [(name, kinds[min(index, 1)]) for index, name in enumerate(outputs)]
    described = [helper.make_tensor_value_info(name, kind, None) for name, kind in each]
    opsets = [helper.make_opsetid(name, versions[-1]) for name, versions in OPSETS.items()]
    graph = helper.make_graph(nodes, operator, sources, described)
    return helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()


def main(file: Path) -> None:
    import onnxruntime

    listed = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows())
    text = f'{{"onnxruntime":"{onnxruntime.__version__}",\n"rows":[\n{listed}\n]}}\n'
    file.write_text(text, encoding="utf-8")
    os._exit(0)  # the shim cannot be unloaded


def with_shim(file: Path) -> None:
    """Run `main` in another process while the shim is in its place."""
    workdir = Path(os.environ["DRY_RUN"])
    place = workdir / "site/onnxruntime/capi" / SHIM
    shutil.copy(workdir / "stub/tensorrt_shim.so", place)
    command = [sys.executable, "-m", "tests.cuda_dry_run.tables", str(file), "inside"]
    try:
        subprocess.run(command, check=True)
    finally:
        place.unlink()


if __name__ == "__main__":
    (main if len(sys.argv) > 2 else with_shim)(Path(sys.argv[1]))
