"""A module on whole sequences: in its own code, and traced."""

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Iterable, Optional

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, Interpreter, Node

from posenc_export.reading.refused import Refused

Beside = tuple[Tensor, ...]  # what a module takes beside its tokens
Path = tuple[int | str, ...]  # where a tensor stands in what forward returns


@dataclass(eq=False)
class Capture:
    """A module traced on whole sequences, and the module itself.

    graph: aten operators. Its placeholders are `constants`, `input` x [B,S] or [B,S,E],
    `positions` [B,S] or [S] or coordinates [A,B,S], and `memory` [B,M,N] with its mask [B,M] for a
    decoder that reads an encoder. Its output is `output` [B,S,*] of all tokens.
    rows, tokens, sources: the symbols B, S and M of its shapes.
    constants, names: weights, buffers and tables of the trace, and their names in the module.
    least: the smallest S for which the trace is valid.
    lengths: numbers that the module compares, divides or bounds a length with.
    batches: numbers of rows near those that it compares with them.
    remedies: what the trace needed beside torch.export, a phrase each.
    gives_last_token: the module returns the output of the last token alone.
    example: x [3,S] or [3,S,E] of tokens that differ, for checks by numbers.
    copies: by name of a layer that the graph may leave out (reading/parts.py), the first layer of
    its kind.
    short: the capture with one layer of each kind, which has the same properties; None for none.
    """

    where: str
    graph: Graph
    constants: dict[Node, Tensor]
    names: dict[Node, str]
    input: Node
    positions: Node | None
    output: Node
    rows: sympy.Symbol
    tokens: sympy.Symbol
    least: int
    max_positions: int
    lengths: list[int]
    batches: list[int]
    remedies: list[str]
    gives_last_token: bool
    example: Tensor
    causal: bool
    module: "OneTensor" = field(repr=False)
    memory: tuple[Node, ...] = ()
    sources: sympy.Symbol | None = None
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
        """Draw coordinates [A,B,S] from the whole range, or outputs of an encoder [B,M,N] with a
        mask of 1 to M tokens in each row; nothing if the module takes neither.
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
        """Return the output of the module itself for whole sequences x, [B,S,*], or [B,1,*] of the
        last token. fresh: whether to call a new copy. beside: as for OneTensor.inputs.
        """
        y = (self.module.copied() if fresh else self.module).of(x, beside)
        return y.unsqueeze(1) if self.gives_last_token and y.dim() == 2 else y

    def whole(self, x: Tensor, beside: Beside = ()) -> Tensor:
        """Return the output [B,S,*] of all tokens of whole sequences x, from the module itself, or
        from its trace if the module returns that of the last token alone.
        """
        return (self.traced if self.gives_last_token else self.own)(x, beside=beside)

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters of the module; tied parameters have several."""
        return [name for name, _ in self.module.module.named_parameters(remove_duplicate=False)]

    @property
    def weights(self) -> int:
        """Number of entries of all constants."""
        return count_numbers(self.constants.values())

    def traced(self, x: Tensor, beside: Beside = ()) -> Tensor:
        """Return the output [B,S,*] of the graph for whole sequences x."""
        further = (*([] if self.positions is None else [self.positions]), *self.memory)
        given = dict(zip((self.input, *further), self.module.inputs(x, beside), strict=True))
        given |= self.constants
        values = [given[n] for n in self.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            result: Tensor = Interpreter(nn.Module(), graph=self.graph).run(*values)[0]
        return result


class OneTensor(nn.Module):
    """A module that maps x and positions to one tensor of its output.

    module: in eval mode. positions: name of its argument. before: sizes of the axes of positions
    before the axis of tokens, 0 for rows. path: place of the tensor in the output. memory: example
    outputs of an encoder [1,M,N], for a module that takes them with a mask; None for others.
    """

    def __init__(
        self,
        module: nn.Module,
        positions: str | None,
        before: tuple[int, ...],
        path: Path,
        memory: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.module, self.argument, self.before = module, positions, before
        self.path, self.memory = path, memory

    def forward(
        self, x: Tensor, beside: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        named = {} if self.argument is None else {self.argument: beside}
        value = self.module(x, *([] if mask is None else [beside, mask]), **named)
        for key in self.path:
            if isinstance(key, int) or isinstance(value, Mapping):
                value = value[key]
            else:
                value = getattr(value, key)
        return value

    def inputs(self, x: Tensor, beside: Beside = ()) -> tuple[Tensor, ...]:
        """Return x and the further inputs of the module: coordinates, by default positions, or
        outputs of an encoder and their mask, by default those of the example in all rows.
        """
        if self.memory is not None and not beside:
            memory = self.memory.expand(x.shape[0], -1, -1).contiguous()
            beside = memory, torch.ones(memory.shape[:2], dtype=torch.int64)
        elif self.argument is not None and not beside:
            beside = (self.counted(*x.shape[:2]),)
        return (x, *beside)

    def counted(self, rows: int, length: int) -> Tensor:
        """Return positions 0, 1, ..., with the axes that the module's argument has."""
        sizes = [size or rows for size in self.before]
        return torch.arange(length).expand(*sizes, -1).contiguous()

    def of(self, x: Tensor, beside: Beside = ()) -> Tensor:
        """Return the output for x, without a gradient."""
        with torch.no_grad():
            result: Tensor = self(*self.inputs(x, beside))
        return result

    def copied(self) -> "OneTensor":
        inside = private_copy(self.module)
        return OneTensor(inside, self.argument, self.before, self.path, self.memory)

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers of the module by all of their names."""
        found: dict[str, Tensor] = dict(self.module.named_buffers(remove_duplicate=False))
        return {**found, **dict(self.module.named_parameters(remove_duplicate=False))}

    def layers(self) -> dict[int, str]:
        """Return the names of the layers by id."""
        return {id(layer): name for name, layer in self.named_modules()}


def held_by(program: ExportedProgram) -> dict[str, tuple[str, Tensor]]:
    """Return names and values of weights, buffers and constants of a trace, by placeholder."""
    of, known = program.graph_signature, {**program.constants, **program.state_dict}
    inside = {**of.inputs_to_parameters, **of.inputs_to_buffers}
    inside |= of.inputs_to_lifted_tensor_constants
    return {node: (name, known[name]) for node, name in inside.items()}


def count_numbers(tensors: Iterable[Tensor]) -> int:
    """Return the number of entries of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def private_copy(module: nn.Module) -> nn.Module:
    """Return a copy in eval mode that shares parameters, and has its own buffers and attributes."""
    memo: dict[int, Any] = {id(p): p for p in module.parameters()}
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(module, memo).eval()
    except (RuntimeError, TypeError) as error:
        said = f"cannot be copied, and a trace may leave its values on it: {error}"
        raise Refused(said) from error


def of_length(x: Tensor, length: int) -> Tensor:
    """Return the rows of x, repeated to a length."""
    return torch.cat([x] * -(-length // x.shape[1]), 1)[:, :length]
