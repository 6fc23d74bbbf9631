"""The weights of a model by what reads them."""

from typing import Dict, List, NamedTuple, Type, TypeVar

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.read_module import OF_MODULE, Model, ReadModule
from posenc_export.models.parts.mlps import Gated, Plain

Part = TypeVar("Part", torch.nn.Linear, torch.nn.Embedding)


class Use(NamedTuple):
    """A weight, read as the matrix of a linear layer or as a table of token ids."""

    weight: Tensor
    linear: bool


def linear_layers(model: Model) -> Dict[str, Tensor]:
    """Return the weights [N,K] of the linear layers that are rounded, by name of the layer."""
    if isinstance(model, ReadModule):
        found = model.by_name(model.products.linear)
        return {name.removesuffix(".weight"): weight for name, weight in found.items()}
    return {name: part.weight for name, part in _parts(model, torch.nn.Linear)}


def tables(model: Model) -> List[Tensor]:
    """Return the weights of the token tables that are rounded."""
    if isinstance(model, ReadModule):
        return list(model.by_name(model.products.tables).values())
    return [table.weight for _, table in _parts(model, torch.nn.Embedding)]


def of_experts(model: Model) -> List[Tensor]:
    """Return the weights [N,K,M] of experts that are rounded."""
    if isinstance(model, ReadModule):
        return list(model.by_name(model.products.experts).values())
    return []


def uses(model: Model) -> List[Use]:
    """Return the uses of all weights that are rounded."""
    linear = [Use(weight, True) for weight in linear_layers(model).values()]
    return linear + [Use(weight, False) for weight in tables(model)]


def of_units(model: Model) -> List[Tensor]:
    """Return the weights of linear layers that read the units of an MLP."""
    if isinstance(model, ReadModule):
        return list(model.by_name(model.products.of_units()).values())
    mlps = [part for part in model.modules() if isinstance(part, (Gated, Plain))]
    return [part.down.weight for part in mlps]


def with_same_input(model: Model) -> Dict[str, str]:
    """Return the name of the first linear layer that reads the same value, for those after it."""
    if isinstance(model, ReadModule):
        same = model.products.with_same_input()
        names = {
            name: OF_MODULE + name.removesuffix(".weight") for pair in same.items() for name in pair
        }
        return {names[name]: names[first] for name, first in same.items()}
    gated = [name for name, part in model.named_modules() if isinstance(part, Gated)]
    return {f"{name}.up": f"{name}.gate" for name in gated}


def _parts(model: Model, kind: Type[Part]) -> List[tuple[str, Part]]:
    """Return the modules of a class by name, without encodings, which stay in float32."""
    encodings = [part for part in model.modules() if isinstance(part, PositionEncoding)]
    inside = {id(part) for encoding in encodings for part in encoding.modules()}
    named = list(model.named_modules(remove_duplicate=False))
    kept = {name for name, part in named if id(part) in inside}
    of_kind = ((name, part) for name, part in model.named_modules() if isinstance(part, kind))
    return [(name, part) for name, part in of_kind if name not in kept]
