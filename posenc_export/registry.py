"""Parts found by name: {"name": ..., parameter: value} becomes an object of the class that is registered under the name."""

import inspect
import math
from typing import Any, Dict, Mapping, Type

from posenc_export.allocation import enough_memory

LARGEST, WHOLE = 2.0**128, 1 << 62  # above them float32 is infinite, and sums of int64 may wrap around
Spec = Mapping[str, Any]


def parameters(kind: str, classes: Mapping[str, Type[Any]], name: str, context: int = 1) -> Dict[str, inspect.Parameter]:
    """Parameters of a registered class, by name.

    Args:
        kind: of part, for messages.
        classes: by name.
        context: number of leading arguments that do not come from a specification.

    Raises:
        ValueError: no class of that name.
    """
    if name not in classes:
        raise ValueError(f"{kind}: name is one of {', '.join(classes)}, got {name!r}")
    return dict(list(inspect.signature(classes[name].__init__, eval_str=True).parameters.items())[1 + context :])


def build(kind: str, classes: Mapping[str, Type[Any]], spec: Spec, *context: Any) -> Any:
    """The object that a specification describes.

    Args:
        kind, classes: as `parameters`.
        spec: {"name": key of classes, parameter: value}.
        context: leading arguments of the class.

    Raises:
        ValueError: unknown name or parameter, a missing one, a number that is not finite, sizes beyond the memory, or a value that the class refuses.
    """
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise ValueError(f"{kind}: a name is given, got {dict(spec) if isinstance(spec, Mapping) else spec!r}")
    name, known = spec["name"], parameters(kind, classes, spec["name"], len(context))
    given = {key: value for key, value in spec.items() if key != "name"}
    for key, value in given.items():
        check_known(kind, name, key, known)
        _check_number(kind, name, key, value, known[key])
    missing = [key for key, parameter in known.items() if parameter.default is inspect.Parameter.empty and key not in given]
    if missing:
        raise ValueError(f"{kind} {name}: {', '.join(missing)} must be given, got {', '.join(given) or 'none'}")
    with enough_memory(f"{kind} {name}"):
        return classes[name](*context, **given)


def check_known(kind: str, name: str, key: str, known: Mapping[str, Any]) -> None:
    """Refuse a parameter that is not among those known."""
    if key not in known:
        raise ValueError(f"{kind} {name}: parameter is one of {', '.join(known) or '(it has none)'}, got {key!r}")


def kind_of(parameter: inspect.Parameter) -> Type[Any]:
    """bool, float, int or str; what text is read as where a parameter takes several."""
    return next((k for k in (parameter.annotation, *getattr(parameter.annotation, "__args__", ())) if k in (bool, float, int, str)), str)


def _check_number(kind: str, name: str, key: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse, for all parts alike, what no parameter can be: a number that is not finite or not of its kind."""
    wanted = kind_of(parameter)
    if wanted is str or (value is None and parameter.default is None):
        return
    if wanted is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{kind} {name}: {key} is true or false, got {value!r}")
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is int and (not number or isinstance(value, float) or abs(value) >= WHOLE):
        raise ValueError(f"{kind} {name}: {key} is a whole number below 2^62, got {value!r}")
    if not number or value != value or abs(value) == math.inf:  # math.isfinite raises for whole numbers of more than float64
        raise ValueError(f"{kind} {name}: {key} is a finite number, got {value!r}")
    if abs(value) >= LARGEST:
        raise ValueError(f"{kind} {name}: {key} is below 2^128, where float32 ends, got {value!r}")
