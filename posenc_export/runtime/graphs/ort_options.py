"""Which execution provider of ONNX Runtime runs an artefact, and with which options."""

import functools
import warnings
from pathlib import Path
from typing import Any, Collection, Sequence

import numpy as np
import onnxruntime

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda, kernel_library, providers
from posenc_export.runtime.graphs.onnx_files import NEWER, older, version
from posenc_export.runtime.graphs.onnx_nodes import Nodes
from posenc_export.runtime.graphs.onnx_parts import constant, new_node, opened, serialised
from posenc_export.shared.refusal import refusal

# SkipLayerNormalization takes 1.7 to 7 times as long on a CPU as the Add and LayerNormalization
# that it replaces (ONNX Runtime 1.31, widths 256 to 1536).
SLOWER = {"cpu": ["SkipLayerNormFusion"], "cuda": []}
# Ends the process on a Transpose of float16 before a product (onnxruntime issue 28392).
CRASHES = {"float16": ["NchwcTransformer"]}
# For DequantizeLinear before MatMul: 4-bit products that do not round activations. For 8 bits they
# are slow, and weights are dequantized when they are loaded instead.
FOUR_BITS = ("session.qdq_matmulnbits_accuracy_level", "0")
EIGHT_BITS = ("session.disable_quant_qdq", "1")
# Products of half precision and few bits by the kernels of TensorRT-LLM, where N, K and the block
# allow it; ONNX Runtime's own otherwise.
MIXED_PRODUCTS = ("ep.cuda.fpa_intb_gemm", "1")
INTEGERS = "MatMulIntegerToFloat"  # exact sums of products of unsigned with signed bytes
EXACT = ("session.x64quantprecision", "1")  # products of unsigned bytes, which take longer
SINCE = "1.30"  # version of ONNX Runtime; with EXACT, earlier ones abort the process
SIZE, TOKENS = 64, (1, 4)  # of the products that are tried; one token has kernels of its own
PROVIDERS = {"cpu": ("CPUExecutionProvider", {}), "cuda": (cuda.NAME, cuda.OPTIONS)}


def choose_provider(name: str, manifest: Manifest) -> str:
    """Return the provider for an artefact: "cpu" or "cuda". Raise ValueError if machine or
    artefact lack what it needs.

    "auto" chooses cuda if this ONNX Runtime is built with it and both machine and artefact can run
    it. The first artefact that only the machine keeps from it causes a warning that says why.
    """
    present, rule = onnxruntime.get_available_providers(), "runtime: expected"
    host_only = providers.host_only(manifest)
    if name == "cpu" or (name == "auto" and (host_only or cuda.NAME not in present)):
        if manifest.dtype == "bfloat16":
            remedy = "load it on a machine that runs cuda, or export dtype float16"
            raise ValueError(f"{rule} provider cuda for an artefact in bfloat16, got cpu; {remedy}")
        return "cpu"
    if host_only:
        remedy = "export target onnx-static, or ort-cuda for half precision"
        raise ValueError(f"{rule} provider cpu for {host_only}, got {name}; {remedy}")
    missing = cuda.obstacle() or cuda.cudnn_obstacle(manifest)
    if missing is None:
        return "cuda"
    got = f"got {missing.cause}; {missing.remedy}"
    if name == "cuda" or manifest.dtype == "bfloat16":
        raise ValueError(f"{rule} a machine that can run provider cuda, {got}")
    _warn_once(f"runtime: provider auto chose cpu, because provider cuda cannot run here: {got}")
    return "cpu"


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=5)  # at the call of `load`


def session_options(manifest: Manifest, threads: int | None) -> Any:
    """Return the options that run an artefact. threads: per operator; None uses all cores. Raise
    ModuleNotFoundError for operators that are not installed.
    """
    entries = []
    if manifest.target == "ort-cuda" and manifest.weights is not None:
        entries.append(MIXED_PRODUCTS)
    elif manifest.weights is not None and manifest.weights.activations == "float32":
        entries.append(in_float32(4 if manifest.weights.format.startswith("int4") else 8))
    own = {kernel_library.OPERATOR, kernel_library.PRODUCT}
    native = manifest.target == kernel_library.TARGET and not own.isdisjoint(manifest.operators)
    return options_of(manifest.operators, entries, threads, native)


def in_float32(bits: int) -> tuple[str, str]:
    """Return the entry with which products of few bits do not round activations."""
    return FOUR_BITS if bits == 4 else EIGHT_BITS


def options_of(
    operators: Collection[str],
    entries: Sequence[tuple[str, str]],
    threads: int | None,
    native: bool,
) -> Any:
    """Return the options that run some operators, with entries of the configuration (see
    `session_options`). native: whether some are of the library of packages/kernels.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Under ALiBi, attention weights of distant keys are below 1e-38. As subnormal numbers they slow
    # the product with the values by 1.7x at 8192 keys.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    keep_exact(options, operators)
    for entry in entries:
        options.add_session_config_entry(*entry)
    if native:
        kernel_library.register(options)
    if threads:
        options.intra_op_num_threads = threads
    return options


def keep_exact(options: Any, operators: Collection[str]) -> None:
    """Let a session compute exact sums in MatMulIntegerToFloat, if it is one of the operators of
    its graph: with the option, ONNX Runtime 1.31 cannot run DequantizeLinear of int8 weights with a
    scale for each output.

    Raises:
        ValueError: an ONNX Runtime older than SINCE.
    """
    if INTEGERS in operators and saturates():
        if older(SINCE):
            rule = f"ONNX Runtime {SINCE} or newer for {INTEGERS} without VNNI"
            raise refusal("runtime", rule, version(), NEWER)
        options.add_session_config_entry(*EXACT)


@functools.cache
def saturates() -> bool:
    """Return whether ONNX Runtime limits sums of two products to 16 bits here, as the instruction
    vpmaddubsw does that it chooses for processors with AVX2 or AVX-512 and without VNNI.
    """
    numbers: dict[str, np.ndarray] = {
        "w": np.full((SIZE, SIZE), 127, np.int8),
        "one": np.ones(1, np.float32),
        "point": np.zeros(1, np.uint8),
    }
    constants = {name: constant(name, array) for name, array in numbers.items()}
    graph = Nodes(constants=constants, opsets={"": 21, "com.microsoft": 1})
    names = ["x", "w", "one", "one", "point"]
    node = new_node(INTEGERS, names, ["y"], domain="com.microsoft")
    session = opened(serialised(graph, [node], ["y"], free={"x": "uint8"}), Path("."))
    largest = [np.full((tokens, SIZE), 255, np.uint8) for tokens in TOKENS]
    return any((session.run(None, {"x": x})[0] != SIZE * 255 * 127).any() for x in largest)
