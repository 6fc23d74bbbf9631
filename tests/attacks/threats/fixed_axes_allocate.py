"""Allocate 2^40 numbers for an input whose axes are fixed."""

from pathlib import Path

import onnx

from tests.attacks.grammar import _onnx

COMMANDS = ("audit",)


def write(folder: Path, trace: Path) -> Path:
    model = _onnx()
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = 2**20
        value.type.tensor_type.shape.dim[1].dim_value = 2**20
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path
