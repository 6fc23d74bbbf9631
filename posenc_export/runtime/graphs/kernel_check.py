"""Check that the operators of packages/kernels compute attention in the installed ONNX Runtime."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.graphs import kernel_library, onnx_files, onnx_nodes
from posenc_export.runtime.graphs.kernel_library import DISTRIBUTION, DOMAIN, INSTALL, OPERATOR
from posenc_export.runtime.graphs.onnx_parts import new_node, opened, serialised

SIZE, TOKENS, CACHED, CAPACITY = 8, 2, 3, 8
TOLERANCE = 1e-5  # of weighted sums of numbers of size 1 in float32
TYPES = {"q": "float", "last": "int32", "slots": "int64"}  # of inputs beside the caches
PLACES = {"q": 0, "keys": 3, "values": 4, "last": 5, "slots": 15}


def check(cache: str = "") -> None:
    """Run the operator once per process and library, and compare its output. cache: format of
    caches that it must read (CACHE_FORMATS). Raise ModuleNotFoundError without the library,
    ValueError if ONNX Runtime refuses it, it computes something else, or it is older than a cache
    format.
    """
    library = kernel_library.path()
    if library is None:
        raise kernel_library.missing()
    _check(library)
    if cache and cache not in SCALED:
        _check_cache(library, cache)


@functools.cache
def _check_cache(library: Path, dtype: str) -> None:
    try:
        _session(dtype)
    except onnx_files.load_errors():
        rule = f"expected a {DISTRIBUTION} that reads caches in {dtype}"
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
