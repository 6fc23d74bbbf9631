"""Biases of scores by distance (Press et al. 2021, ALiBi; Raffel et al. 2020, T5), in numpy."""

import math
from pathlib import Path
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.graphs.kernel_library import OPERATOR
from posenc_export.runtime.graphs.onnx_nodes import Constant
from posenc_export.runtime.verification import described
from posenc_export.runtime.verification.findings import Findings
from posenc_export.runtime.verification.integer_graph import IntegerPart
from posenc_export.shared.places import evaluate
from posenc_export.shared.refusal import refusal

RULES = {"alibi", "t5"}  # biases whose formula is known here
# Encodings that add no bias beside these. Any other may add one.
NO_BIAS = {"learned", "nope", "rope", "rope_dynamic", "rope_llama3", "rope_longrope", "rope_yarn"}
NO_BIAS |= {"sinusoidal"}
BIAS = 1e-5  # largest error of a bias in float32, relative to 1 + |bias|
CLOSE = 1e-5  # distance of a logarithm from a border below which float32 may round to either side


def tables(manifest: Manifest, folder: Path) -> Tuple[Tuple[np.ndarray, ...], ...]:
    """Return for each layer the bias of each head by distance [H,distances], of which the last is
    also that of all larger ones: several tables where float32 decides on a border, none for
    encodings without a rule here and for layers that add several biases. Raise OSError for a
    trained table that cannot be read.
    """
    causal = described.causal(manifest)
    layers = enumerate(described.attentions(manifest))
    return tuple(_of_layer(manifest, folder, *layer) if causal else () for layer in layers)


def _of_layer(
    manifest: Manifest, folder: Path, layer: int, attention: described.Described
) -> Tuple[np.ndarray, ...]:
    none, encodings = NO_BIAS - set(manifest.packages), attention["encodings"]
    biases = [index for index, part in enumerate(encodings) if part["name"] not in none]
    if len(biases) != 1 or encodings[biases[0]]["name"] not in RULES - set(manifest.packages):
        return ()
    part = described.with_defaults(encodings[biases[0]])
    if part["name"] == "alibi" and part.get("numerics", "exact") == "exact":
        distances = np.arange(manifest.max_positions)
        return (-_slopes(part, attention)[:, None] * distances,)
    if part["name"] == "t5":
        place = f"parts.{biases[0]}." if len(encodings) > 1 else ""
        weight = _trained(manifest, folder, layer, f"encoding.{place}table.weight")
        rows = _buckets(part)
        return () if weight is None else tuple(weight[index].T for index in rows)
    return ()


def compare(
    part: IntegerPart, by_layer: Sequence[Tuple[np.ndarray, ...]], folder: Path, findings: Findings
) -> None:
    """Compare the tables of biases by distance that attention nodes read with `tables`."""
    for place, layer, stored in _inputs(part, 14):
        biases = by_layer[layer] if 0 <= layer < len(by_layer) else ()
        if not biases:
            findings.skipped[place] = "a bias whose formula is not known here"
            continue
        if stored is None or len(stored.shape) != 2 or stored.shape[0] != len(biases[0]):
            findings.failures[place] = f"expected a table of {len(biases[0])} heads"
            continue
        numbers = stored.array(folder)
        errors = [bias_errors(numbers, table) for table in biases]
        wrong = np.min(errors, axis=0) > BIAS
        findings.compared += 1
        if wrong.any():
            head, distance = (int(index[0]) for index in np.nonzero(wrong))
            got = numbers[head, min(distance, numbers.shape[1] - 1)]
            findings.failures[place] = f"bias of head {head} at distance {distance}: got {got:g}"


def compare_rows(part: IntegerPart, manifest: Manifest, folder: Path, findings: Findings) -> None:
    """Compare the rows by distance that attention nodes pick with those of the description."""
    distances = np.arange(manifest.max_positions)
    declared = manifest.places.rows if manifest.places else []
    for place, layer, stored in _inputs(part, 20):
        rules = declared[layer] if 0 <= layer < len(declared) else []
        if not (known := [rule for rule in rules if "k" in rule]):
            findings.skipped[place] = "rows whose formula is not known here"
            continue
        if stored is None or len(stored.shape) != 1 or not stored.shape[0]:
            findings.failures[place] = "expected a row for each distance"
            continue
        rows = stored.array(folder)[np.minimum(distances, stored.shape[0] - 1)]
        wrong = [rows != evaluate(rule, {"q": distances, "k": 0}) for rule in known]
        findings.compared += 1
        if np.all([w.any() for w in wrong]):
            at = int(np.flatnonzero(wrong[0])[0])
            findings.failures[place] = f"row of distance {at}: got {rows[at]}"


def _inputs(part: IntegerPart, index: int) -> Iterator[Tuple[str, int, Optional[Constant]]]:
    """Yield the values that CachedAttention reads as an input: name in the certificate, layer of
    the first node that reads it, and the constant.
    """
    own = [(node, layer) for node, layer in reversed(part.attention) if node.operator == OPERATOR]
    layers = {name: layer for node, layer in own for name in node.inputs[index : index + 1] if name}
    for name, layer in layers.items():
        yield f"{name} ({OPERATOR} input {index})", layer, part.graph.constants.get(name)


def bias_errors(numbers: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return errors of biases [H,distances] relative to 1 + |bias|, with the last for larger
    distances.
    """
    index = np.arange(max(numbers.shape[1], table.shape[1]))
    both = [t[:, np.minimum(index, t.shape[1] - 1)].astype(np.float64) for t in (numbers, table)]
    return np.asarray(np.abs(both[0] - both[1]) / (1 + np.abs(both[1])))


def _slopes(part: described.Described, attention: described.Described) -> np.ndarray:
    """Return the slopes of ALiBi [H]: powers of a root of 2, then odd ones of a finer root."""
    heads = part.get("heads") or attention["heads"]
    power, most = 1 << (heads.bit_length() - 1), part.get("max_bias", 8.0)
    first = 2.0 ** (-most / power * np.arange(1, power + 1))
    second = 2.0 ** (-most / (2 * power) * np.arange(1, 2 * power + 1, 2))
    slopes = np.zeros(attention["heads"])
    slopes[:heads] = np.concatenate((first, second))[:heads]
    divisor = math.sqrt(attention["head_size"]) if part.get("added") == "before" else 1.0
    return np.asarray(slopes * part.get("scale", 1.0) / divisor)


def _buckets(part: described.Described) -> List[np.ndarray]:
    """Return the buckets of distances 0 .. max_distance of T5, with borders rounded down and up."""
    count, most = part["buckets"], part["max_distance"]
    if most <= count // 2:
        rule = f"t5 with max_distance above {count // 2}, half of its buckets"
        raise refusal("manifest", rule, most)
    exact, distances = count // 2, np.arange(part["max_distance"] + 1)
    ratio = np.log(np.maximum(distances, 1) / exact) / math.log(most / exact)
    steps = ratio * (count - exact)
    far = [np.minimum(exact + np.floor(steps + shift), count - 1) for shift in (-CLOSE, CLOSE)]
    return [np.where(distances < exact, distances, border).astype(np.int64) for border in far]


def _trained(manifest: Manifest, folder: Path, layer: int, name: str) -> Optional[np.ndarray]:
    """Return trained numbers of a layer, or of one that shares them; None unless in float32."""
    named = [key for key in manifest.encodings if key.endswith(name)]
    own = [key for key in named if f"layers.{layer}." in key]
    for key in own or named:
        numbers = manifest.encodings[key]
        if numbers.dtype == "float32":
            shape = numbers.shape[::-1] if numbers.transposed else numbers.shape
            count, offset = math.prod(shape), numbers.offset
            stored = np.fromfile(folder / numbers.file, "<f4", count, offset=offset)
            return stored.reshape(shape).T if numbers.transposed else stored.reshape(shape)
    return None
