"""The conformance suite: which kernels of this machine keep their contracts.

ONNX Runtime and the library of packages/kernels are tried once for each geometry, version and
processor. What was found right is kept on this machine, in a folder of the user.
"""

import functools
import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

import msgspec
import numpy as np
import onnxruntime

from posenc_export.runtime.artefact import files, machine
from posenc_export.runtime.graphs import kernel_library
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.graphs.onnx_nodes import Node
from posenc_export.runtime.graphs.onnx_parts import constant
from posenc_export.runtime.verification import constants
from posenc_export.runtime.verification.conformance.operators import CONTRACTS
from posenc_export.runtime.verification.conformance.trial import (
    Kernel,
    Stored,
    Trial,
    Values,
    worst,
)

LISTED = Path(__file__).with_name("listed.json")
HERE = Path(__file__).parent


class Result(NamedTuple):
    """What a trial of a kernel found.

    Args:
        worst: largest error over its bound.
        failure: what is wrong with the kernel; empty for nothing.
        missing: why the kernel cannot run here; empty if it can.
        seconds: of the trial.
        known: whether the result was kept by an earlier trial.
    """

    kernel: Kernel
    worst: float = 0.0
    failure: str = ""
    missing: str = ""
    seconds: float = 0.0
    known: bool = False


def results(kernels: Iterable[Kernel], again: bool = False) -> Iterator[Result]:
    """Yield the result of each kernel, kept or found now. again: try those that are kept."""
    for kernel in kernels:
        key, start = key_of(kernel), time.perf_counter()
        before = None if again else known(key)
        if before is not None:
            yield Result(kernel, before, known=True)
            continue
        try:
            ratio, failure = worst(trial(kernel))
        except (ValueError, ModuleNotFoundError) as refused:
            yield Result(kernel, missing=str(refused))
            continue
        except load_errors() as error:
            ratio, failure = float("inf"), f"refused: {' '.join(str(error).split())[:300]}"
        if not failure:
            keep(key, ratio)
        yield Result(kernel, ratio, failure, seconds=time.perf_counter() - start)


def listed() -> list[Kernel]:
    """Return kernels of the operators of all targets, in small geometries: what the exporter writes
    for tiny models.
    """
    return msgspec.json.decode(LISTED.read_bytes(), type=list[Kernel])


def trial(kernel: Kernel) -> Trial:
    """Draw the constants of a kernel, and the inputs of calls at its edges; the same ones each
    time.
    """
    random = np.random.default_rng(0)
    values: Values = {value.name: _drawn(random, value) for value in kernel.constants}
    codes = max(values.values(), key=np.size, default=np.zeros(0))
    if codes.size > 1 and codes.dtype.kind in "iu":  # of the first two outputs, extreme ones
        outputs = np.moveaxis(codes, 0 if codes.ndim == 3 else -1, 0)
        outputs[:1], outputs[1:2] = codes.max(), codes.min()
    nodes = [step.node for step in kernel.nodes]
    constants = [constant(v.name, values[v.name], v.element) for v in kernel.constants]
    for node in nodes[:-1]:
        if values.keys() >= {*node.inputs}:
            values[node.outputs[0]] = _folded(node, [values[name] for name in node.inputs])
    case = CONTRACTS[kernel.operator].case(kernel, nodes[-1], values)
    return Trial(kernel, nodes, constants, case)


def _folded(node: Node, values: list[np.ndarray]) -> np.ndarray:
    """Return what a node computes from constants."""
    if node.operator == "Reshape":
        return values[0].reshape(values[1].tolist())
    if node.operator == "DequantizeLinear":
        codes, scales, *zeros = values
        how = node.attributes["axis"], node.attributes.get("block_size", 0), "float64"
        return constants.dequantized(codes, scales, zeros[0] if zeros else None, *how)
    return constants.FOLDED[node.operator](node, *values)


def _drawn(random: np.random.Generator, value: Stored) -> np.ndarray:
    """Return the numbers of a constant; integers have the whole range."""
    dtype = {"float": "float32", "int4": "int8", "uint4": "uint8"}.get(value.element, value.element)
    if value.values:
        return np.array(value.values, dtype).reshape(value.shape)
    if "float" in dtype:
        return (random.standard_normal(value.shape) / 64).astype(dtype)
    bits = int(value.element.lstrip("uint"))
    least = -(1 << (bits - 1)) if value.element.startswith("int") else 0
    return random.integers(least, least + (1 << bits), value.shape).astype(dtype)


def folder() -> Path:
    """Return the folder of results. Raise OSError without a home."""
    return files.cache_folder() / "kernels"


def key_of(kernel: Kernel) -> str:
    """Return what a result depends on: the geometry, the code of contracts, the runtime, and the
    processor. Nothing of it comes from an artefact but the geometry.
    """
    native = kernel.nodes[-1].domain == kernel_library.DOMAIN
    return "\n".join((repr(kernel), *_here(), *(_library() if native else ())))


@functools.cache
def _here() -> tuple[str, ...]:
    code = hashlib.sha256()
    graphs = Path(kernel_library.__file__).parent
    for path in sorted((*HERE.glob("*.py"), *graphs.glob("*.py"), Path(constants.__file__))):
        code.update(path.read_bytes())
    build = f"onnxruntime {onnxruntime.__version__}, {onnxruntime.get_build_info()}"
    processor = f"{machine.processor()}, {os.cpu_count()} cores: {' '.join(machine.features())}"
    return f"contracts {code.hexdigest()}", build, "CPUExecutionProvider", processor


def _library() -> tuple[str, ...]:
    path, widest = kernel_library.path(), os.environ.get(kernel_library.INSTRUCTIONS, "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path else "none"
    return f"library {digest}", f"instructions {widest}"


def known(key: str) -> float | None:
    """Return the largest error over its bound of a contract that was kept; None if that is not
    known.
    """
    try:
        worst = float(_path(key).read_bytes())
    except (OSError, ValueError):
        return None
    return worst if 0 <= worst <= 1 else None


def keep(key: str, worst: float) -> None:
    """Write the result of a contract that was kept, if the folder can be written."""
    with suppress(OSError):
        folder().mkdir(0o700, parents=True, exist_ok=True)
        files.replace(_path(key), repr(worst).encode())


def _path(key: str) -> Path:
    return folder() / hashlib.sha256(key.encode()).hexdigest()
