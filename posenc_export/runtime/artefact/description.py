"""Describe a model layer by layer, in the order of its forward pass, from its JSON values."""

import re
from typing import Any, Dict, List, Mapping, Sequence, Tuple

Line = Tuple[str, str]  # title and text
# Manifests come from elsewhere: no line breaks or escapes of a terminal.
UNPRINTABLE = re.compile(r"[^ -~]")
DEEPEST = 4  # levels of nested values that are printed
# For each arrangement of residual sums (models/parts/residuals.py): its formula, and its steps in
# order, each norm with what it acts on.
RESIDUALS = {
    "pre": ("x + attention(norm x), then x + mlp(norm x)", "norm:input attention norm:sum mlp"),
    "post": ("norm(x + attention x), then norm(x + mlp x)", "attention norm:sum mlp norm:sum"),
    "sandwich": (
        "x + norm(attention(norm x)), then x + norm(mlp(norm x))",
        "norm:input attention norm:output norm:sum mlp norm:output",
    ),
}


def lines(config: Mapping[str, Any]) -> List[Line]:
    """Return title and text of each step of a model's forward pass, from its description in a
    manifest. Values that do not have the expected form are printed as they are.
    """
    values = dict(config)
    kind, width, positions = _popped(values, "kind", "width", "max_positions")
    sizes = f"width {width}, {positions} positions"
    if kind == "module":
        steps = _module(values, width, positions)
    elif kind == "block":
        attention, specs = _popped(values, "attention", "encodings")
        steps = [("block", sizes), *_encodings(specs), *_attention(mapping(attention))]
        steps += _other(values)
    else:
        steps = [(str(kind), sizes), *_stack(values)]
    return [(UNPRINTABLE.sub("?", title), UNPRINTABLE.sub("?", text)) for title, text in steps]


def _module(values: Dict[str, Any], width: Any, positions: Any) -> List[Line]:
    inside, name, tokens = _popped(values, "inside", "name", "tokens")
    caches, edges, remedies, readout = _popped(values, "caches", "edges", "remedies", "readout")
    tokens, reads = mapping(tokens), f"hidden states of width {width}"
    if tokens:
        reads = f"{tokens.pop('vocabulary', None)} token ids"
    rest = _rest({**values, **tokens}, segments=0, axes=0)
    said = f"{name}, reads {reads}, {positions} positions{rest}"
    steps = [("module", said)]
    for cache in map(mapping, sequence(caches)):
        layer, heads, size = _popped(cache, "layer", "heads", "size")
        steps.append((f"layer {layer}", f"cache {cache.get('name')}, {heads} heads of size {size}"))
    steps += [("edge", f"{edge} at {at}") for edge, at in mapping(edges).items()]
    steps += [("remedy", str(remedy)) for remedy in sequence(remedies)]
    steps += [] if readout is None else _readout(mapping(readout))
    return [*steps, *(lines(mapping(inside)) if inside else [])]


def _stack(values: Dict[str, Any]) -> List[Line]:
    tokens, kinds, order = _popped(values, "tokens", "layers", "order")
    norm, head, readout = _popped(values, "norm", "head", "readout")
    indices: Dict[str, List[int]] = {}
    for index, name in enumerate(map(str, sequence(order))):
        indices.setdefault(name, []).append(index)
    steps = _tokens(mapping(tokens))
    for name, places in indices.items():
        steps += _layer(_ranges(places), name, mapping(mapping(kinds).get(name)))
    if norm is not None:
        steps.append(("norm", _spec(norm)))
    if head is not None:
        head = mapping(head)
        weights = "weights of the token table" if head.pop("tied", False) is True else "own weights"
        steps.append(("head", weights + _rest(head, scale=1.0)))
    elif values.get("key_values") is None:  # of encoders that earlier versions wrote
        steps.append(("output", "hidden states"))
    return steps + ([] if readout is None else _readout(mapping(readout))) + _other(values)


def _readout(readout: Dict[str, Any]) -> List[Line]:
    """Lines for the second output of a model, in the order of its computation."""
    output, *lists = _popped(readout, "output", "pooling", "layers", "labels")
    pooling, layers, labels = map(sequence, lists)
    steps = [f"pooling {', '.join(map(str, pooling))}" if pooling else "each token"]
    named = f"; labels {', '.join(map(str, labels))}" if labels else ""
    text = f"{output}: {', then '.join([*steps, *map(_named, layers)])}{named}"
    return [("output", text), *_other(readout)]


def _tokens(tokens: Dict[str, Any]) -> List[Line]:
    names = ("vocabulary", "segments", "norm", "encodings")
    vocabulary, segments, norm, encodings = _popped(tokens, *names)
    source = f"table of {vocabulary} token ids{_rest(tokens, scale=1.0)}"
    steps = [("tokens", source), *_encodings(encodings)]
    steps += [("segments", f"table of {segments} token types")] if segments else []
    return steps + ([("norm", _spec(norm))] if norm is not None else [])


def _layer(where: str, name: str, layer: Dict[str, Any]) -> List[Line]:
    residual, attention, mlp, norms = _popped(layer, "residual", "attention", "mlp", "norms")
    residual, norms = mapping(residual), sequence(norms)
    unknown = "unknown", " ".join([*("norm:tensor" for _ in norms), "attention", "mlp"])
    formula, steps = RESIDUALS.get(str(residual.get("name")), unknown)
    remaining = iter(norms)
    inner = []
    for step in steps.split():
        if step == "attention":
            inner += _attention(mapping(attention))
        elif step == "mlp":
            inner.append(("mlp", _spec(mapping(mlp))))
        else:
            tensor = step.removeprefix("norm:")
            inner.append(("norm", f"{_spec(next(remaining, None))}, of the {tensor}"))
    inner += _other({"norms": list(remaining), **layer})
    head = (where, f"{name}, {_spec(residual)}: {formula}")
    return [head, *((f"  {title}", text) for title, text in inner)]


def _attention(attention: Dict[str, Any]) -> List[Line]:
    heads, kv_heads, size = _popped(attention, "heads", "kv_heads", "head_size")
    projection, norm, encodings = _popped(attention, "projection", "head_norm", "encodings")
    sees, mechanism = attention.pop("sees", None), attention.pop("mechanism", "softmax")
    of_heads = f"{heads} query heads over {kv_heads} key heads of size {size}"
    steps = [("projection", f"{of_heads}, {_named(projection)}")]
    steps += [("q/k norm", _spec(norm))] if norm is not None else []
    seen = f"{mechanism}, visible keys {_named(sees)}" + _rest(attention)
    return [*steps, *_encodings(encodings), ("attention", seen)]


def _encodings(specs: Any) -> List[Line]:
    return [("encoding", _spec(spec)) for spec in sequence(specs)]


def _other(values: Mapping[str, Any]) -> List[Line]:
    """Lines for keys that this file does not know."""
    shown = {key: value for key, value in values.items() if value not in (None, False, [])}
    return [(key, _value(value, 0)) for key, value in shown.items()]


def _rest(values: Mapping[str, Any], **defaults: Any) -> str:
    shown = {k: v for k, v in values.items() if v is not None and v is not False}
    shown = {key: value for key, value in shown.items() if value != defaults.get(key)}
    return "".join(f", {_setting(key, value, 0)}" for key, value in shown.items())


def _spec(spec: Any, depth: int = 0) -> str:
    """Format {"name": "rms", "epsilon": 1e-5} as "rms, epsilon 1e-05"."""
    if not isinstance(spec, Mapping):
        return str(spec)
    settings = [_setting(key, value, depth) for key, value in spec.items() if key != "name"]
    return ", ".join([str(spec.get("name")), *settings])


def _named(spec: Any, depth: int = 0) -> str:
    """Format {"name": "rms", "epsilon": 1e-5} as "rms (epsilon 1e-05)"."""
    name, _, settings = _spec(spec, depth).partition(", ")
    return f"{name} ({settings})" if settings else name


def _setting(key: str, value: Any, depth: int) -> str:
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return f"{key} {_value(value, depth)}"


def _value(value: Any, depth: int) -> str:
    if depth > DEEPEST:
        return "..."
    if isinstance(value, Mapping) and "name" in value:
        return _named(value, depth + 1)
    if isinstance(value, Mapping):
        return f"({', '.join(_setting(key, part, depth + 1) for key, part in value.items())})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(part, depth + 1) for part in value)}]"
    return str(value)


def _ranges(indices: Sequence[int]) -> str:
    """Name layers by index: [0, 1, 2, 5] becomes "layers 0-2, 5"."""
    firsts = [i for i in indices if i - 1 not in indices]
    lasts = [i for i in indices if i + 1 not in indices]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True)]
    return f"layer{'s' * (len(indices) > 1)} {', '.join(runs)}"


def _popped(values: Dict[str, Any], *keys: str) -> List[Any]:
    """Remove keys from a dict. Return their values, None for those that it does not have."""
    return [values.pop(key, None) for key in keys]


def mapping(value: Any) -> Dict[str, Any]:
    """Return a copy of a mapping; an empty dict for another value."""
    return dict(value) if isinstance(value, Mapping) else {}


def sequence(value: Any) -> List[Any]:
    """Return a copy of a list or tuple; an empty list for another value."""
    return list(value) if isinstance(value, (list, tuple)) else []
