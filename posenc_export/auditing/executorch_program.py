"""Programs of ExecuTorch, called with arrays by name as graphs in ONNX are."""

import json
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Set, Tuple

import numpy as np

from posenc_export.auditing.graph import Arrays, source_of
from posenc_export.auditing.inputs import NotPossible, Value
from posenc_export.runtime.session.errors import GraphError
from posenc_export.shared.foreign import brief
from posenc_export.shared.refusal import refusal

UNUSED = "_sliding_window_tensor"  # of caches of transformers, which nothing reads
NAMES = "export.json"  # in which transformers' exporter keeps the names beside a program
DTYPES = {4: "int64", 5: "float16", 6: "float32", 11: "bool", 15: "bfloat16"}  # by torch's number
LEAST = 64  # to which transformers bounds sizes that it leaves open, or to more
OPEN = {2: ("batch", "sequence"), 3: ("batch", "sequence", -1), 4: ("batch", -1, "past length", -1)}


def executorch_method(method: Any, given: List[str], names: List[str]) -> Any:
    """Take a method, and the names of its inputs and outputs. Return it, and run."""
    import torch

    def run(inputs: Mapping[str, np.ndarray]) -> Arrays:
        arrays = [torch.from_numpy(np.array(inputs[name])) for name in given]
        # numpy gives empty arrays strides of 0, at which ExecuTorch ends the process.
        flat = [array.clone(memory_format=torch.contiguous_format) for array in arrays]
        results = method.execute(flat)
        return {name: value.numpy().copy() for name, value in zip(names, results, strict=True)}

    return method, run


class ExecutorchProgram:
    """The method `forward` of a program (.pte) on the CPU. Without export.json beside it, inputs
    and outputs have numbers as names, and every size is fixed.

    Attributes: as for Graph.
    """

    needs = "executorch"
    rounded = ""

    def __init__(self, path: Path) -> None:
        try:
            from executorch.runtime import Runtime
        except ModuleNotFoundError:
            rule, got = "the package executorch for a program of ExecuTorch", "none"
            raise refusal("audit", rule, got, "pip install executorch") from None
        self.operators: Set[str] = set()
        try:
            method: Any = Runtime.get().load_program(path).load_method("forward")
        except (RuntimeError, ValueError) as error:
            rule, got = "a program of ExecuTorch with a method forward", f"{path}: {brief(error)}"
            raise refusal("audit", rule, got, "give another file") from None
        meta = method.metadata
        inputs = [meta.input_tensor_meta(at) for at in range(meta.num_inputs())]
        outputs = [meta.output_tensor_meta(at) for at in range(meta.num_outputs())]
        given, names, dynamic = _names(path.with_name(NAMES), len(inputs), len(outputs))
        self.sizes = {name: value.sizes() for name, value in zip(given, inputs, strict=True)}
        self.inputs = [_value(*pair, dynamic) for pair in zip(given, inputs, strict=True)]
        self.outputs = [_value(*pair, dynamic) for pair in zip(names, outputs, strict=True)]
        self.unread = {name for name in given if name.endswith(UNUSED)}
        self.precision = self.outputs[0].dtype
        _, self._run = executorch_method(method, given, names)
        opened = 'Runtime.get().load_program(path).load_method("forward")'
        code = source_of(executorch_method, opened, given, names)
        self.code = f"from executorch.runtime import Runtime\n\n\n{code}"

    def run(self, feeds: Mapping[str, np.ndarray]) -> Arrays:
        """Run the program. Raise NotPossible beyond the sizes for which it has memory, or
        GraphError if it fails.
        """
        for name, sizes in self.sizes.items():
            if any(size > most for size, most in zip(feeds[name].shape, sizes, strict=True)):
                raise NotPossible(f"the program has memory for {name} of up to {list(sizes)}")
        try:
            return dict(self._run(feeds))
        except RuntimeError as error:
            raise GraphError(error) from error


def _value(name: str, meta: Any, dynamic: bool) -> Value:
    """Return an input or output. Its sizes are the largest ones: in a program with open sizes,
    those of heads and those below LEAST are fixed.
    """
    sizes = meta.sizes()
    names = OPEN.get(len(sizes), sizes) if dynamic else sizes
    known = zip(names, sizes, strict=True)
    axes = tuple(size if axis == -1 or size < LEAST else axis for axis, size in known)
    return Value(name, DTYPES.get(meta.dtype(), str(meta.dtype())), axes)


def _names(file: Path, inputs: int, outputs: int) -> Any:
    """Return names of inputs and outputs, and whether sizes are open."""
    if file.is_file():
        (component,) = json.loads(file.read_text("utf-8"))["components"].values()
        told = component["metadata"]
        given = [*_leaves(json.loads(told["in_spec"])[1]["children_spec"][1], "")]
        names = [*_leaves(json.loads(told["out_spec"])[1], "")]
        if len(given) == inputs and len(names) == outputs:
            return given, names, bool(told["export_config"].get("dynamic"))
    numbers = (("input", inputs), ("output", outputs))
    return *([f"{kind}_{at}" for at in range(count)] for kind, count in numbers), False


def _leaves(spec: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the names of the leaves of a tree that treespec_dumps of torch's pytree wrote."""
    children, context = spec["children_spec"], json.loads(spec["context"] or "null")
    if not children and spec["type"] is None:
        yield name
    keys = context if isinstance(context, list) else [*range(len(children))]
    if isinstance(context, dict):  # an object of transformers, with paths to its tensors
        keys = [path for _, path in sorted(_tensors(context, ""))]
    for key, child in zip(keys, children, strict=True):
        yield from _leaves(child, f"{name}.{key}" if name else str(key))


def _tensors(part: Any, path: str) -> Iterator[Tuple[int, str]]:
    """Yield number and path of each tensor of an object that transformers described."""
    items = enumerate(part) if isinstance(part, list) else part.items()
    for key, value in items:
        own = path if key == "s" else f"{path}.{key}".removeprefix(".")
        if isinstance(value, dict) and value.get("_t") == "tensor":
            yield value["i"], own
        elif isinstance(value, (dict, list)):
            yield from _tensors(value, own)
