"""The registry of encodings; a word adds one to every target, test, benchmark and page."""

import importlib
import inspect
from typing import Any, Mapping, Sequence

import torch

from posenc_export.encodings.shared import plugins
from posenc_export.encodings.shared.base import (
    Exact,
    Geometry,
    Oracle,
    PositionEncoding,
    Seen,
    StateSpec,
    Table,
)
from posenc_export.encodings.shared.combined import Combined
from posenc_export.encodings.shared.functions import bias, rotation
from posenc_export.encodings.shared.plugins import Package
from posenc_export.shared import registry
from posenc_export.shared.refusal import refusal

# Modules of this folder, each with the class of one encoding.
NAMES = """
    nope integer normalized binary sinusoidal sinusoidal_2d learned learned_2d boxes hierarchical
    recurrent floater multiplicative input_rnn conditional_conv conditional_conv_2d complex_order
    rope rope_linear rope_ntk rope_yarn rope_llama3 rope_proportional rope_trained rope_dynamic
    rope_longrope dual_chunk rope_2d rope_axial rope_normalized mrope mrope_interleaved xdrope xpos
    pope logn infused alibi t5 kerple fire sandwich dynamic_bias swin swin_v2 layout_bias
    decomposed_2d shaw transformer_xl wavlm inkling deberta cope fox fox_pair
""".split()


def _class_in(name: str) -> type[PositionEncoding]:
    """Return the encoding that a module of this folder defines."""
    place = f"{__name__}.{name}"
    return next(
        value
        for value in vars(importlib.import_module(place)).values()
        if inspect.isclass(value)
        and issubclass(value, PositionEncoding)
        and value.__module__ == place
    )


REGISTRY: dict[str, type[PositionEncoding]] = {name: _class_in(name) for name in NAMES}
# Built-in encodings, encodings added by `register`, and entry points of installed packages.
KNOWN = plugins.Known(REGISTRY)

__all__ = [
    "KNOWN",
    "REGISTRY",
    "Exact",
    "Geometry",
    "Oracle",
    "Package",
    "PositionEncoding",
    "Seen",
    "StateSpec",
    "Table",
    "bias",
    "build",
    "build_all",
    "origin",
    "parameters",
    "parse",
    "register",
    "rotation",
]


def register(name: str, cls: type[PositionEncoding]) -> None:
    """Register an encoding class under a name, for this process.

    An installed package offers its encodings to every process through the entry-point group
    `posenc_export.encodings`. Registering a class again with the same module and qualified name, as
    when a notebook cell is run again, replaces the earlier class.

    Args:
        name: lower-case letters, digits and _.
        cls: class whose constructor takes a Geometry, then parameters with names and types.

    Raises:
        ValueError: a name that is taken, a class that is not a PositionEncoding, a parameter
            without a type.
    """
    KNOWN.add(name, cls)


def origin(name: str) -> Package | None:
    """Return the package that an encoding comes from, or None for a built-in encoding.

    Raises:
        ValueError: unknown name.
    """
    parameters(name)
    return KNOWN.origin(name)


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the constructor parameters of an encoding, by name.

    Raises:
        ValueError: unknown name, or an entry point that cannot be used.
    """
    return registry.parameters("encoding", KNOWN, name)


def parse(text: str) -> dict[str, Any]:
    """Parse 'rope:theta=500000,layout=interleaved' to {"name": "rope", "theta": 500000.0, "layout":
    "interleaved"}; values take the parameter's type.

    Raises:
        ValueError: unknown name or parameter, a name that several encodings have, or text that is
            not a list of name=value.
    """
    name, _, rest = text.partition(":")
    known = parameters(name)
    KNOWN.check_one(name)
    spec: dict[str, Any] = {"name": name}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        registry.check_known("encoding", name, key, known)
        if not equals or key in spec:
            rule = "parameters as name=value, each once"
            raise refusal(f"encoding {name}", rule, repr(item), f"write {name}:{key}=VALUE")
        kind = registry.kind_of(known[key])
        try:
            spec[key] = kind(value)
        except ValueError:
            rule, where = f"{key} of type {kind.__name__}", f"encoding {name}"
            raise refusal(where, rule, repr(value), "give another value") from None
    return spec


def build(spec: Mapping[str, Any], geometry: Geometry) -> PositionEncoding:
    """Build the encoding that spec {"name": ..., parameter: value} describes.

    Raises:
        ValueError: unknown name or parameter, a number that is not finite, sizes that exceed the
            memory, or a value that the encoding refuses.
    """
    encoding: PositionEncoding = registry.build("encoding", KNOWN, spec, geometry)
    encoding.built = (spec["name"], geometry)
    return encoding


def build_all(specs: Sequence[Mapping[str, Any]], geometry: Geometry) -> PositionEncoding:
    """Build one encoding that applies all of `specs` in order; NoPE if `specs` is empty.

    Raises:
        ValueError: see `build` and Combined.
    """
    # Tables need values, even if the weights are created on the meta device.
    with torch.device("cpu"):
        parts = [build(spec, geometry) for spec in specs or [{"name": "nope"}]]
    return parts[0] if len(parts) == 1 else Combined(parts)
