"""Build parts by name, from a specification {"name": ..., parameter: value}."""

import inspect
import math
import operator
from typing import Any, Collection, Literal, Mapping, get_args, get_origin

from posenc_export.shared.allocation import enough_memory
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name, suggestion

# Limits for floats and integers: float32 is infinite from 2^128 on, and sums of larger int64 may
# overflow.
LARGEST, WHOLE = 2.0**128, 1 << 62
MANY = 20  # names that a message does not list
Spec = Mapping[str, Any]
# Limits that a class declares by parameter: its attribute, the rule in messages, the comparison of
# a value with the limit, and the remedy.
LIMITS = (
    ("least", "of at least", operator.ge, "choose a larger one"),
    ("above", "above", operator.gt, "choose a larger one"),
    ("most", "of at most", operator.le, "choose a smaller one"),
)


def parameters(
    kind: str, classes: Mapping[str, type[Any]], name: str, context: int = 1
) -> dict[str, inspect.Parameter]:
    """Return the constructor parameters of a registered class, by name, without `context` leading
    ones. kind: kind of part, for messages. Raise ValueError for an unknown name.
    """
    check_registered(kind, classes, name)
    signature = inspect.signature(classes[name].__init__, eval_str=True)
    return dict(list(signature.parameters.items())[1 + context :])


def check_registered(kind: str, names: Collection[str], name: str) -> None:
    """Raise ValueError for a name that is not among those of registered classes."""
    if name not in names and len(names) > MANY:
        remedy = f"{suggestion(name, names, '')} posenc list shows all names".strip()
        raise refusal(kind, "a known name", repr(name), remedy)
    check_name(f"{kind}: expected name", name, names)


def build(kind: str, classes: Mapping[str, type[Any]], spec: Spec, *context: Any) -> Any:
    """Build the object of a specification {"name": key of classes, parameter: value}, after the
    leading arguments `context`. Raise ValueError for an unknown name or parameter, a missing one, a
    number that is not finite, sizes that exceed the memory, or a value that the class refuses.
    """
    if not isinstance(spec, Mapping) or "name" not in spec:
        rule = "a specification with a name"
        raise refusal(kind, rule, repr(dict(spec) if isinstance(spec, Mapping) else spec))
    name, known = spec["name"], parameters(kind, classes, spec["name"], len(context))
    values = {key: value for key, value in spec.items() if key != "name"}
    for key, value in values.items():
        check_known(kind, name, key, known)
        _check_type(kind, name, key, value, known[key])
        for attribute, rule, holds, remedy in LIMITS:
            limit = getattr(classes[name], attribute, {}).get(key)
            if limit is not None and value is not None and not holds(value, limit):
                raise refusal(f"{kind} {name}", f"{key} {rule} {limit}", value, remedy)
    required = [key for key, p in known.items() if p.default is inspect.Parameter.empty]
    missing = [key for key in required if key not in values]
    if missing:
        rule = f"{', '.join(missing)} to be given"
        raise refusal(f"{kind} {name}", rule, ", ".join(values) or "none")
    with enough_memory(f"{kind} {name}"):
        try:
            return classes[name](*context, **values)
        except ValueError as error:
            named = name in str(error).partition(":")[0] or str(error).startswith(kind)
            if named or classes[name].__module__.startswith("posenc_export."):
                raise
            raise ValueError(f"{kind} {name}: {error}") from error


def check_known(kind: str, name: str, key: str, known: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown parameter."""
    if key not in known:
        if not known:
            raise ValueError(f"{kind} {name}: expected no parameters, got {key!r}; leave it out")
        rule = f"parameter to be one of {', '.join(known)}"
        raise refusal(f"{kind} {name}", rule, repr(key), suggestion(key, known))


def kind_of(parameter: inspect.Parameter) -> type[Any]:
    """The type of a parameter, or of several the one that text is converted to."""
    accepted = (parameter.annotation, *getattr(parameter.annotation, "__args__", ()))
    return next((kind for kind in accepted if kind in (bool, float, int, str)), str)


def _check_type(kind: str, name: str, key: str, value: Any, parameter: inspect.Parameter) -> None:
    wanted, choices = kind_of(parameter), get_args(parameter.annotation)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if get_origin(parameter.annotation) is Literal and value not in choices:
        rule = f"one of {', '.join(map(str, choices))}"
    elif wanted is str or (value is None and parameter.default is None):
        return
    elif wanted is bool:
        if isinstance(value, bool):
            return
        rule = "true or false"
    elif wanted is int and (not number or isinstance(value, float) or abs(value) >= WHOLE):
        rule = "a whole number below 2^62"
    # math.isfinite raises for integers beyond the range of float64.
    elif not number or value != value or abs(value) == math.inf:
        rule = "a finite number"
    elif abs(value) >= LARGEST:
        rule = "below 2^128, the limit of float32"
    else:
        return
    raise refusal(f"{kind} {name}", f"{key} to be {rule}", repr(value))
