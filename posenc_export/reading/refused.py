"""Why a module cannot be read: one line with the layer, the operator and the line of its source."""

import re
import traceback
from contextlib import contextmanager
from types import FrameType
from typing import Iterator, NoReturn

from torch import nn
from torch.fx import Node

from posenc_export.shared.foreign import last_line

WRAPPER = "module"  # the name of the person's module within the one that is traced


class Refused(ValueError):
    """The module cannot be read; one line says where and why."""


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Add `where: ` to the messages of refusals in the block, and join their lines."""
    try:
        yield
    except Refused as error:
        said = " ".join(str(error).split())
        if said.startswith(where):
            raise
        raise Refused(f"{where}: {said}") from error


def refuse(node: Node, why: str) -> NoReturn:
    """Raise Refused: `layer: operator why (file:line: code)` for a node of a trace."""
    raise Refused(joined(layer_of(node), f"{operator_of(node)} {why}", line_of(node)))


def joined(layer: str, why: str, line: str) -> str:
    """Return `layer: why (line)`, without what is empty."""
    return (f"{layer}: " if layer else "") + why + (f" ({line})" if line else "")


def operator_of(node: Node) -> str:
    """Return an operator's name as people write it: `cumsum`, not `aten.cumsum.default`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def layer_of(node: Node) -> str:
    """Return the name of the layer in which a node was traced; empty for the module itself."""
    layers = [str(entry[0]) for entry in (node.meta.get("nn_module_stack") or {}).values()]
    return without_wrapper(layers[-1]) if layers else ""


def without_wrapper(name: str) -> str:
    """Return the name of a layer or weight in the person's module."""
    return name.removeprefix(WRAPPER).removeprefix(".")


def line_of(node: Node) -> str:
    """Return the line of the person's code that made a node, as `folder/file.py:12: code`."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return last_line([(file, int(number)) for file, number in frames])


def place(frames: list[FrameType], names: dict[int, str]) -> tuple[str, str]:
    """Return the layer and the line of the person's code in a call stack.

    frames: outermost first. names: of the traced layers, by id.
    """
    held = [frame.f_locals.get("self") for frame in frames]
    layers = [
        names[id(layer)] for layer in held if isinstance(layer, nn.Module) and id(layer) in names
    ]
    line = last_line([(frame.f_code.co_filename, frame.f_lineno) for frame in frames])
    return (without_wrapper(layers[-1]) if layers else ""), line


def place_of_error(error: BaseException, names: dict[int, str]) -> tuple[str, str]:
    """Return the layer and the line of the person's code where an error was raised."""
    steps = list(traceback.walk_tb(error.__traceback__))
    layer, _ = place([frame for frame, _ in steps], names)
    return layer, last_line([(frame.f_code.co_filename, number) for frame, number in steps])
