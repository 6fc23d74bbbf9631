"""Summarise a manifest in a few lines: encodings, sizes and range of positions."""

import re
from collections import Counter
from typing import Any, Dict, List

from posenc_export.runtime.artefact import records, schema
from posenc_export.runtime.artefact.description import mapping, sequence

# Not allowed, since summaries are printed on terminals and inserted into programs: line breaks,
# quotes, escapes.
OTHER = re.compile(r"[^A-Za-z0-9_.,:;=+() -]")
SAID = {"keep": "codes of the checkpoint"}  # formats whose names do not describe them
LONGEST = 300  # most characters of one specification


def summary(manifest: schema.Manifest) -> Dict[str, str]:
    """Describe an artefact in plain text, by title. Parts of another form are left out."""
    weights = " except weights" if manifest.weights else ""
    sizes = [f"{name} {size}" for name, size in _sizes(manifest).items()]
    if manifest.step_weights:
        sizes.append(f"a step reads {manifest.step_weights} weights")
    coordinates = f", with {manifest.axes} coordinates" if manifest.axes else ""
    return {
        "model": (
            f"{manifest.kind} for target {manifest.target}, {manifest.dtype}{weights}, signature "
            f"{manifest.signature}"
        ),
        "encoding": ", ".join(_encodings(manifest.config)) or "none",
        "sizes": ", ".join(sizes),
        **_quantization(manifest),
        "positions": f"0 .. {manifest.max_positions - 1}{coordinates}",
    }


def _quantization(manifest: schema.Manifest) -> Dict[str, str]:
    """Describe the formats of weights and caches, the sample, and the loss against float32."""
    lines, weights, sample = {}, manifest.weights, manifest.calibration
    if weights is not None:
        counts = sorted(Counter(manifest.formats.values()).items())
        mixed = f"mixed ({', '.join(f'{count} {name}' for name, count in counts)})"
        form = mixed if counts else SAID.get(weights.format, weights.format)
        where = " on the CPU" if manifest.dtype == "float32" else ""
        products = f"activations of products in {weights.activations}{where}"
        lines["weights"] = f"{form} in {weights.matrices} matrices, {products}"
    if manifest.cache:
        lines["cache"] = manifest.cache
    if sample is not None:
        lines["calibration"] = f"{sample.tokens} tokens of a file with sha256 {sample.sha256}"
    if manifest.quality is not None:
        lines["quality"] = _loss(manifest.quality)
    return lines


def _loss(quality: records.Quality) -> str:
    parts = [f"{quality.error:.1e} from the float32 module"]
    if quality.ratio:
        times, lost = f"{quality.ratio:.3f} times that of float32", f"{quality.perplexity:.4g}"
        parts = [f"perplexity {times}, {lost} instead of {quality.float32_perplexity:.4g}"]
        bits = f"{quality.bits_per_byte:.3f} instead of {quality.float32_bits_per_byte:.3f}"
        parts.append(f"{bits} bits per byte")
    if quality.first_tokens:
        parts.append(f"agrees with float32 in {quality.first_tokens} first tokens of continuations")
    measured = f"on {'' if quality.first_tokens else f'{quality.tokens} '}{quality.inputs}"
    same = f"the same weights in float32 are within {quality.exact:.1e} of their module"
    return f"{', '.join(parts)} {measured}; {same}"


def _encodings(config: Dict[str, Any]) -> List[str]:
    """Return the encodings as `posenc export --encoding` takes them, and where each is applied."""
    if config.get("kind") == "module":
        return ["in the module's own code"]
    if config.get("kind") == "block":
        inner = mapping(config.get("attention")).get("encodings")
        return [spec_text(spec) for spec in (*sequence(config.get("encodings")), *sequence(inner))]
    on_tokens = sequence(mapping(config.get("tokens")).get("encodings"))
    layers, order = mapping(config.get("layers")), sequence(config.get("order"))
    attentions = [mapping(mapping(layers.get(str(name))).get("attention")) for name in order]
    specs = (spec for attention in attentions for spec in sequence(attention.get("encodings")))
    counts = Counter(map(spec_text, specs))
    return [f"{spec_text(spec)} on tokens" for spec in on_tokens] + [
        f"{spec} in {count} of {len(order)} layers" for spec, count in counts.items()
    ]


def spec_text(spec: Any) -> str:
    """Format a specification: {"name": "rope", "theta": 5e5} becomes "rope:theta=500000.0"."""
    values = mapping(spec)
    parameters = ",".join(f"{key}={value}" for key, value in values.items() if key != "name")
    name = str(values.get("name", "?"))
    text = OTHER.sub("?", f"{name}:{parameters}" if parameters else name)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def _sizes(manifest: schema.Manifest) -> Dict[str, Any]:
    """Sizes of a model by name; heads are those of its first layer."""
    config, own = manifest.config, manifest.kind == "module"
    tokens = mapping(config.get("tokens"))
    layers, order = mapping(config.get("layers")), sequence(config.get("order"))
    first = mapping(layers.get(str(order[0]) if order else ""))
    attention = mapping(config.get("attention")) or mapping(first.get("attention"))
    caches = [mapping(cache).get("layer") for cache in sequence(config.get("caches"))]
    sizes = {
        "layers": len(order) or len(set(map(str, caches))) or None,
        "width": config.get("width"),
        **{key.replace("_", " "): attention.get(key) for key in ("heads", "kv_heads", "head_size")},
        "vocabulary": tokens.get("vocabulary") if manifest.kind != "block" else None,
        "outputs": config.get("outputs") if own else None,
    }
    return {name: size for name, size in sizes.items() if type(size) is int and size}
