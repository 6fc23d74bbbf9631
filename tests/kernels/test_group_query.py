"""CachedAttention beside GroupQueryAttention of ONNX Runtime, which has the same inputs, at edges
of lengths and windows.
"""

from typing import Any, Dict, Tuple

import numpy as np
import pytest

from tests.kernels.calls import Case, built, model, session

pytestmark = built
MICROSOFT = "com.microsoft"


def _both(case: Case) -> Tuple[np.ndarray, np.ndarray]:
    """Return the outputs of both operators for the same call."""
    feeds = {k: v for k, v in case.feeds.items() if k != "cache_position"}
    feeds = {k: np.nan_to_num(v) if k.startswith("past") else v for k, v in feeds.items()}
    longest = np.array(feeds["seqlens_k"].max() + 1, np.int32)
    feeds["total_sequence_length"] = longest
    node: Dict[str, Any] = {"do_rotary": int("rotation" in case.kinds), **case.node}
    if case.cache == "int8":
        node |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        node |= {"kv_cache_bit_width": 8}
    (y,) = session(model(feeds, node, MICROSOFT)).run(["y"], feeds)
    return case.run()[0], y


@pytest.mark.parametrize("cache", ["float32", "int8"])
@pytest.mark.parametrize("window", [-1, 1, 8, 255, 256, 257])
@pytest.mark.parametrize("length", [1, 8, 9, 255, 256, 257, 512, 513])
def test_a_step_agrees_at_edges(length: int, window: int, cache: str) -> None:
    attributes = {"local_window_size": window, "scale": 0.3}
    # Rotated keys may be rounded to another code.
    kinds = () if cache == "int8" else ("rotation", "sinks")
    case = Case(size=64, cached=(length - 1, 0), counts=(1, 1), kinds=kinds,
                attributes=attributes, cache=cache)  # fmt: skip
    y, other = _both(case)
    assert np.abs(y - other).max() <= 2e-5


@pytest.mark.parametrize("cached", [0, 1, 255, 256, 700])
@pytest.mark.parametrize("counts", [2, 17, 65])
def test_tokens_over_a_cache_agree(cached: int, counts: int) -> None:
    for kinds in (("rotation", "interleaved"), ("rotation", "partial"), ("bias",), ("sinks",)):
        case = Case(size=64, cached=(cached,), counts=(counts,), kinds=kinds,
                    attributes={"softcap": 5.0} if kinds == ("sinks",) else {})  # fmt: skip
        if "bias" in kinds:  # of exactly the keys of the call
            bias = case.feeds["attention_bias"][..., : cached + counts]
            case.feeds["attention_bias"] = np.ascontiguousarray(bias)
        y, other = _both(case)
        assert np.abs(y - other).max() <= 2e-5
