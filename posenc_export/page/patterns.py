"""Attention by distance that an encoding alone prescribes, from its float64 oracle."""

from typing import Any, Dict, List, Optional

import numpy as np

from posenc_export import encodings
from posenc_export.encodings.shared.base import Geometry, PositionEncoding
from posenc_export.runtime.artefact.manifest import Manifest

VECTORS = 16  # number of random vectors over which the score of a rotation is averaged
# "says": meaning of the numbers; "heads": numbers in 0 .. 1 by head and distance [H,distances].
Pattern = Dict[str, Any]


def patterns_by_layer(manifest: Manifest, distances: int) -> List[Optional[Pattern]]:
    """Return a pattern of distances 0 .. distances - 1 for each layer; None without an untrained
    bias or rotation.
    """
    config = manifest.config
    patterns: Dict[str, Optional[Pattern]] = {}
    for name, layer in config["layers"].items():
        attention = layer["attention"]
        heads, kv_heads, size = (attention[key] for key in ("heads", "kv_heads", "head_size"))
        most = config["max_positions"]
        geometry = Geometry(config["width"], heads, size, most, kv_heads=kv_heads)
        of_specs = (_pattern(spec, geometry, distances) for spec in attention["encodings"])
        patterns[name] = next(filter(None, of_specs), None)
    return [patterns[name] for name in config["order"]]


def _pattern(spec: Dict[str, Any], geometry: Geometry, distances: int) -> Optional[Pattern]:
    encoding = encodings.build(spec, geometry)
    if dict(encoding.named_parameters()):
        return None
    cls = type(encoding)
    if cls.bias is not PositionEncoding.bias:
        says = (
            "attention weight of a key relative to the query's own token, if all contents are equal"
        )
        return {"says": says, "heads": _weights(encoding, geometry, distances)}
    if cls.rotate is not PositionEncoding.rotate:
        says = "score of a query with an equal key, averaged over random vectors"
        return {"says": says, "heads": _similarity(encoding, geometry, distances)}
    return None


def _weights(encoding: PositionEncoding, geometry: Geometry, distances: int) -> List[List[float]]:
    oracle, query = encoding.oracle(), distances - 1
    heads, keys = range(geometry.heads), [query - distance for distance in range(distances)]
    rows = [[oracle.bias(head, query, key) for key in keys] for head in heads]
    biases = np.array(rows)
    return _rounded(np.exp(biases - biases.max(1, keepdims=True)))


def _similarity(
    encoding: PositionEncoding, geometry: Geometry, distances: int
) -> List[List[float]]:
    oracle, query, random = encoding.oracle(), distances - 1, np.random.default_rng(0)
    total = np.zeros((geometry.heads, distances))
    for _ in range(VECTORS):
        vectors = np.repeat(random.standard_normal((1, geometry.head_size)), geometry.heads, 0)
        own = oracle.rotate_heads(vectors, query)
        keys = [oracle.rotate_key_heads(vectors, query - distance) for distance in range(distances)]
        total += np.einsum("hd,nhd->hn", own, np.stack(keys))
    return _rounded(np.maximum(total, 0) / total.max(1, keepdims=True))


def _rounded(values: np.ndarray) -> List[List[float]]:
    return [[round(float(value), 4) for value in row] for row in values]
