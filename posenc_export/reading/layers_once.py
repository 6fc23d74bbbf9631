"""Layers that are alike are traced once: in a trace, the third and further layers of a kind are one
node each, in whose place stand copies of the nodes of the second one afterwards.

Layers are alike if they hold the same besides the numbers of their weights and their own index, and
are called with the same values besides one or more tensors of the same shapes. This is what the
code of a layer usually reads; a trace for which it is not enough gives other numbers than the
module, and is made again of all layers (capture.py).
"""

import functools
from typing import Any, Callable, Dict, List, Mapping, NamedTuple

import torch
from torch import Tensor, library, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from posenc_export.reading.layer_contents import PLAIN, Content, contents_of, tensors_of

KEPT = 1  # layers of a kind that are traced
library.define(
    "posenc_reading::layer", "(Tensor[] read, Tensor[] given, Tensor[] own, str layer) -> Tensor[]"
)
STAND_IN = torch.ops.posenc_reading.layer.default


@library.register_fake("posenc_reading::layer")
def _(read: List[Tensor], given: List[Tensor], own: List[Tensor], layer: str) -> List[Tensor]:
    return [value.new_empty(value.shape) for value in given]


class _Call(NamedTuple):
    """A call of a layer: the leaves of its arguments and of its results, and their structures."""

    read: List[Any]
    form: Any
    given: List[Any]
    returns: Any


class LayersOnce:
    """The layers of a module of which a trace has one node each.

    Args:
        module: whose layers stand in lists, nn.ModuleList or nn.Sequential.

    Attributes:
        templates: for each such layer, the layer whose nodes are copied, by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.templates: Dict[str, str] = {}
        for name, part in module.named_modules():
            if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > KEPT:
                self._add(name, contents_of([*part]))

    def _add(self, name: str, contents: List[Content]) -> None:
        for index, content in enumerate(contents):
            alike = [i for i in range(index) if _alike(contents[i], content, i, index)]
            if len(alike) >= KEPT:
                self.templates[f"{name}.{index}"] = f"{name}.{alike[KEPT - 1]}"

    def leave_out(self, module: nn.Module) -> None:
        """Replace forward of layers in a copy of the module, which is to be traced."""
        calls: Dict[str, List[_Call]] = {name: [] for name in self.templates.values()}
        for name, of_layer in calls.items():
            _replace(module.get_submodule(name), _noted, of_layer)
        for name, template in self.templates.items():
            _replace(module.get_submodule(name), _left_out, calls[template], name)

    def completed(self, program: ExportedProgram, module: nn.Module) -> None:
        """Put copies of the nodes of layers in the place of the nodes that stand for others."""
        graph, signature = program.graph, program.graph_signature
        left_out = [node for node in graph.nodes if node.target is STAND_IN]
        inside: Dict[str, Dict[Node, None]] = {}
        for node in left_out:  # layers within a template come before its copies
            name = str(node.args[3])
            template = self.templates[name]
            of = _weights(program, module, template, name)
            nodes = inside[template] = inside.get(template) or _inside(program, template)
            read, given, own, _ = node.args
            of |= zip((_named(one, nodes, False) for one in read), own, strict=True)
            given = [_named(one, nodes, True) for one in given]
            with graph.inserting_before(node):
                for inner in nodes:
                    of[inner] = graph.node_copy(inner, lambda other, of=of: of.get(other, other))
            for user in list(node.users):
                made = of[given[user.args[1]]]
                signature.replace_all_uses(user.name, made.name)
                user.replace_all_uses_with(made)
                graph.erase_node(user)
            graph.erase_node(node)
        graph.lint()
        program.graph_module.recompile()


def _replace(layer: nn.Module, by: Callable[..., Any], *given: Any) -> None:
    layer.forward = functools.partial(by, layer.forward, *given)  # type: ignore[method-assign]


def _noted(own: Callable[..., Any], calls: List[_Call], *args: Any, **kwargs: Any) -> Any:
    """Call a layer, and note the call."""
    result = own(*args, **kwargs)
    calls.append(_Call(*pytree.tree_flatten((args, kwargs)), *pytree.tree_flatten(result)))
    return result


def _left_out(
    own: Callable[..., Any], calls: List[_Call], name: str, *args: Any, **kwargs: Any
) -> Any:
    """Return results like those of the template, if it was called once and alike."""
    leaves, form = pytree.tree_flatten((args, kwargs))
    if len(calls) != 1 or calls[0].form != form:
        return own(*args, **kwargs)
    call = calls[0]
    pairs = [(a, b) for a, b in zip(call.read, leaves, strict=True) if a is not b]
    if not pairs or not all(_exchangeable(a, b) for a, b in pairs):
        return own(*args, **kwargs)
    pairs = [(a, b) for a, b in pairs if isinstance(a, Tensor)]
    given = [value for value in call.given if isinstance(value, Tensor)]
    made = iter(STAND_IN([a for a, _ in pairs], given, [b for _, b in pairs], name))
    results = [next(made) if isinstance(value, Tensor) else value for value in call.given]
    return pytree.tree_unflatten(results, call.returns)


def _exchangeable(first: Any, second: Any) -> bool:
    """Whether two layers that are called with these values are called alike."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        shapes = f"{first.dtype} {list(first.shape)}", f"{second.dtype} {list(second.shape)}"
        return shapes[0] == shapes[1]
    return type(first) is type(second) and type(first) in PLAIN and bool(first == second)


def _named(node: Node, layer: Mapping[Node, None], inside: bool) -> Node:
    """Return the value of a node as it is named within a layer or before it: a conversion to the
    same dtype gives the same tensor, for which a trace has the name of the last one.
    """
    while (node in layer) != inside:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _inside(program: ExportedProgram, name: str) -> Dict[Node, None]:
    """Return the nodes of a layer, in order."""

    def within(node: Node) -> bool:
        stack = node.meta.get("nn_module_stack", {}).values()
        return any(path == name or path.startswith(f"{name}.") for path, _ in stack)

    return {n: None for n in program.graph.nodes if n.op == "call_function" and within(n)}


def _weights(
    program: ExportedProgram, module: nn.Module, template: str, name: str
) -> Dict[Node, Node]:
    """Return the placeholders of the weights of a layer by those of its template."""
    signature, nodes = program.graph_signature, {n.name: n for n in program.graph.nodes}
    held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    of = {held[node]: nodes[node] for node in held}
    layers = (dict(tensors_of(module.get_submodule(layer))) for layer in (template, name))
    theirs, own = layers
    return {
        of[f"{template}.{inner}"]: of[f"{name}.{inner}"]
        for inner in own
        if own[inner] is not theirs[inner]
    }


def _alike(first: Any, second: Any, i: int, j: int) -> bool:
    """Whether two contents are equal, but for whole numbers i in the first and j in the second."""
    if first == second or first == (int, repr(i)) and second == (int, repr(j)):
        return True
    both = isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second)
    return both and all(_alike(a, b, i, j) for a, b in zip(first, second, strict=True))
