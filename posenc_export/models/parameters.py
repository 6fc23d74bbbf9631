"""Parameters in the modules that hold them: their places, replacement and shared copies."""

import copy
from typing import Collection, Dict, List, Sequence, Tuple, TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)
Slot = Tuple[torch.nn.Module, str]  # a module, and the name of a parameter in it


def slots(model: torch.nn.Module) -> Dict[int, List[Slot]]:
    """Return the slots of each parameter, by its id. A shared parameter has several."""
    places: Dict[int, List[Slot]] = {}
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
