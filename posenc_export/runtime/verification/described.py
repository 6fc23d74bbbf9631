"""What the description of a model says about attention: which keys a query sees, and the
attributes of attention nodes (docs/models.md).
"""

import math
from typing import Any, Callable, Dict, List, Mapping

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs.onnx_nodes import Node

Described = Mapping[str, Any]
Index = Callable[[Described, bool, np.ndarray], np.ndarray]
# Attributes of attention nodes that follow from others, or from the shapes of inputs.
FREE = {"do_rotary", "rotary_interleaved", "qk_output", "k_quant_type"}
FREE |= {"v_quant_type", "kv_cache_bit_width"}
# Parameters that a description leaves out if they have these values (posenc_export/encodings).
DEFAULTS: Mapping[str, Described] = {
    "rope_dynamic": {"original_max_positions": 2048},
    "rope_longrope": {"original_max_positions": 4096},
    "shaw": {"left": 16, "right": 16},
    "t5": {"buckets": 32, "max_distance": 128},
    "deberta": {"span": 32, "max_relative": 128},
    "inkling": {"extent": 64},
}


def _t5(part: Described, causal: bool, behind: np.ndarray) -> np.ndarray:
    most = part["max_distance"]
    return np.clip(behind, 0, most) if causal else np.clip(-behind, -most, most) + most


def _shaw(part: Described, causal: bool, behind: np.ndarray) -> np.ndarray:
    return np.clip(-behind, -part["left"], part["right"]) + part["left"]


def _inkling(part: Described, causal: bool, behind: np.ndarray) -> np.ndarray:
    inside = (behind >= 0) & (behind < part["extent"])
    return np.where(inside, behind, part["extent"])


# Encodings that look up rows by the distance of a query and a key, with their index [B,S,T].
INDICES: Mapping[str, Index] = {
    "t5": _t5,
    "shaw": _shaw,
    "inkling": _inkling,
}


def attentions(manifest: Manifest) -> List[Described]:
    """Return the description of the attention of each layer, in order."""
    config = manifest.config
    config = config.get("inside", config)
    if "attention" in config:
        return [config["attention"]]
    return [config["layers"][name]["attention"] for name in config.get("order", [])]


def encodings(manifest: Manifest) -> List[Described]:
    """Return all encodings of a model, those of tokens first."""
    config = manifest.config.get("inside", manifest.config)
    tokens = config.get("tokens", {}).get("encodings", []) or config.get("encodings", [])
    return [*tokens, *(e for part in attentions(manifest) for e in part["encodings"])]


def parameters(manifest: Manifest) -> List[Described]:
    """Return all encodings with the parameters of DEFAULTS that they leave out."""
    return [{**DEFAULTS.get(part["name"], {}), **part} for part in encodings(manifest)]


def causal(manifest: Manifest) -> bool:
    """Return whether no query attends to later tokens."""
    return all(part["sees"]["name"] not in ("both", "near") for part in attentions(manifest))


def has_cache(manifest: Manifest) -> bool:
    """Return whether keys of earlier calls are kept."""
    return any(state.past.endswith(".key") for state in manifest.states)


def visible(attention: Described, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return which keys at positions [B,T] the queries at [B,S] see: [B,S,T]. Those at -1 are no
    keys.
    """
    rule = attention["sees"]
    q, k = queries[:, :, None], keys[:, None, :]
    seen = np.broadcast_to(k >= 0, np.broadcast_shapes(q.shape, k.shape))
    if rule["name"] in ("causal", "window", "chunk"):
        seen = seen & (k <= q)
    if rule["name"] == "window":
        seen = seen & (q - k < rule["size"])
    if rule["name"] == "chunk":
        seen = seen & (q // rule["size"] == k // rule["size"])
    if rule["name"] == "near":
        seen = seen & (np.abs(q - k) <= rule["reach"])
    return seen


def scale(attention: Described) -> float:
    """Return the factor on q k: that of the description, of an encoding that has its own, or 1 /
    sqrt(D).
    """
    size = attention["head_size"]
    if attention["scale"] is not None:
        return float(attention["scale"])
    for encoding in attention["encodings"]:
        name, scores = encoding["name"], encoding.get("scores")
        if name == "deberta":
            terms = 1 if encoding.get("terms") in ("c2p", "p2c") else 2
            return float(1 / math.sqrt((1 + terms) * size))
        if name == "inkling" and scores == "by_size":
            return float(1 / size)
        if name == "t5" and scores in (None, "unscaled"):
            return 1.0
    return float(1 / math.sqrt(size))


def attributes(attention: Described, node: Node, masked: bool) -> Dict[str, Any]:
    """Return the attributes of an attention node that the description determines, by name; None for
    those that it must not have.

    masked: whether the node is given a mask that hides keys.
    """
    expected = {"scale": scale(attention), "softcap": attention["softcap"]}
    heads, kv_heads = attention["heads"], attention["kv_heads"]
    if node.operator == "Attention":
        packed = "q_num_heads" in node.attributes  # otherwise heads are an axis of the inputs
        counts = {"q_num_heads": heads, "kv_num_heads": kv_heads} if packed else {}
        return {**expected, **counts, "is_causal": None}
    rule = attention["sees"]
    window = rule["size"] if rule["name"] == "window" and not masked else None
    counts = {"num_heads": heads, "kv_num_heads": kv_heads}
    return {**expected, **counts, "local_window_size": window, "smooth_softmax": None}
