"""The registry of position encodings: one line each brings an encoding into every target, test, benchmark and page."""

import importlib
import inspect
import math
from typing import Any, Dict, Mapping, Type

from posenc_export.allocation import enough_memory
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding

# The file and the class in it.
CLASSES = {
    "nope": "NoPE",
    "integer": "Integer",
    "normalized": "Normalized",
    "binary": "Binary",
    "sinusoidal": "Sinusoidal",
    "learned": "Learned",
    "hierarchical": "Hierarchical",
    "recurrent": "Recurrent",
    "floater": "FLOATER",
    "multiplicative": "Multiplicative",
    "input_rnn": "InputRNN",
    "conditional_conv": "ConditionalConv",
    "conditional_conv_2d": "ConditionalConv2D",
    "complex_order": "ComplexOrder",
    "rope": "RoPE",
    "rope_linear": "RoPELinear",
    "rope_ntk": "RoPENTK",
    "rope_yarn": "RoPEYaRN",
    "rope_llama3": "RoPELlama3",
    "rope_proportional": "RoPEProportional",
    "rope_dynamic": "RoPEDynamic",
    "rope_longrope": "RoPELongRoPE",
    "rope_2d": "RoPE2D",
    "rope_axial": "RoPEAxial",
    "mrope": "MRoPE",
    "mrope_interleaved": "MRoPEInterleaved",
    "xpos": "XPos",
    "pope": "PoPE",
    "logn": "LogN",
    "alibi": "ALiBi",
    "t5": "T5",
    "kerple": "KERPLE",
    "fire": "FIRE",
    "sandwich": "Sandwich",
    "swin_v2": "SwinV2",
    "shaw": "Shaw",
    "transformer_xl": "TransformerXL",
    "deberta": "DeBERTa",
    "cope": "CoPE",
    "fox": "FoX",
}
REGISTRY: Dict[str, Type[PositionEncoding]] = {name: getattr(importlib.import_module(f"{__name__}.{name}"), cls) for name, cls in CLASSES.items()}

LARGEST, WHOLE = 2.0**128, 1 << 62  # above them float32 is infinite, and sums of int64 may wrap around
__all__ = ["REGISTRY", "Geometry", "Oracle", "PositionEncoding", "build", "parameters", "parse"]


def parameters(name: str) -> Dict[str, inspect.Parameter]:
    """Parameters of a registered encoding, by name.

    Raises:
        ValueError: no encoding of that name.
    """
    if name not in REGISTRY:
        raise ValueError(f"encoding: name is one of {', '.join(REGISTRY)}, got {name!r}")
    return dict(list(inspect.signature(REGISTRY[name].__init__).parameters.items())[2:])


def parse(text: str) -> Dict[str, Any]:
    """'rope:theta=500000,layout=interleaved' to {"name": "rope", "theta": 500000.0, "layout": "interleaved"}; numbers take the parameter's type.

    Raises:
        ValueError: unknown name or parameter, or text that is no name=value list.
    """
    name, _, rest = text.partition(":")
    known = parameters(name)
    spec: Dict[str, Any] = {"name": name}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"encoding {name}: parameters read name=value, got {item!r}")
        _known(name, key, known)
        spec[key] = _typed(name, key, value, known[key])
    return spec


def build(spec: Mapping[str, Any], geometry: Geometry) -> PositionEncoding:
    """The encoding that spec {"name": ..., parameter: value} describes.

    Raises:
        ValueError: unknown name or parameter, a number that is not finite, sizes beyond the memory, or a value the encoding refuses.
    """
    if "name" not in spec:
        raise ValueError(f"encoding: a name is given, got {dict(spec)}")
    name, known = spec["name"], parameters(spec["name"])
    given = {key: value for key, value in spec.items() if key != "name"}
    for key, value in given.items():
        _known(name, key, known)
        _check_number(name, key, value, known[key])
    with enough_memory(f"encoding {name}"):
        return REGISTRY[name](geometry, **given)


def _known(name: str, key: str, known: Mapping[str, Any]) -> None:
    if key not in known:
        raise ValueError(f"encoding {name}: parameter is one of {', '.join(known) or '(it has none)'}, got {key!r}")


def _kind(parameter: inspect.Parameter) -> Type[Any]:
    """float, int or str; what text is read as where a parameter takes several."""
    return next((k for k in (parameter.annotation, *getattr(parameter.annotation, "__args__", ())) if k in (float, int, str)), str)


def _check_number(name: str, key: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse, for all encodings alike, what no parameter can be: a number that is not finite or not of its kind."""
    kind = _kind(parameter)
    if kind is str or (value is None and parameter.default is None):
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int and (not number or isinstance(value, float) or abs(value) >= WHOLE):
        raise ValueError(f"encoding {name}: {key} is a whole number below 2^62, got {value!r}")
    if not number or value != value or abs(value) == math.inf:  # math.isfinite raises for whole numbers of more than float64
        raise ValueError(f"encoding {name}: {key} is a finite number, got {value!r}")
    if abs(value) >= LARGEST:
        raise ValueError(f"encoding {name}: {key} is below 2^128, where float32 ends, got {value!r}")


def _typed(name: str, key: str, value: str, parameter: inspect.Parameter) -> Any:
    kind = _kind(parameter)
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"encoding {name}: {key} is of type {kind.__name__}, got {value!r}") from None
