"""Check that the operators of packages/kernels compute attention in the installed ONNX Runtime."""

import functools
from pathlib import Path
from typing import Any, Callable, Dict

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.graphs import kernel_library, onnx_files, onnx_nodes
from posenc_export.runtime.graphs.kernel_library import (
    DISTRIBUTION,
    DOMAIN,
    INSTALL,
    OPERATOR,
    PRODUCT,
)
from posenc_export.runtime.graphs.onnx_parts import constant, new_node, opened, serialised

SIZE, TOKENS, CACHED, CAPACITY = 8, 2, 3, 8
TOLERANCE = 1e-5  # of weighted sums of numbers of size 1 in float32
TYPES = {"q": "float", "last": "int32", "slots": "int64"}  # of inputs beside the caches
PLACES = {"q": 0, "keys": 3, "values": 4, "last": 5, "slots": 15}


def check(cache: str = "", product: bool = False) -> None:
    """Run the operator once per process and library, and compare its output.

    Args:
        cache: format of caches that it must read (CACHE_FORMATS).
        product: whether the library must have products with weights in few bits.

    Raises:
        ModuleNotFoundError: there is no library.
        ValueError: ONNX Runtime refuses it, it computes something else, or it is too old.
    """
    library = kernel_library.path()
    if library is None:
        raise kernel_library.missing()
    _check(library)
    if cache and cache not in SCALED:
        _check_newer(library, f"reads caches in {cache}", _session, cache)
    if product:
        _check_newer(library, f"has the operator {PRODUCT}", _product)


@functools.cache
def _check_newer(library: Path, what: str, open_one: Callable[..., Any], *how: str) -> None:
    try:
        open_one(*how)
    except onnx_files.load_errors():
        rule = f"expected a {DISTRIBUTION} that {what}"
        got = f"an older one, {library}"
        remedy = f"{INSTALL} --upgrade, or in a source tree make kernels"
        raise ValueError(f"runtime: {rule}, got {got}; {remedy}") from None


@functools.cache
def _check(library: Path) -> None:
    remedy = f"install another version of {DISTRIBUTION} or onnxruntime, or export target ort"
    rule = f"expected {DISTRIBUTION} to compute attention in onnxruntime {onnxruntime.__version__}"
    try:
        error = _error()
    except onnx_files.load_errors() as refused:
        reason = (str(refused).strip() or type(refused).__name__).splitlines()[0]
        raise ValueError(f"runtime: {rule}, got {reason[:300]}; {remedy}") from None
    if not error <= TOLERANCE:
        raise ValueError(f"runtime: {rule}, got an error of {error:.1e}; {remedy}")


def _session(cache: str = "float") -> Any:
    """Open one node with caches of an element type."""
    names = [""] * (max(PLACES.values()) + 1)
    for name, place in PLACES.items():
        names[place] = name
    node = new_node(OPERATOR, names, ["y", "k", "v"], {"num_heads": 1, "kv_num_heads": 1}, DOMAIN)
    graph, free = onnx_nodes.Nodes(opsets={"": 21, DOMAIN: 1}), {**TYPES}
    free |= dict.fromkeys(("keys", "values"), cache)
    return opened(serialised(graph, [node], ["y"], free=free), Path("."))


def _product() -> Any:
    """Open a product with weights of one block."""
    numbers: Dict[str, np.ndarray] = {
        "codes": np.zeros((1, 1, 16), np.uint8),
        "scales": np.ones(1, np.float32),
    }
    constants = {name: constant(name, array) for name, array in numbers.items()}
    graph = onnx_nodes.Nodes(constants=constants, opsets={"": 21, DOMAIN: 1})
    sizes = {"K": 32, "N": 1, "bits": 4, "block_size": 32, "accuracy_level": 4}
    node = new_node(PRODUCT, ["x", *numbers], ["y"], sizes, DOMAIN)
    return opened(serialised(graph, [node], ["y"], free={"x": "float"}), Path("."))


def _error() -> float:
    """Return the error of one call of two tokens after three, with one head."""
    session = _session()
    random = np.random.default_rng(0)
    packed = random.uniform(-1, 1, (1, TOKENS, 3 * SIZE)).astype(np.float32)
    caches = random.uniform(-1, 1, (2, 1, 1, CAPACITY, SIZE)).astype(np.float32)
    feeds = {"q": packed, "keys": caches[0], "values": caches[1]}
    feeds["last"] = np.array([CACHED + TOKENS - 1], np.int32)
    feeds["slots"] = CACHED + np.arange(TOKENS)[None]
    (y,) = session.run(["y"], feeds)
    q, *new = np.split(packed[0].astype(np.float64), 3, axis=1)
    keys, values = (np.concatenate((c[0, 0, :CACHED], x)) for c, x in zip(caches, new, strict=True))
    scores = q @ keys.T * SIZE**-0.5
    later = np.arange(len(keys)) > CACHED + np.arange(TOKENS)[:, None]
    weights = np.where(later, 0, np.exp(scores))
    return float(np.abs(y[0] - weights / weights.sum(1, keepdims=True) @ values).max())
