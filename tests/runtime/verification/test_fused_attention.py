"""The check "attention": GroupQueryAttention alone against attention in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import load
from posenc_export.runtime.graphs import onnx_nodes
from posenc_export.runtime.verification import fused_attention
from tests.cases import combinations
from tests.runtime.verification.test_indices import MASKS, seeing
from tests.tiny import block, decoder
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("indices")
LENGTHS = (1, 2, 7, 8, 9, 10, 11, 32, 64)


def kernel(folder: Path, variant: str, mask: str) -> fused_attention.Kernel:
    """Return the first attention node of a decoder on target ort."""
    config = seeing(decoder(variant, max_positions=64), MASKS[mask])
    export(sources(config), "ort", folder / "a", verify=False)
    graph = onnx_nodes.read(folder / "a" / "model.onnx")
    node = next(node for node in graph.nodes if node.operator in fused_attention.OPERATORS)
    return fused_attention._kernel(graph, node, [16, 16], LENGTHS, "")


@pytest.mark.parametrize(
    ("mask", "variant"), combinations(["causal", "window"], ["rope", "rope-interleaved", "nope"])
)
def test_the_installed_kernel_keeps_its_contract(variant: str, mask: str, tmp_path: Path) -> None:
    assert fused_attention.compared(kernel(tmp_path, variant, mask))[1] == ""


OTHERS: Dict[str, Dict[str, Any]] = {
    "a window one longer": {"local_window_size": 10},
    "a window one shorter": {"local_window_size": 8},
    "no window": {"local_window_size": 0},
    "a scale 1 % off": {"scale": 0.2525},
    "other pairs": {"rotary_interleaved": 1},
    "a softcap": {"softcap": 5.0},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_kernel_that_computes_something_else_is_found(other: str, tmp_path: Path) -> None:
    correct = kernel(tmp_path, "rope", "window")
    described = replace(correct.node, attributes={**correct.node.attributes, **OTHERS[other]})
    # Not from the results of equal kernels.
    compared = fused_attention.compared.__wrapped__
    assert compared(correct)[1] == "" and compared(replace(correct, node=described))[1]


def test_a_cache_of_8_bits_is_compared(tmp_path: Path) -> None:
    model, hidden = seeded(block("rope", max_positions=64)), tmp_path / "hidden.npy"
    np.save(hidden, np.random.default_rng(0).standard_normal((2048, 48)).astype(np.float32))
    options = {"weights": "int8", "cache": "int8", "calibrate": hidden, "verify": False}
    export(model, "ort", tmp_path / "a", **options)
    result = fused_attention.check(tmp_path / "a", load(tmp_path / "a", threads=1))
    assert result.compared > 0 and result.failures == {} and result.skipped == {}
