"""Describe an artefact in a few lines, or the parts of its model, layer by layer."""

import re
from collections import Counter
from typing import Any, Iterator, Mapping, Sequence

from posenc_export.runtime.artefact import records, schema

# Not allowed, since summaries are printed on terminals and inserted into programs: line breaks,
# quotes, escapes.
OTHER = re.compile(r"[^A-Za-z0-9_.,:;=+() -]")
SAID = {"keep": "codes of the checkpoint"}  # formats whose names do not describe them
LONGEST = 300  # most characters of one specification
Line = tuple[str, str]  # title and text
# Manifests come from elsewhere: no line breaks or escapes of a terminal.
UNPRINTABLE = re.compile(r"[^ -~]")
DEEPEST = 4  # levels of nested values that are printed
BEFORE = ("kind", "name", "width", "max_positions", "tokens", "encodings")  # the layers


def summary(manifest: schema.Manifest) -> dict[str, str]:
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
        "encoding": ", ".join(encodings(manifest.config)) or "none",
        "sizes": ", ".join(sizes),
        **_quantization(manifest),
        "positions": f"0 .. {manifest.max_positions - 1}{coordinates}",
    }


def _quantization(manifest: schema.Manifest) -> dict[str, str]:
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


def encodings(config: dict[str, Any]) -> list[str]:
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


def _sizes(manifest: schema.Manifest) -> dict[str, Any]:
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


def lines(config: Mapping[str, Any]) -> list[Line]:
    """Return title and text of each part of a model, from its description in a manifest. Values
    that do not have the expected form are printed as they are.
    """
    steps = _model({key: value for key, value in config.items() if not _is_none(value)})
    return [(UNPRINTABLE.sub("?", title), UNPRINTABLE.sub("?", text)) for title, text in steps]


def _model(values: dict[str, Any]) -> Iterator[Line]:
    kinds = mapping(values.pop("layers", None))
    order = [*map(str, sequence(values.pop("order", None)))]
    yield from _parts({key: values.pop(key) for key in BEFORE if key in values})
    for name in dict.fromkeys(order):
        yield _ranges([index for index, other in enumerate(order) if other == name]), name
        for title, text in _parts(mapping(kinds.get(name))):
            yield f"  {title}", text
    yield from _parts(values)


def _is_none(value: Any) -> bool:
    """Return whether a size says that a model lacks something, as a width of 0."""
    return type(value) is int and value == 0


def _parts(values: Mapping[str, Any]) -> Iterator[Line]:
    """Yield a line for each setting, and for each part of a list of parts."""
    for key, value in values.items():
        several = isinstance(value, list) and any(isinstance(part, Mapping) for part in value)
        for part in value if several else [value]:
            if part not in (None, [], {}):
                yield key, _text(part)


def _text(value: Any, depth: int = 0) -> str:
    """Format {"name": "rms", "epsilon": 1e-5} as "rms, epsilon 1e-05", as "rms (epsilon 1e-05)"
    inside another value.
    """
    if depth > DEEPEST:
        return "..."
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(part, depth + 1) for part in value)}]"
    if not isinstance(value, Mapping):
        return str(value)
    parts = [str(value["name"])] if "name" in value else []
    for key, part in value.items():
        if isinstance(part, bool):
            parts.append(key if part else f"no {key}")
        elif key != "name" and part not in (None, []):
            parts.append(f"{key} {_text(part, depth + 1)}")
    name = parts.pop(0) if depth and "name" in value else ""
    settings = ", ".join(parts)
    return f"{name} ({settings})".lstrip() if depth and settings else name or settings


def _ranges(indices: Sequence[int]) -> str:
    """Name layers by index: [0, 1, 2, 5] becomes "layers 0-2, 5"."""
    firsts = [i for i in indices if i - 1 not in indices]
    lasts = [i for i in indices if i + 1 not in indices]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True)]
    return f"layer{'s' * (len(indices) > 1)} {', '.join(runs)}"


def mapping(value: Any) -> dict[str, Any]:
    """Return a copy of a mapping; an empty dict for another value."""
    return dict(value) if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    """Return a copy of a list or tuple; an empty list for another value."""
    return list(value) if isinstance(value, (list, tuple)) else []
