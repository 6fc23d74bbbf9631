"""Graphs whose weights the tools of ONNX Runtime round."""

from pathlib import Path
from typing import Any, Callable

import onnx
from onnxruntime.quantization import QuantType, matmul_nbits_quantizer, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16


def dynamic(graph: Path, output: Path) -> None:
    """Round weights and activations of products and tables to 8 bits."""
    quantize_dynamic(graph, output, weight_type=QuantType.QUInt8, per_channel=True)


def blocks(graph: Path, output: Path) -> None:
    """Round weights of products to 4 bits in blocks of 32."""
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(onnx.load(graph), 4, 32, False)
    quantizer.process()
    onnx.save(quantizer.model.model, output)


def halves(graph: Path, output: Path) -> None:
    """Compute in float16, caches included."""
    onnx.save(convert_float_to_float16(onnx.load(graph), keep_io_types=False), output)


def linear(graph: Path, output: Path) -> None:
    """Round weights to 8 bits, which DequantizeLinear widens."""
    import numpy as np
    from onnx import helper, numpy_helper

    model = onnx.load(graph)
    for tensor in list(model.graph.initializer):
        numbers = numpy_helper.to_array(tensor)
        if numbers.dtype != np.float32 or numbers.ndim != 2 or numbers.size < 64:
            continue
        scale = np.float32(np.abs(numbers).max() / 127)
        codes, name = np.round(numbers / scale).astype(np.int8), tensor.name
        model.graph.initializer.remove(tensor)
        for part, array in ((f"{name}.codes", codes), (f"{name}.scale", scale)):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), part))
        inputs = [f"{name}.codes", f"{name}.scale"]
        model.graph.node.insert(0, helper.make_node("DequantizeLinear", inputs, [name]))
    onnx.save(model, output)


Round = Callable[[Path, Path], Any]
FORMATS: dict[str, Round] = {
    "dynamic 8 bits": dynamic, "blocks of 4 bits": blocks, "float16": halves, "8 bits": linear,
}  # fmt: skip
