"""A module on whole sequences: in its own code, and traced."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Interpreter, Node

from posenc_export.reading.refused import Refused

Beside = Tuple[Tensor, ...]  # what a module takes beside its tokens
Path = Tuple[Union[int, str], ...]  # where a tensor stands in what forward returns


@dataclass(eq=False)
class Capture:
    """A module traced on whole sequences, and the module itself.

    graph: aten operators; its placeholders are `constants`, `input` x [B,S] or [B,S,E],
    `positions` [B,S] or [S] or coordinates [A,B,S], and `memory` [B,M,N] with its mask [B,M] of a
    decoder that reads an encoder; its output is `output` [B,S,*] of all tokens.
    rows, tokens, sources: the symbols B, S and M of its shapes.
    constants, names: weights, buffers and tables of the trace, and how the module calls them.
    least: the smallest S for which the trace is valid.
    lengths: numbers that the module compares, divides or bounds a length with.
    remedies: what the trace needed beside torch.export, a phrase each.
    gives_last_token: the module returns the output of the last token alone.
    example: x [3,S] or [3,S,E] of tokens that differ, for checks by numbers.
    copies: layers that may be left out of the graph (reading/parts.py), by the first of their kind.
    short: a module and its graph with one layer of each kind, which have the same properties; None
    if there is none.
    """

    where: str
    graph: Graph
    constants: Dict[Node, Tensor]
    names: Dict[Node, str]
    input: Node
    positions: Optional[Node]
    output: Node
    rows: sympy.Symbol
    tokens: sympy.Symbol
    least: int
    max_positions: int
    lengths: List[int]
    remedies: List[str]
    gives_last_token: bool
    example: Tensor
    causal: bool
    module: "OneTensor" = field(repr=False)
    memory: Tuple[Node, ...] = ()
    sources: Optional[sympy.Symbol] = None
    copies: Mapping[str, str] = field(default_factory=dict)
    short: Optional["Capture"] = field(default=None, repr=False)

    def __deepcopy__(self, memo: Any) -> "Capture":
        """Return itself: copies of a reading share the module that was read."""
        return self

    def with_weights(self, weights: Mapping[str, Tensor]) -> "Capture":
        """Return the same module with other numbers in some of its weights, by name."""
        module = self.module.copied()
        named = list(module.module.named_parameters(remove_duplicate=False))
        old = {id(value): weights[name] for name, value in named if name in weights}
        for name, value in named:
            if id(value) in old:  # under each of its names
                owner, _, last = name.rpartition(".")
                new = nn.Parameter(old[id(value)], requires_grad=False)
                setattr(module.module.get_submodule(owner), last, new)
        constants = {
            node: weights.get(self.names.get(node, ""), value)
            for node, value in self.constants.items()
        }
        return dataclasses.replace(self, constants=constants, module=module)

    @property
    def axes(self) -> int:
        """Number of coordinates A of each token, 0 if the module takes none."""
        return self.module.before[0] if len(self.module.before) > 1 else 0

    def drawn(self, rows: int, length: int) -> Beside:
        """Coordinates [A,B,S] from the whole range, or outputs of an encoder [B,M,N] with a mask
        of 1 to M tokens in each row; none if the module takes neither.
        """
        generator, shape = torch.Generator().manual_seed(7), (self.axes, rows, length)
        if (memory := self.module.memory) is not None:
            some = torch.randn(rows, *memory.shape[1:], generator=generator)
            counts = memory.shape[1] - torch.arange(rows) % memory.shape[1]
            return some, torch.arange(memory.shape[1]).lt(counts[:, None]).long()
        if not self.axes:
            return ()
        return (torch.randint(self.max_positions, shape, generator=generator),)

    def own(self, x: Tensor, fresh: bool = False, beside: Beside = ()) -> Tensor:
        """The module's own output [B,S,*] for whole sequences x; [B,1,*] if it gives that of the
        last token alone. fresh: as the first call of a module. beside: as of OneTensor.inputs.
        """
        y = (self.module.copied() if fresh else self.module).of(x, beside)
        return y.unsqueeze(1) if self.gives_last_token and y.dim() == 2 else y

    def whole(self, x: Tensor, beside: Beside = ()) -> Tensor:
        """Output [B,S,*] of all tokens of whole sequences x, by the module itself; by its trace
        if the module gives that of the last token alone.
        """
        return (self.traced if self.gives_last_token else self.own)(x, beside=beside)

    @property
    def parameters(self) -> List[str]:
        """Names of the parameters of the module, tied ones under each of theirs."""
        return [name for name, _ in self.module.module.named_parameters(remove_duplicate=False)]

    @property
    def weights(self) -> int:
        """How many numbers the constants hold."""
        return count_numbers(self.constants.values())

    def traced(self, x: Tensor, beside: Beside = ()) -> Tensor:
        """Output [B,S,*] of the graph for whole sequences x."""
        further = (*([] if self.positions is None else [self.positions]), *self.memory)
        given = dict(zip((self.input, *further), self.module.inputs(x, beside), strict=True))
        given |= self.constants
        values = [given[n] for n in self.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            result: Tensor = Interpreter(nn.Module(), graph=self.graph).run(*values)[0]
        return result


class OneTensor(nn.Module):
    """A module from x and positions to one tensor of its output.

    module: in eval mode. positions: name of its argument. before: sizes of the axes of positions
    before that of tokens, 0 for that of rows. path: where the tensor stands. memory: outputs of an
    encoder [1,M,N] as an example, for a module that takes them with a mask; None for others.
    """

    def __init__(
        self,
        module: nn.Module,
        positions: Optional[str],
        before: Tuple[int, ...],
        path: Path,
        memory: Optional[Tensor] = None,
    ) -> None:
        super().__init__()
        self.memory = memory
        self.module = module
        self.argument = positions
        self.before = before
        self.path = path

    def forward(
        self, x: Tensor, beside: Optional[Tensor] = None, mask: Optional[Tensor] = None
    ) -> Tensor:
        named = {} if self.argument is None else {self.argument: beside}
        value = self.module(x, *([] if mask is None else [beside, mask]), **named)
        for key in self.path:
            if isinstance(key, int) or isinstance(value, Mapping):
                value = value[key]
            else:
                value = getattr(value, key)
        return value

    def inputs(self, x: Tensor, beside: Beside = ()) -> Tuple[Tensor, ...]:
        """x, and what the module takes beside it: coordinates, by default positions, or outputs of
        an encoder and their mask, by default those of the example in all rows.
        """
        if self.memory is not None and not beside:
            memory = self.memory.expand(x.shape[0], -1, -1).contiguous()
            beside = memory, torch.ones(memory.shape[:2], dtype=torch.int64)
        elif self.argument is not None and not beside:
            beside = (self.counted(*x.shape[:2]),)
        return (x, *beside)

    def counted(self, rows: int, length: int) -> Tensor:
        """Positions 0, 1, ... of tokens, also as each of their coordinates."""
        sizes = [size or rows for size in self.before]
        return torch.arange(length).expand(*sizes, -1).contiguous()

    def of(self, x: Tensor, beside: Beside = ()) -> Tensor:
        """The output for x, without a gradient."""
        with torch.no_grad():
            result: Tensor = self(*self.inputs(x, beside))
        return result

    def copied(self) -> "OneTensor":
        inside = private_copy(self.module)
        return OneTensor(inside, self.argument, self.before, self.path, self.memory)

    def tensors(self) -> Dict[str, Tensor]:
        """Parameters and buffers of the module by all of their names."""
        found: Dict[str, Tensor] = dict(self.module.named_buffers(remove_duplicate=False))
        return {**found, **dict(self.module.named_parameters(remove_duplicate=False))}

    def layers(self) -> Dict[int, str]:
        """Names of the layers by id."""
        return {id(layer): name for name, layer in self.named_modules()}


def held_by(program: ExportedProgram) -> Dict[str, Tuple[str, Tensor]]:
    """The names and values of weights, buffers and constants of a trace, by their placeholders."""
    of, known = program.graph_signature, {**program.constants, **program.state_dict}
    inside = {**of.inputs_to_parameters, **of.inputs_to_buffers}
    inside |= of.inputs_to_lifted_tensor_constants
    return {node: (name, known[name]) for node, name in inside.items()}


def count_numbers(tensors: Iterable[Tensor]) -> int:
    """Return how many numbers tensors hold."""
    return sum(tensor.numel() for tensor in tensors)


def private_copy(module: nn.Module) -> nn.Module:
    """A copy in eval mode that shares parameters, and has its own buffers and attributes."""
    memo: Dict[int, Any] = {id(p): p for p in module.parameters()}
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(module, memo).eval()
    except (RuntimeError, TypeError) as error:
        raise Refused(
            f"cannot be copied, and a trace may leave its values on it: {error}"
        ) from error


def of_length(x: Tensor, length: int) -> Tensor:
    """The rows of x, repeated to a length."""
    return torch.cat([x] * -(-length // x.shape[1]), 1)[:, :length]
