"""Calls of the operator without ONNX Runtime, by calls.cpp: of builds with sanitizers, and for
other processors.
"""

import os
import subprocess
from pathlib import Path
from typing import Any, Iterable, Sequence

import numpy as np
from onnx import helper

from tests.kernels.calls import NAMES

SOURCE = Path(__file__).parents[2] / "packages" / "kernels" / "source"
Call = tuple[dict[str, np.ndarray], dict[str, Any]]  # inputs and attributes
Answer = str | list[np.ndarray]  # text of an error, or outputs


def linked(program: Path, compiler: Sequence[str], parts: Iterable[Path]) -> Path:
    """Link the program with object files or sources of the operator, and return it."""
    command = [*compiler, "-std=c++17", f"-I{SOURCE}", str(Path(__file__).with_name("calls.cpp"))]
    command += [*map(str, parts), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    return program


def answers(program: Sequence[str], calls: Sequence[Call], folder: Path, **environment: str) -> Any:
    """Return the outputs y, keys, values and row_weights of each call, or the text of its error."""
    files = [str(folder / name) for name in ("calls.bin", "answers.bin")]
    Path(files[0]).write_bytes(b"".join(_serialised(call) for call in calls))
    done = subprocess.run(
        [*program, *files], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000] + done.stderr[-4000:]
    content = memoryview(Path(files[1]).read_bytes())
    results: list[Answer] = []
    for feeds, _ in calls:
        result, content = _answer(content, feeds["past_key"].dtype)
        results.append(result)
    assert not content
    return results


def _words(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


def _serialised(call: Call) -> bytes:
    feeds, attributes = call
    parts = [_words(helper.np_dtype_to_tensor_dtype(feeds["past_key"].dtype), len(attributes))]
    for name, value in attributes.items():
        stored = _words(value) if isinstance(value, int) else np.float64(value).tobytes()
        parts.append(name.encode().ljust(32, b"\0") + _words(isinstance(value, int)) + stored)
    parts.append(_words(len(NAMES)))
    for array in map(feeds.get, NAMES):
        if array is None:
            parts.append(_words(-1))
            continue
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        parts += [_words(array.ndim, kind, *array.shape), np.ascontiguousarray(array).tobytes()]
    return b"".join(parts)


def _answer(content: memoryview, cache: np.dtype) -> tuple[Answer, memoryview]:
    """Return the first answer of a file, and what follows it."""

    def numbers(dtype: Any, count: int) -> np.ndarray:
        nonlocal content
        size = np.dtype(dtype).itemsize * count
        array, content = np.frombuffer(content[:size], dtype), content[size:]
        return array

    outputs: list[np.ndarray] = []
    for dtype in (np.float32, cache, cache, np.float32):
        (rank,) = numbers(np.int64, 1)
        if rank < 0:
            return numbers(np.uint8, *numbers(np.int64, 1)).tobytes().decode(), content
        shape = numbers(np.int64, rank)
        outputs.append(numbers(dtype, int(np.prod(shape))).reshape(shape))
    return outputs, content
