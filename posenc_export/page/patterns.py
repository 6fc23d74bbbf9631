"""What an encoding alone makes of a distance, for each head, from its float64 oracle."""

from typing import Any, Dict, List, Optional

import numpy as np

from posenc_export import encodings
from posenc_export.encodings.base import Geometry, PositionEncoding
from posenc_export.runtime.manifest import Manifest

VECTORS = 16  # random vectors that a rotation is averaged over
Pattern = Dict[str, Any]  # "says": what the numbers are; "heads": numbers by distance [H,distances], 1 at most, the lowest 0 or above


def of_layers(manifest: Manifest, distances: int) -> List[Optional[Pattern]]:
    """A pattern for each layer, from distance 0 on; None where nothing acts by position alone, or with weights of the model's own."""
    config = manifest.config
    made: Dict[str, Optional[Pattern]] = {}
    for name, layer in config["layers"].items():
        attention = layer["attention"]
        geometry = Geometry(config["width"], attention["heads"], attention["head_size"], config["max_positions"], kv_heads=attention["kv_heads"])
        found = [pattern for spec in attention["encodings"] if (pattern := _pattern(spec, geometry, distances)) is not None]
        made[name] = found[0] if found else None
    return [made[name] for name in config["order"]]


def _pattern(spec: Dict[str, Any], geometry: Geometry, distances: int) -> Optional[Pattern]:
    encoding = encodings.build(spec, geometry)
    if dict(encoding.named_parameters()):
        return None
    cls = type(encoding)
    if cls.bias is not PositionEncoding.bias:
        return {"says": "share of a key where all contents are equal, against that of the own token", "heads": _shares(encoding, geometry, distances)}
    if cls.rotate is not PositionEncoding.rotate:
        return {"says": "score of a query with a key equal to it, mean of random vectors", "heads": _similarity(encoding, geometry, distances)}
    return None


def _shares(encoding: PositionEncoding, geometry: Geometry, distances: int) -> List[List[float]]:
    oracle, query = encoding.oracle(), distances - 1
    biases = np.array([[oracle.bias(head, query, query - distance) for distance in range(distances)] for head in range(geometry.heads)])
    return _rounded(np.exp(biases - biases.max(1, keepdims=True)))


def _similarity(encoding: PositionEncoding, geometry: Geometry, distances: int) -> List[List[float]]:
    oracle, query, random = encoding.oracle(), distances - 1, np.random.default_rng(0)
    oracle.begin(range(distances))
    total = np.zeros((geometry.heads, distances))
    for _ in range(VECTORS):
        vectors = np.repeat(random.standard_normal((1, geometry.head_size)), geometry.heads, 0)
        own = oracle.rotate_heads(vectors, query)
        keys = np.stack([oracle.rotate_key_heads(vectors, query - distance) for distance in range(distances)])
        total += np.einsum("hd,nhd->hn", own, keys)
    return _rounded(np.maximum(total, 0) / total.max(1, keepdims=True))


def _rounded(values: np.ndarray) -> List[List[float]]:
    return [[round(float(value), 4) for value in row] for row in values]
