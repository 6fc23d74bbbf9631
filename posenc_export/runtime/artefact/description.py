"""Print the description of a model layer by layer, in the order of the forward pass, from its
JSON values. Needs neither torch nor weights.
"""

import re
from typing import Any, Dict, List, Mapping, Sequence, Tuple

Line = Tuple[str, str]  # title and text
UNPRINTABLE = re.compile(
    r"[^ -~]"
)  # manifests come from elsewhere: no line breaks or escapes of a terminal
DEEPEST = 4  # levels of nested values that are printed
# For each arrangement of residual sums (models/parts/residuals.py): its formula, and its steps in
# order, each norm with what it acts on.
RESIDUALS = {
    "pre": ("x + attention(norm x), then x + mlp(norm x)", "norm:input attention norm:sum mlp"),
    "alone": ("mlp(x + attention(norm x))", "norm:input attention mlp"),
    "post": ("norm(x + attention x), then norm(x + mlp x)", "attention norm:sum mlp norm:sum"),
    "after": (
        "x + norm(attention x), then x + norm(mlp x)",
        "attention norm:output mlp norm:output",
    ),
    "sandwich": (
        "x + norm(attention(norm x)), then x + norm(mlp(norm x))",
        "norm:input attention norm:output norm:sum mlp norm:output",
    ),
    "parallel": (
        "x + attention(norm x) + mlp(norm x), with one norm for both",
        "norm:input attention mlp",
    ),
    "parallel_norms": (
        "x + attention(norm x) + mlp(norm x), with a norm for each",
        "norm:input attention norm:input mlp",
    ),
}


def lines(config: Mapping[str, Any]) -> List[Line]:
    """Return title and text of each step of a model's forward pass. Values that do not have the
    expected form are printed as they are.

    Args:
        config: description of a block, encoder, decoder or own module, as
            `models.config_json.to_json` returns it and a manifest holds it.
    """
    values = dict(config)
    kind, width, positions = (values.pop(key, None) for key in ("kind", "width", "max_positions"))
    sizes = f"width {width}, {positions} positions"
    if kind == "module":
        inside, name, tokens = (
            _mapping(values.pop("inside", None)),
            values.pop("name", None),
            _mapping(values.pop("tokens", None)),
        )
        reads = (
            f"reads {tokens.pop('vocabulary', None)} token ids"
            if tokens
            else f"reads hidden states of width {width}"
        )
        found = [
            (
                "module",
                f"{name}, {reads}, {positions} positions{_rest({**values, **tokens}, segments=0)}",
            ),
            *lines(inside),
        ]
    elif kind == "block":
        attention = _mapping(values.pop("attention", None))
        found = [
            ("block", f"{sizes}"),
            *_encodings(values.pop("encodings", ())),
            *_attention(attention),
            *_other(values),
        ]
    else:
        found = [(str(kind), sizes), *_stack(values)]
    return [(UNPRINTABLE.sub("?", title), UNPRINTABLE.sub("?", text)) for title, text in found]


def _stack(values: Dict[str, Any]) -> List[Line]:
    tokens, kinds, order = (
        _mapping(values.pop("tokens", None)),
        _mapping(values.pop("layers", None)),
        _sequence(values.pop("order", ())),
    )
    norm, head, key_values, readout = (
        values.pop(key, None) for key in ("norm", "head", "key_values", "readout")
    )
    indices: Dict[str, List[int]] = {}
    for index, name in enumerate(map(str, order)):
        indices.setdefault(name, []).append(index)
    found = _tokens(tokens)
    for name in indices:
        found += _layer(_ranges(indices[name]), name, _mapping(kinds.get(name)))
    found += [("norm", _spec(norm))] if norm is not None else []
    if head is not None:
        head = _mapping(head)
        weights = "weights of the token table" if head.pop("tied", False) is True else "own weights"
        found.append(("head", weights + _rest(head, scale=1.0)))
    if key_values is not None:
        found.append(
            (
                "output",
                "keys and values of a decoder's cross-attention" + _rest(_mapping(key_values)),
            )
        )
    elif head is None:
        found.append(("output", "hidden states"))
    found += [] if readout is None else _readout(_mapping(readout))
    return found + _other(values)


def _readout(readout: Dict[str, Any]) -> List[Line]:
    """Lines for the second output of an encoder, in the order of its computation."""
    output, pooling, layers = (
        str(readout.pop("output", None)),
        _sequence(readout.pop("pooling", ())),
        _sequence(readout.pop("layers", ())),
    )
    labels = ", ".join(map(str, _sequence(readout.pop("labels", ()))))
    steps = [
        f"pooling {', '.join(map(str, pooling))}" if pooling else "each token",
        *map(_named, layers),
    ]
    return [
        ("output", f"{output}: {', then '.join(steps)}{f'; labels {labels}' if labels else ''}"),
        *_other(readout),
    ]


def _tokens(tokens: Dict[str, Any]) -> List[Line]:
    """Lines for the embedding, in the order of TokensConfig."""
    features, segments, norm, encodings = (
        tokens.pop(key, None) for key in ("features", "segments", "norm", "encodings")
    )
    source = (
        f"table of {tokens.pop('vocabulary', None)} token ids"
        if features is None
        else f"features by {_named(features)}"
    )
    found = [("tokens", source + _rest(tokens, scale=1.0, vocabulary=0)), *_encodings(encodings)]
    found += [("segments", f"table of {segments} token types")] if segments else []
    return found + ([("norm", _spec(norm))] if norm is not None else [])


def _layer(where: str, name: str, layer: Dict[str, Any]) -> List[Line]:
    residual, attention, mlp = (
        _mapping(layer.pop(key, None)) for key in ("residual", "attention", "mlp")
    )
    norms = _sequence(layer.pop("norms", ()))
    formula, steps = RESIDUALS.get(
        str(residual.get("name")),
        ("unknown", " ".join([*("norm:tensor" for _ in norms), "attention", "mlp"])),
    )
    remaining = iter(norms)
    found = []
    for step in steps.split():
        if step == "attention":
            found += _attention(attention)
        elif step == "mlp":
            found.append(("mlp", _spec(mlp)))
        else:
            found.append(
                ("norm", f"{_spec(next(remaining, None))}, of the {step.removeprefix('norm:')}")
            )
    found += _other({"norms": list(remaining), **layer})
    return [
        (where, f"{name}, {_spec(residual)}: {formula}"),
        *((f"  {title}", text) for title, text in found),
    ]


def _attention(attention: Dict[str, Any]) -> List[Line]:
    """Lines for one attention: projection, norm of queries and keys, encodings, visible keys and
    scores.
    """
    heads, kv_heads, size = (attention.pop(key, None) for key in ("heads", "kv_heads", "head_size"))
    projection, head_norm, encodings, sees = (
        attention.pop(key, None) for key in ("projection", "head_norm", "encodings", "sees")
    )
    mechanism = attention.pop("mechanism", "softmax")
    found = [
        (
            "projection",
            f"{heads} query heads over {kv_heads} key heads of size {size}, {_named(projection)}",
        )
    ]
    found += [("q/k norm", _spec(head_norm))] if head_norm is not None else []
    return [
        *found,
        *_encodings(encodings),
        ("attention", f"{mechanism}, visible keys {_named(sees)}" + _rest(attention)),
    ]


def _encodings(specs: Any) -> List[Line]:
    return [("encoding", _spec(spec)) for spec in _sequence(specs)]


def _other(values: Mapping[str, Any]) -> List[Line]:
    """Lines for keys that this file does not know."""
    return [
        (key, _value(value, 0)) for key, value in values.items() if value not in (None, False, [])
    ]


def _rest(values: Mapping[str, Any], **defaults: Any) -> str:
    """Format the keys that are left, without null, false and the given defaults."""
    shown = {
        key: value
        for key, value in values.items()
        if value is not None and value is not False and value != defaults.get(key)
    }
    return "".join(f", {_setting(key, value, 0)}" for key, value in shown.items())


def _spec(spec: Any, depth: int = 0) -> str:
    """Format a specification: {"name": "rms", "epsilon": 1e-5} becomes "rms, epsilon 1e-05"."""
    if not isinstance(spec, Mapping):
        return str(spec)
    return ", ".join(
        [
            str(spec.get("name")),
            *(_setting(key, value, depth) for key, value in spec.items() if key != "name"),
        ]
    )


def _named(spec: Any, depth: int = 0) -> str:
    """Format a specification among others: {"name": "rms", "epsilon": 1e-5} becomes "rms
    (epsilon 1e-05)".
    """
    name, _, settings = _spec(spec, depth).partition(", ")
    return f"{name} ({settings})" if settings else name


def _setting(key: str, value: Any, depth: int) -> str:
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return f"{key} {_value(value, depth)}"


def _value(value: Any, depth: int) -> str:
    if depth > DEEPEST:
        return "..."
    if isinstance(value, Mapping):
        return (
            _named(value, depth + 1)
            if "name" in value
            else f"({', '.join(_setting(key, one, depth + 1) for key, one in value.items())})"
        )
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(one, depth + 1) for one in value)}]"
    return str(value)


def _ranges(indices: Sequence[int]) -> str:
    """Name layers by index: [0, 1, 2, 5] becomes "layers 0-2, 5"."""
    inside = set(indices)
    runs = zip(
        (i for i in indices if i - 1 not in inside),
        (i for i in indices if i + 1 not in inside),
        strict=True,
    )
    return f"layer{'s' * (len(indices) > 1)} " + ", ".join(
        str(first) if first == last else f"{first}-{last}" for first, last in runs
    )


def _mapping(value: Any) -> Dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
