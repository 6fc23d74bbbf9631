"""Parameters in the modules that hold them: their places, replacement and shared copies."""

import copy
from typing import Collection, Sequence, TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)
Slot = tuple[torch.nn.Module, str]  # a module, and the name of a parameter in it


def slots(model: torch.nn.Module) -> dict[int, list[Slot]]:
    """Return the slots of each parameter, by its id. A shared parameter has several."""
    places: dict[int, list[Slot]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    return places


def fill(places: Sequence[Slot], parameter: torch.nn.Parameter) -> None:
    """Set a parameter in all slots of another one."""
    for module, name in places:
        setattr(module, name, parameter)


def sharing_weights(model: Module, apart: Collection[int] = ()) -> Module:
    """Return a copy that shares parameters, except those with ids in `apart`, and no buffers."""
    shared = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    return copy.deepcopy(model, {id(parameter): parameter for parameter in shared})
