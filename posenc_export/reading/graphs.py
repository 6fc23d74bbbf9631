"""The graph of a trace in few kinds of nodes: attention as single operators, views as reshapes."""

import operator
from typing import Any, NamedTuple, Sequence

import sympy
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from posenc_export.ops.scores import SUFFIX_SUM
from posenc_export.reading.complex_numbers import is_complex, real_numbers
from posenc_export.reading.refused import Refused, operator_of, refuse, without_wrapper
from posenc_export.reading.tracing import added_products, attention, quiet
from posenc_export.reading.values import aten, depending, packet, running_max
from posenc_export.reading.whole import held_by
from posenc_export.reading.writes import without_writes

END = 2**63 - 1  # of a slice
CHOOSES = (
    "chooses as many tokens as the data decides; compute all of them and choose by torch.where,"
    " experts in a dense form"
)
WITHOUT_TOKENS = "leaves no axis of tokens, and not the last token"
TURNS = {aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default}
LARGEST = {aten.max.dim: aten.amax.default, aten.cummax.default: running_max}
COPIES = {
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.detach_.default,
}  # fmt: skip
_NO_VALUE = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"}
_BOUNDING = set("lt le gt ge eq ne floordiv mod min max clamp div floor_divide remainder".split())
_BOUNDING |= set("sym_max sym_min minimum maximum fmod".split())


class Cleaned(NamedTuple):
    """A graph and what its placeholders are; inputs: x, then what the module takes beside it."""

    graph: Graph
    constants: dict[Node, Tensor]
    names: dict[Node, str]
    inputs: list[Node]
    output: Node
    rows: sympy.Symbol
    tokens: sympy.Symbol
    least: int


# Memory that a module fills later is zeros, so that every run gives the same numbers.
VMAP = {torch._C._functorch._add_batch_dim, torch._functorch.predispatch._add_batch_dim}
ZEROS = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}


def every_token(program: ExportedProgram) -> bool:
    """Let a graph that returns the output of the last token alone return that of all tokens. Return
    whether it was such a graph.
    """
    x = next(n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs)
    rows, tokens = x.meta["val"].shape[:2]
    result = results_of(program.graph)[0]
    shape = result.meta["val"].shape
    if len(shape) > 2 and str(shape[1]) == str(tokens):
        return False
    todo, seen, found = [result], set(), []
    while todo:  # the choices of a token that are nearest to the output
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if _chooses_last(node, tokens, program):
            found.append(node)
        else:
            todo += [a for a in node.all_input_nodes if a.op == "call_function"]
    sources = {_first(node) for node in found}
    for node in found:
        node.replace_all_uses_with(_first(node))
    if not found:
        refuse(_without_tokens(result, tokens), WITHOUT_TOKENS)
    program.graph.eliminate_dead_code()
    for node in program.graph.nodes:
        if node.op == "call_function" and not sources.isdisjoint(node.all_input_nodes):
            sources.add(node)
            _compute_again(node, WITHOUT_TOKENS)
    return True


def _compute_again(node: Node, otherwise: str) -> None:
    """Compute meta["val"] of a node again. Refused: it does not take the new inputs."""
    given = torch.fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    try:
        node.meta["val"] = node.target(*given[0], **given[1])  # type: ignore[operator]
    except (RuntimeError, IndexError):  # raised by torch for a shape with other tokens in it
        refuse(node, otherwise)


def _without_tokens(result: Node, tokens: Any) -> Node:
    """Return the last operator before the result that has an axis of tokens in its inputs alone."""

    def has(node: Node) -> bool:
        shape = getattr(node.meta.get("val"), "shape", ())
        return any(str(size) == str(tokens) for size in shape)

    needed, last = {result}, result
    for node in reversed(list(result.graph.nodes)):
        if node in needed:
            if not has(node) and any(has(a) for a in node.all_input_nodes):
                return node
            needed.update(node.all_input_nodes)
    return last


def _chooses_last(node: Node, tokens: Any, program: ExportedProgram) -> bool:
    """Whether a node is x[:, -1], x[:, -1:] or x[:, [-1]] of a value with tokens at that axis."""
    source = node.args[0] if node.args else None
    shape = source.meta["val"].shape if isinstance(source, Node) and "val" in source.meta else ()
    args: tuple[Any, ...] = node.args
    if node.target in (aten.slice.Tensor, aten.select.int):
        axis, start = args[1], args[2]
        start = start.meta["val"] if isinstance(start, Node) else start
        return str(shape[axis]) == str(tokens) and str(start) in ("-1", str(tokens - 1))
    if node.target is aten.index.Tensor:
        chosen = [(i, a) for i, a in enumerate(args[1]) if a is not None]
        if len(chosen) != 1 or str(shape[chosen[0][0]]) != str(tokens):
            return False
        held = chosen[0][1]
        while held.target in COPIES:
            held = held.args[0]
        names = program.graph_signature.inputs_to_lifted_tensor_constants
        value = program.constants.get(names.get(held.name, ""))
        return value is not None and value.tolist() == [-1]
    return False


def clean(program: ExportedProgram, tokens_moved: bool) -> Cleaned:
    """Decompose a program, and return its graph with constants and symbols. tokens_moved: whether
    `every_token` changed the output, whose axis of tokens may then be any.
    """
    _reshaped(program.graph)
    with quiet():
        program = _decomposed(program)
    graph, signature = program.graph, program.graph_signature
    _reshaped(graph)
    results = results_of(graph)
    for written, name in zip(results, signature.buffers_to_mutate.values(), strict=False):
        refuse(written, f"writes to the buffer {without_wrapper(name)}, a state that no call keeps")
    constants: dict[Node, Tensor] = {}
    names: dict[Node, str] = {}
    inputs: list[Node] = []
    held = held_by(program)
    for node in list(graph.nodes):
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(program.graph_module)
            if not isinstance(value, Tensor):
                refuse(next(iter(node.users)), "runs a part of the graph of its own")
            with graph.inserting_before(next(iter(graph.nodes))):
                constant = graph.placeholder(node.name)
            constant.meta = node.meta
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
            constants[constant] = value.detach()
        elif node.op == "placeholder" and node.name in signature.user_inputs:
            inputs.append(node)
        elif node.op == "placeholder":
            name, value = held[node.name]
            constants[node] = value.detach()
            if node.name not in signature.inputs_to_lifted_tensor_constants:
                names[node] = without_wrapper(name)
    _simplified(graph)
    _chosen_by_masks(graph)
    real_numbers(graph, constants)
    for node in list(constants):
        if not node.users and node.op == "placeholder":
            graph.erase_node(node)
            del constants[node]
            names.pop(node, None)
    graph.lint()
    rows, tokens = (symbol_of(size) for size in inputs[0].meta["val"].shape[:2])
    if tokens_moved:
        _tokens_second(graph, rows, tokens)
    least = int(program.range_constraints[tokens].lower)
    return Cleaned(graph, constants, names, inputs, results_of(graph)[0], rows, tokens, least)


def _decomposed(program: ExportedProgram) -> ExportedProgram:
    """Return a program whose operators write to no input and compute real numbers, in one graph.

    torch's decomposition runs the whole graph again, which takes twice the time of the trace. It is
    only called for graphs that need it.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is aten.detach_.default:  # of a constant of the code
            node.replace_all_uses_with(_first(node))
            graph.erase_node(node)
        elif node.target in ZEROS:
            node.target = ZEROS[node.target]
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    if without_writes(graph) and all(_is_plain(node) for node in graph.nodes):
        return program
    return program.run_decompositions(
        {aten.scaled_dot_product_attention.default: attention, aten.baddbmm.default: added_products}
    )


def _is_plain(node: Node) -> bool:
    """Return whether an operator needs no decomposition: it is neither attention as a whole, nor
    complex, nor part of torch.vmap, and has no graph of its own.
    """
    if is_complex(node) or node.target in {aten.scaled_dot_product_attention.default, *VMAP}:
        return False
    return not isinstance(node.target, torch._ops.HigherOrderOperator)


def _tokens_second(graph: Graph, rows: sympy.Symbol, tokens: sympy.Symbol) -> None:
    """Permute the output to [B,S,*] if it has these axes in another order."""
    result = results_of(graph)[0]
    value = result.meta["val"]
    axes = [getattr(getattr(size, "node", None), "expr", None) for size in value.shape]
    if axes.count(rows) != 1 or axes.count(tokens) != 1:
        return
    order = [axes.index(rows), axes.index(tokens)]
    order += [i for i in range(len(axes)) if i not in order]
    if order != sorted(order):
        with graph.inserting_after(result):
            turned = graph.call_function(aten.permute.default, (result, order))
        turned.meta = {**result.meta, "val": value.permute(order)}
        result.replace_all_uses_with(turned, lambda user: user is not turned)


def results_of(graph: Graph) -> list[Node]:
    """Return the values that a graph returns."""
    output = next(n for n in graph.nodes if n.op == "output")
    return list(output.args[0])  # type: ignore[arg-type]


def symbol_of(size: Any) -> sympy.Symbol:
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    if not isinstance(expr, sympy.Symbol):
        raise Refused(f"fixes the rows or tokens of its input at {expr} in a trace")
    return expr


def _reshaped(graph: Graph) -> None:
    """Replace views by reshapes: values of calls have other strides than those of the trace."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        elif node.target is aten.view_as.default:
            x, other = node.args
            sizes: list[Any] = []
            for axis, size in enumerate(other.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    with graph.inserting_before(node):
                        known = graph.call_function(aten.sym_size.int, (other, axis))
                    known.meta, size = {"val": size}, known
                sizes.append(size)
            node.target, node.args = aten.reshape.default, (x, sizes)


def _simplified(graph: Graph) -> None:
    """Remove operators that change no value, and give others one form: LARGEST for maxima without
    indices, linear for products with a transposed weight, expand for repeated axes of one entry,
    and suffix_sum for running sums from the end.
    """
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target is aten.type_as.default:  # reads a dtype alone
            node.target = aten.to.dtype
            node.args = (node.args[0], node.args[1].meta["val"].dtype)
        if operator_of(node) in _NO_VALUE:
            graph.erase_node(node)
        elif node.target is aten.cat.default:  # its axis from the end, also of rows in a stack
            axis, rank = node.args[1] if node.args[1:] else 0, node.meta["val"].dim()
            node.args = (node.args[0], axis % rank - rank)
        elif node.target is aten.matmul.default and _is_turned(node.args[1]):
            node.target, node.args = aten.linear.default, (node.args[0], _first(node.args[1]))
        elif node.target is aten.repeat.default and _is_spread(*node.args):
            ones = len(node.args[1]) - _first(node).meta["val"].dim()
            counts = [n if at < ones or n != 1 else -1 for at, n in enumerate(node.args[1])]
            node.target, node.args = aten.expand.default, (_first(node), counts)
        elif (summed := _summed_from_the_end(node)) is not None:
            node.target, node.args = SUFFIX_SUM, (summed,)
        elif node.target is aten.copy.default and _is_like(node, node.args[1]):
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
        elif node.target in COPIES or _whole_slice(node) or keeps_dtype(node):
            node.replace_all_uses_with(_first(node))
            graph.erase_node(node)
        elif node.target in LARGEST and all(user.args[1] == 0 for user in node.users):
            for user in list(node.users):
                user.target = LARGEST[node.target]
                user.args = (node.args[0], [node.args[1]], *node.args[2:])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_spread(x: Node, counts: Sequence[Any]) -> bool:
    """Whether x.repeat(counts) repeats axes of one entry alone."""
    sizes = [1] * (len(counts) - x.meta["val"].dim()) + [*x.meta["val"].shape]
    pairs = zip(sizes, counts, strict=True)
    return all(count == 1 or (isinstance(size, int) and size == 1) for size, count in pairs)


def _chosen_by_masks(graph: Graph) -> None:
    """Compute all tokens where a mask selects some: x[mask] becomes x, and y[mask] = z becomes
    where(mask, z, y). Refused: data decides in another way how many tokens are computed.
    """
    if not any(free_unbacked_symbols(node.meta.get("val")) for node in graph.nodes):
        return
    changed: set[Node] = set()
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        chosen = node.args[1] if node.target in (aten.index.Tensor, aten.index_put.default) else []
        mask = chosen[0] if isinstance(chosen, (list, tuple)) and len(chosen) == 1 else None
        if mask is not None and mask.meta["val"].dtype == torch.bool:
            new = _for_all(node, mask)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            if node.target is aten.index.Tensor:
                changed.add(new)
        elif not changed.isdisjoint(node.all_input_nodes):
            changed.add(node)
            _compute_again(node, CHOOSES)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            refuse(node, CHOOSES)


def _for_all(node: Node, mask: Node) -> Node:
    """Return a node for all tokens in place of x[mask] or y[mask] = z, inserted before it."""
    graph, source, rank = node.graph, _first(node), mask.meta["val"].dim()
    rest = source.meta["val"].dim() - rank

    def made(operator: Any, *arguments: Any) -> Node:
        with graph.inserting_before(node):
            new = graph.call_function(operator, arguments)
        new.meta = dict(node.meta)
        _compute_again(new, CHOOSES)
        return new

    if node.target is aten.index.Tensor:
        return made(aten.flatten.using_ints, source, 0, rank - 1)
    value: Any = node.args[2]
    if value.meta["val"].dim() == rest + 1 and rank > 1:
        value = made(aten.reshape_as.default, value, source)
    if node.args[3:] == (True,):
        value = made(aten.add.Tensor, source, value)
    for _ in range(rest):
        mask = made(aten.unsqueeze.default, mask, -1)
    return made(aten.where.self, mask, value, source)


def keeps_dtype(node: Node) -> bool:
    """Whether a conversion gives the dtype of its input."""
    converts = packet(node) in (aten.to, aten._to_copy)
    return converts and bool(node.meta["val"].dtype == _first(node).meta["val"].dtype)


def _first(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _is_turned(node: Any) -> bool:
    """Whether a value is the transpose of a constant matrix."""
    if node.target not in TURNS or node.args[0].op != "placeholder" or node.meta["val"].dim() != 2:
        return False
    turned: Tensor = node.target(torch.empty(1, 2, device="meta"), *node.args[1:])
    return turned.shape == (2, 1)


def _summed_from_the_end(node: Node) -> Node | None:
    """Return x if a node is x.flip(-1).cumsum(-1).flip(-1)."""
    nodes = [node]
    for target in (aten.flip.default, aten.cumsum.default, aten.flip.default):
        if nodes[-1].target is not target or nodes[-1].kwargs:
            return None
        axes: Any = nodes[-1].args[1]
        axis = axes if isinstance(axes, int) else axes[0] if len(axes) == 1 else None
        if axis not in (-1, nodes[-1].meta["val"].dim() - 1):
            return None
        nodes.append(_first(nodes[-1]))
    return nodes[-1]


def _is_like(node: Node, other: Any) -> bool:
    """Whether a node has the shape and dtype of another value."""
    values = [one.meta["val"] for one in (node, other)]
    sizes = [list(map(str, value.shape)) for value in values]
    return sizes[0] == sizes[1] and values[0].dtype == values[1].dtype


def _whole_slice(node: Node) -> bool:
    if node.target is not aten.slice.Tensor or len(node.args) > 4:
        return False
    start, end = (*node.args[2:], None, END)[:2] if len(node.args) < 4 else node.args[2:4]
    return start in (0, None) and end in (END, None)


def row_numbers(x: Node, length: int) -> list[int]:
    """Numbers of rows on both sides of each number that guards of the trace compare them with, for
    sequences of a length.
    """
    rows, tokens = (symbol_of(size) for size in x.meta["val"].shape[:2])
    found: set[int] = set()
    for expr in (guard.expr for guard in x.meta["val"].fake_mode.shape_env.guards):
        if rows in expr.free_symbols:
            each = length if tokens in expr.free_symbols else 1
            bounds = [abs(int(n)) // each for n in expr.atoms(sympy.Integer)]
            found |= {n + i for n in bounds for i in (-1, 0, 1)}
    return sorted(n for n in found if n > 1)


def length_numbers(graph: Graph, x: Node) -> list[int]:
    """Return the numbers above 1 with which the module compares, bounds or divides lengths and
    positions, from guards of the trace and nodes that depend on the length alone.
    """
    found: set[int] = set()
    fake = x.meta["val"]
    for guard in fake.fake_mode.shape_env.guards:
        found |= {int(n) for n in guard.expr.atoms(sympy.Integer)}
    for node in set(graph.nodes) - depending(graph, [x]):
        if operator_of(node).strip("_") in _BOUNDING:
            numbers = [n for n in (*node.args, *node.kwargs.values()) if type(n) in (int, float)]
            found |= {int(n) for n in numbers if abs(n) < 2**31}
    return sorted({abs(n) for n in found if abs(n) > 1})
