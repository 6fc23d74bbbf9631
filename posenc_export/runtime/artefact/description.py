"""Describe the parts of a model, layer by layer, from its JSON values."""

import re
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

Line = Tuple[str, str]  # title and text
# Manifests come from elsewhere: no line breaks or escapes of a terminal.
UNPRINTABLE = re.compile(r"[^ -~]")
DEEPEST = 4  # levels of nested values that are printed
BEFORE = ("kind", "name", "width", "max_positions", "tokens", "encodings")  # the layers


def lines(config: Mapping[str, Any]) -> List[Line]:
    """Return title and text of each part of a model, from its description in a manifest. Values
    that do not have the expected form are printed as they are.
    """
    steps = _model(dict(config))
    return [(UNPRINTABLE.sub("?", title), UNPRINTABLE.sub("?", text)) for title, text in steps]


def _model(values: Dict[str, Any]) -> Iterator[Line]:
    kinds = mapping(values.pop("layers", None))
    order = [*map(str, sequence(values.pop("order", None)))]
    yield from _parts({key: values.pop(key) for key in BEFORE if key in values})
    for name in dict.fromkeys(order):
        yield _ranges([index for index, other in enumerate(order) if other == name]), name
        for title, text in _parts(mapping(kinds.get(name))):
            yield f"  {title}", text
    yield from _parts(values)


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


def mapping(value: Any) -> Dict[str, Any]:
    """Return a copy of a mapping; an empty dict for another value."""
    return dict(value) if isinstance(value, Mapping) else {}


def sequence(value: Any) -> List[Any]:
    """Return a copy of a list or tuple; an empty list for another value."""
    return list(value) if isinstance(value, (list, tuple)) else []
