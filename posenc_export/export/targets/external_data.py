"""External data: large tensors are written to model.onnx.data, hashed and referenced."""

from pathlib import Path
from typing import Callable, Iterable, Iterator, Optional

import numpy as np
import onnx_ir as ir

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact.records import File
from posenc_export.runtime.artefact.rules import WEIGHTS
from posenc_export.shared.progress import Steps

# Bytes, as in onnx.save_model; smaller tensors stay in the graph, where shape inference reads
# shapes, indices and scalars.
SMALL = 1024
PAGE = 4096  # bytes; tensors are page-aligned, so that each can be mapped into memory separately
BLOCK = 16 << 20  # bytes per copy of a tensor that is not contiguous in memory


def move_out(graph: ir.Graph, folder: Path, counted: Callable[[int, str], Steps]) -> Optional[File]:
    """Move initialisers of at least SMALL bytes to folder/model.onnx.data, in graph order and
    page-aligned, and reference them from the graph.

    Args:
        counted: returns the report of a number of steps, from the number and what they are.

    Returns:
        The manifest's entry of the file, or None if no initialiser is large enough and no file was
        written.
    """
    large = [
        value
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.nbytes >= SMALL
    ]
    if not large:
        return None
    steps = counted(len(large), "tensors")
    with files.writing(folder / WEIGHTS) as stream:
        for value in large:
            tensor = value.const_value
            assert tensor is not None and value.name is not None
            stream.align(PAGE)
            offset = stream.bytes
            packed = tensor.dtype.bitwidth < 8  # tobytes packs 4-bit numbers in pairs
            for block in [memoryview(tensor.tobytes())] if packed else blocks(tensor.numpy()):
                stream.write(block)
            length, shape = stream.bytes - offset, ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                WEIGHTS, offset, length, tensor.dtype, shape=shape, name=value.name, base_dir=folder
            )
            steps.advance()
    return stream.entry()


def blocks(array: np.ndarray) -> Iterator[memoryview]:
    """Yield little-endian bytes in row-major order, without a copy of memory in this form."""
    parts: Iterable[np.ndarray] = [array]
    if array.ndim and not array.flags.c_contiguous:
        rows = max(1, BLOCK * len(array) // max(array.nbytes, 1))
        parts = (array[first : first + rows] for first in range(0, len(array), rows))
    for part in parts:
        flat = np.ascontiguousarray(part, part.dtype.newbyteorder("<")).reshape(-1)
        yield flat.view(np.uint8).data
