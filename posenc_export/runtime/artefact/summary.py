"""Summarise a manifest in a few lines: encodings, sizes and range of positions."""

import re
from collections import Counter
from typing import Any, Dict, List

from posenc_export.runtime.artefact.records import Quality
from posenc_export.runtime.artefact.schema import Manifest

# Not allowed, since summaries are printed on terminals and inserted into programs: line breaks,
# quotes, escapes.
OTHER = re.compile(r"[^A-Za-z0-9_.,:;=+() -]")
SAID = {"keep": "codes of the checkpoint"}  # formats whose names do not describe them
LONGEST = 300  # most characters of one specification


def summary(manifest: Manifest) -> Dict[str, str]:
    """Describe an artefact in plain text, by title.

    Parts of the configuration that do not have the expected form are left out; they raise no error.
    """
    return {
        "model": (
            f"{manifest.kind} for target {manifest.target}, "
            f"{manifest.dtype}{' except weights' if manifest.weights else ''}, signature "
            f"{manifest.signature}"
        ),
        "encoding": ", ".join(_encodings(manifest.config)) or "none",
        "sizes": ", ".join(
            [f"{name} {size}" for name, size in _sizes(manifest).items()] + _read(manifest)
        ),
        **_quantization(manifest),
        "positions": f"0 .. {manifest.max_positions - 1}"
        + (f", with {manifest.axes} coordinates" if manifest.axes else ""),
    }


def _quantization(manifest: Manifest) -> Dict[str, str]:
    """Describe the formats of weights and caches, the sample, and the loss against the float32
    module; empty if everything has the dtype of the manifest.
    """
    lines, weights, sample = {}, manifest.weights, manifest.calibration
    if weights is not None:
        form = _formats(manifest) or SAID.get(weights.format, weights.format)
        lines["weights"] = (
            f"{form} in {weights.matrices} matrices, activations of products in "
            f"{weights.activations}{' on the CPU' if manifest.dtype == 'float32' else ''}"
        )
    if manifest.cache:
        lines["cache"] = manifest.cache
    if sample is not None:
        lines["calibration"] = f"{sample.tokens} tokens of a file with sha256 {sample.sha256}"
    if manifest.quality is not None:
        lines["quality"] = _loss(manifest.quality)
    return lines


def _formats(manifest: Manifest) -> str:
    """Return the number of weights in each format; empty if all have the same."""
    counts = Counter(manifest.formats.values())
    return (
        f"mixed ({', '.join(f'{counts[name]} {name}' for name in sorted(counts))})"
        if counts
        else ""
    )


def _loss(quality: Quality) -> str:
    """Describe the loss against the float32 module, and what it was measured on."""
    parts = [f"{quality.error:.1e} from the float32 module"]
    if quality.ratio:
        bits = (
            f"{quality.bits_per_byte:.3f} instead of {quality.float32_bits_per_byte:.3f} bits "
            "per byte"
        )
        parts = [
            (
                f"perplexity {quality.ratio:.3f} times that of float32, {quality.perplexity:.4g} "
                f"instead of {quality.float32_perplexity:.4g}"
            ),
            bits,
        ]
    if quality.agreement:
        parts.append(f"the same most probable token for {100 * quality.agreement:.1f} percent")
    measured = (
        f"on {quality.tokens} tokens, {quality.inputs}"
        if quality.sha256
        else f"on {quality.tokens} {quality.inputs}"
    )
    return (
        f"{', '.join(parts)} {measured}; the same weights in float32 are within "
        f"{quality.exact:.1e} of their module"
    )


def _encodings(config: Dict[str, Any]) -> List[str]:
    """Return the encodings as `posenc export --encoding` takes them, and where each is applied;
    of an own module those of its block or stack.
    """
    if config.get("kind") == "module":
        inside = _dict(config.get("inside"))
        return _encodings(inside) if inside.get("kind") != "module" else []
    if config.get("kind") == "block":
        return [
            _spec(spec)
            for spec in (
                *_list(config.get("encodings")),
                *_list(_dict(config.get("attention")).get("encodings")),
            )
        ]
    on_tokens = [
        f"{_spec(spec)} on tokens" for spec in _list(_dict(config.get("tokens")).get("encodings"))
    ]
    order = [str(name) for name in _list(config.get("order"))]
    attentions = [
        _dict(_dict(_dict(config.get("layers")).get(name)).get("attention")) for name in order
    ]
    counts = Counter(
        _spec(spec) for attention in attentions for spec in _list(attention.get("encodings"))
    )
    return on_tokens + [
        f"{spec} in {count} of {len(order)} layers" for spec, count in counts.items()
    ]


def _spec(spec: Any) -> str:
    """Format a specification: {"name": "rope", "theta": 5e5} becomes "rope:theta=500000.0"."""
    parameters = ",".join(f"{key}={value}" for key, value in _dict(spec).items() if key != "name")
    text = OTHER.sub(
        "?", str(_dict(spec).get("name", "?")) + (f":{parameters}" if parameters else "")
    )
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _sizes(manifest: Manifest) -> Dict[str, Any]:
    """Return the sizes of a model by name; heads and head size are those of its first layer,
    width and layers of an own module those of its block or stack.
    """
    own = manifest.kind == "module"
    config = _dict(manifest.config.get("inside")) if own else manifest.config
    layers = _list(config.get("order"))
    attention = _dict(config.get("attention")) or _dict(
        _dict(_dict(config.get("layers")).get(str(layers[0]) if layers else "")).get("attention")
    )
    sizes = {
        "layers": len(layers) or None,
        "width": config.get("width"),
        **{key.replace("_", " "): attention.get(key) for key in ("heads", "kv_heads", "head_size")},
    }
    vocabulary = (
        _dict(manifest.config.get("tokens")).get("vocabulary") if manifest.kind != "block" else None
    )
    sizes |= {"vocabulary": vocabulary, "outputs": manifest.config.get("outputs") if own else None}
    return {name: size for name, size in sizes.items() if type(size) is int and size}


def _read(manifest: Manifest) -> List[str]:
    return [f"a step reads {manifest.step_weights} weights"] if manifest.step_weights else []


def _dict(value: Any) -> Dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
