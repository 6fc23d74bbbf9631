"""The model once more, in float64 numpy, one token and one head at a time: what the eager module is checked against."""

import math
from typing import Any, Callable, Dict, Optional, Sequence, Union

import numpy as np

from posenc_export.encodings.base import Oracle
from posenc_export.models.attention import AttentionBlock
from posenc_export.models.config import AttentionConfig
from posenc_export.models.decoder import Decoder
from posenc_export.models.encoder import Encoder

Weights = Dict[str, np.ndarray]
Places = Sequence[Any]  # a position, or the coordinates, of each token


def full_pass(
    model: Union[Decoder, Encoder, AttentionBlock], inputs: np.ndarray, start: int, grid: Optional[np.ndarray] = None, token_types: Optional[np.ndarray] = None
) -> np.ndarray:
    """One row, no cache: inputs [S] int64 or [S,E] at positions start, start + 1, ..., coordinates grid [axes,S] and segments token_types [S] (all 0 where
    None) to outputs [S,V] or [S,E], float64."""
    weights = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    oracle, positions = model.encoding.oracle(), range(start, start + len(inputs))
    places: Places = positions if grid is None else [tuple(int(p) for p in place) for place in grid.T]
    if isinstance(model, AttentionBlock):
        x = oracle.embed_rows(inputs.astype(np.float64), positions)
        return _attention(weights, "attention.", model.config, oracle, x, positions, places)
    x = oracle.embed_rows(weights["embedding.weight"][inputs], positions)
    if isinstance(model, Encoder):
        return _encoded(model, weights, x + weights["segments.weight"][np.zeros(len(x), np.int64) if token_types is None else token_types], positions, places)
    config = model.config
    for layer in range(config.layers):
        name, oracle = f"layers.{layer}.", model.layers[layer].attention.encoding.oracle()  # type: ignore[union-attr,operator]
        normed = _norm(weights, f"{name}attention_norm", config.norm, config.epsilon, x)
        x = x + _attention(weights, f"{name}attention.", config.attention, oracle, normed, positions, places)
        x = x + _mlp(weights, f"{name}mlp.", config.mlp, _norm(weights, f"{name}mlp_norm", config.norm, config.epsilon, x))
    head = weights["embedding.weight" if config.tied else "head.weight"]
    return _norm(weights, "norm", config.norm, config.epsilon, x) @ head.T


def _encoded(model: Encoder, weights: Weights, x: np.ndarray, positions: range, places: Places) -> np.ndarray:
    """Post-norm layers on embedded tokens x [S,E]."""
    config = model.config
    x = _norm(weights, "norm", "layer", config.epsilon, x)
    for layer in range(config.layers):
        name, oracle = f"layers.{layer}.", model.layers[layer].attention.encoding.oracle()  # type: ignore[union-attr,operator]
        x = _norm(weights, f"{name}attention_norm", "layer", config.epsilon, x + _attention(weights, f"{name}attention.", config.attention, oracle, x, positions, places))
        x = _norm(weights, f"{name}mlp_norm", "layer", config.epsilon, x + _mlp(weights, f"{name}mlp.", "gelu", x))
    return x


def _attention(weights: Weights, name: str, config: AttentionConfig, oracle: Oracle, x: np.ndarray, positions: range, places: Places) -> np.ndarray:
    size, group = config.head_size, config.heads // config.kv_heads
    projected = _linear(weights, f"{name}qkv", x).reshape(len(x), -1, size)
    q, k, v = projected[:, : config.heads], projected[:, config.heads : config.heads + config.kv_heads], projected[:, config.heads + config.kv_heads :]
    q, k = _rotated(oracle.rotate_heads, q, places), _rotated(oracle.rotate_key_heads, k, places)
    oracle.observe(x)
    if config.mechanism == "linear":
        return _linear(weights, f"{name}output", _linear_mix(oracle, projected, places).reshape(len(x), -1))
    mixed = np.zeros((len(x), config.heads, size))
    for head in range(config.heads):
        for i, query in enumerate(positions):
            seen = [j for j in range(len(x)) if j <= i or not config.causal]
            at = [positions[j] for j in seen]
            scores = oracle.scores(head, q[i, head], k[seen, head // group], query, at)
            shares = np.exp(scores - scores.max())
            mixed[i, head] = shares @ oracle.values(head, v[seen, head // group], query, at) / shares.sum()
    return _linear(weights, f"{name}output", mixed.reshape(len(x), -1))


def _linear_mix(oracle: Oracle, projected: np.ndarray, places: Places) -> np.ndarray:
    """Quadratic form: q, k, v [n,3H,D] to [n,H,D]."""
    heads = projected.shape[1] // 3
    q, k = (np.where(part > 0, part + 1, np.exp(np.minimum(part, 0))) for part in (projected[:, :heads], projected[:, heads : 2 * heads]))
    turned_q, turned_k = _rotated(oracle.rotate_heads, q, places), _rotated(oracle.rotate_key_heads, k, places)
    mixed = np.zeros_like(q)
    for head in range(heads):
        for i in range(len(q)):
            shares = np.array([turned_q[i, head] @ turned_k[j, head] for j in range(i + 1)])
            divisor = sum(float(q[i, head] @ k[j, head]) for j in range(i + 1))
            mixed[i, head] = shares @ projected[: i + 1, 2 * heads + head] / divisor
    return mixed


def _rotated(rotate: Callable[[np.ndarray, Any], np.ndarray], x: np.ndarray, places: Places) -> np.ndarray:
    return np.stack([rotate(row, place) for row, place in zip(x, places, strict=True)])


def _norm(weights: Weights, name: str, kind: str, epsilon: float, x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * weights[f"{name}.weight"]
    return scaled + weights.get(f"{name}.bias", 0.0)


def _mlp(weights: Weights, name: str, kind: str, x: np.ndarray) -> np.ndarray:
    up = _linear(weights, f"{name}up", x)
    if kind == "swiglu":
        gate = _linear(weights, f"{name}gate", x)
        return _linear(weights, f"{name}down", gate / (1 + np.exp(-gate)) * up)
    return _linear(weights, f"{name}down", up * 0.5 * (1 + np.vectorize(math.erf)(up / math.sqrt(2))))


def _linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)
