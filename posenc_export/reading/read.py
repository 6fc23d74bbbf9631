"""Read any torch module that maps whole sequences as one that takes positions and caches."""

import copy
from typing import Any, Callable, Sequence, TypeVar

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.ops import TokenPlaces
from posenc_export.reading.attention import Attentions
from posenc_export.reading.axes import kinds, same
from posenc_export.reading.calls import Calls
from posenc_export.reading.capture import capture
from posenc_export.reading.causality import findings, refuse_seen_later_keys
from posenc_export.reading.flat import flat_graph
from posenc_export.reading.lengths import Lengths
from posenc_export.reading.operators import Operators
from posenc_export.reading.parts import Flat, completed, whole_of
from posenc_export.reading.properties import Properties
from posenc_export.reading.refused import Refused, naming, refuse
from posenc_export.reading.script import with_source
from posenc_export.reading.steps import OverKeys
from posenc_export.reading.values import LAYOUT, Values, aten, packet
from posenc_export.reading.whole import Capture

# Operators that keep ids, or replace only the ids of pictures and sounds.
KEEPS_IDS = LAYOUT | {
    aten.to,
    aten.where,
    aten.masked_fill,
    aten.clamp,
    aten.index_put,
    aten.remainder,
}
MOST_IDS = 2**24  # ids that caches of float32 can hold
PIECES = (3, 4, 5)  # tokens at which the calls of the last comparison end


class CachedModule(torch.nn.Module):
    """A module that was read: it maps new tokens, positions and caches instead of whole sequences.

    Attributes:
        caches: of the states, in their order.
        vocabulary: number of token ids, 0 for hidden states.
        width: of hidden states, 0 for token ids.
        outputs: number N of outputs for each token.
        max_positions: number of positions.
        whole: the largest whole number that caches keep for a token of the example.
        memory: heads and size of each part of the outputs of an encoder that calls take.
        where: name of the module in messages.
        repeated: the graph with one layer of each kind; None if few layers are alike.
    """

    __jit_ignored_attributes__ = ["captured", "caches", "flat", "repeated", "memory"]

    def __init__(self, captured: Capture, calls: Calls, flat: Flat) -> None:
        super().__init__()
        self.captured, self.calls = captured, with_source(flat.graph)
        self.flat = copy.deepcopy(flat.graph.graph)  # which holds no weights
        self.caches, self.repeated, self.memory = flat.caches, flat.repeated, calls.memory
        x, y = captured.example, calls.values.of[calls.values.out]
        self.width = 0 if x.dim() == 2 else x.shape[2]
        self.vocabulary = 0 if x.dim() == 3 else _vocabulary(captured)
        self.outputs = y.shape[2]
        self.max_positions, self.whole = captured.max_positions, calls.whole
        self.where = captured.where
        self.takes_index = calls.selected is not None
        self.readout: Any = None  # of outputs and positions, for whole sequences

    def forward(
        self,
        x: Tensor,
        places: TokenPlaces,
        states: list[Tensor],
        logits_index: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute new tokens.

        Args:
            x: token ids [B,S] int64 or hidden states [B,S,E].
            places: of the tokens, with coordinates [A,B,S] for a module that takes them.
            states: caches [B,heads,P or T,size]. Of a module that reads an encoder, these follow:
                the mask [B,M] int64, and keys and values [B,heads,M,size] of each layer.
            logits_index: columns [B,R] int64 of the tokens whose output is returned; None for all.
            segments: token types [B,S] of a module whose ids are type * vocabulary + token.

        Returns:
            the output [B,S,N] or [B,R,N], and the new states or, with a readout, its output.
        """
        if segments is not None:
            x = x + segments * self.vocabulary
        index = logits_index
        if index is None or not self.takes_index:
            index = torch.arange(x.size(1), device=x.device).expand(x.size(0), -1)
        positions, coordinates, key_positions, slots = places
        y, present = self.calls(x, positions, key_positions, slots, states, index, coordinates)
        if logits_index is not None and not self.takes_index:
            y = ops.select_tokens(y, logits_index)
        if self.readout is not None:
            present = present + [self.readout(y, positions)]
        return y, present


Read = TypeVar("Read", bound=CachedModule)


def read_module(
    module: torch.nn.Module,
    example: Tensor,
    max_positions: int,
    *,
    make: Callable[[Capture, Calls, Flat], Read] = CachedModule,  # type: ignore[assignment]
    **how: Any,
) -> Read:
    """Read a module as it is. It is not modified.

    Args:
        module, example, max_positions, how: as for capture.capture. A module that is not causal is
            read without caches.
        make: CachedModule, or a function that returns an instance of a subclass.

    Raises:
        Refused: the module cannot be continued token by token; the message names the layer, the
            operator and the line.
    """
    captured = capture(module, example, max_positions, **how)
    with naming(captured.where):
        found = findings(captured)
        short = captured.short
        reading = _reading(captured, short, found, make) if short else None
        if reading is None:  # no layers are alike by their numbers
            reading = _reading(captured, None, found, make)
        assert reading is not None
        return reading


def _reading(
    whole: Capture,
    short: Capture | None,
    found: Sequence[str],
    make: Callable[[Capture, Calls, Flat], Read],
) -> Read | None:
    """Return a reading that gives the numbers of the module. short: capture with one layer of each
    kind, or None to read all layers; with it, None is returned if numbers differ. found: faults
    (`findings`), which are raised.
    """
    capture = short or whole_of(whole, whole.module)  # nodes are added to the copy
    try:
        calls = _calls(capture)
    except Refused as error:
        raise Refused(f"{error}; the module {found[0]}" if found else str(error)) from error
    if found:
        raise Refused(found[0])
    graph = flat_graph(calls, capture.names, calls.selected is not None)
    flat = completed(graph, calls, whole) if short else Flat(graph, calls.caches)
    if flat is None:
        return None
    reading = make(whole, calls, flat)
    try:
        _check_calls(reading)
    except (Refused, RuntimeError) as error:  # RuntimeError: of shapes that a trace fixed
        if flat.repeated is not None:
            return None
        if isinstance(error, Refused):
            raise
        said = str(error).partition("\n")[0]
        raise Refused(f"has an operator that takes one number of tokens alone: {said}") from error
    return reading


def _calls(capture: Capture) -> Calls:
    """Find the steps of a graph, and return its calls. Refused: it mixes tokens or rows."""
    values = Values(capture)
    properties = Properties(values, capture.causal)
    lengths = Lengths(values, Operators(values), properties)
    attentions = Attentions(properties, lengths)
    for node in values.nodes:
        if values.kind[node] == "data" and node in values.read:
            step = properties.find(node)
            if isinstance(step, OverKeys):
                step = attentions.recognize(node, step)
            properties.steps[node] = step
    out = values.out
    if values.kind[out] != "data":
        raise Refused("gives an output that does not depend on the input")
    roles = properties.steps[out].roles
    if isinstance(roles, list) or kinds(roles)[:2] != ["B", "Q"] or len(roles) != 3:
        refuse(out, "gives an output without axes of rows, tokens and numbers [B,S,N]")
    if capture.causal:
        refuse_seen_later_keys(values, properties.steps)
    calls = Calls(properties, lengths)
    values.forget()
    return calls


def _check_calls(reading: CachedModule) -> None:
    """Compare calls with whole sequences, which shows what the tried properties missed."""
    x = reading.captured.example[:2]
    rows, length = x.shape[:2]
    drawn = reading.captured.drawn(rows, length)
    expected = reading.captured.traced(x, drawn)
    places = torch.arange(length).expand(rows, -1)
    coordinates = drawn[0] if reading.captured.axes else places
    memory = parts_of_memory(reading.memory, *drawn) if reading.memory else []
    with torch.no_grad():
        states = [cache.empty(rows, 0) for cache in reading.caches] + memory
        y, present = reading(x, TokenPlaces(places, coordinates, places, places), states)
        if not same(y, expected):
            raise _differs(y, expected, "one call")
        if not reading.caches:
            return
        states = [cache.empty(rows, length) for cache in reading.caches]
        cached, pieces, start = torch.full((rows, length), -1), [], 0
        for end in (*PIECES, length):
            own = places[:, start:end]
            cached[:, start:end] = own
            of_own = coordinates[..., start:end]
            of_call = TokenPlaces(own, of_own, cached.clone(), own)
            y, states = reading(x[:, start:end], of_call, states + memory)
            pieces.append(y)
            start = end
    y = torch.cat(pieces, 1)
    if not same(y, expected):
        raise _differs(y, expected, "several calls")


def parts_of_memory(parts: Sequence[tuple[int, int]], memory: Tensor, mask: Tensor) -> list[Tensor]:
    """Return the mask [B,M] and the parts of outputs of an encoder [B,M,N], as calls take them."""
    found, begin = [mask], 0
    for heads, size in parts:
        part = memory[..., begin : begin + heads * size].unflatten(2, (heads, size))
        found.append(part.transpose(1, 2).contiguous())
        begin += heads * size
    return found


def _differs(y: Tensor, expected: Tensor, what: str) -> Refused:
    error = (y - expected).abs().max().item()
    return Refused(
        f"in {what} gives other numbers than on whole sequences, by {error:.1e}: its operators do "
        "not act as they did on the example"
    )


def _vocabulary(captured: Capture) -> int:
    """Return the rows of the smallest table that ids are looked up in; without a table, the number
    of ids that the module takes.
    """
    same_ids, tables = {captured.input}, []
    for node in captured.graph.nodes:
        if packet(node) in KEEPS_IDS and not same_ids.isdisjoint(node.all_input_nodes):
            same_ids.add(node)
        if node.target is aten.embedding.default and node.args[1] in same_ids:
            tables.append(captured.constants[node.args[0]].shape[0])
    return int(min(tables)) if tables else 1 + _largest_id(captured)


def _largest_id(captured: Capture) -> int:
    """Return the largest id that the module takes."""
    x = captured.example[:1]
    taken, refused = int(captured.example.max()), MOST_IDS
    while refused - taken > 1:
        number = min(2 * taken + 1, refused - 1) if refused == MOST_IDS else (taken + refused) // 2
        try:
            captured.own(torch.full_like(x, number))
            taken = number
        except Exception:  # whatever forward raises
            refused = number
    if refused == MOST_IDS:
        raise Refused("expected ids that choose rows of a table, got another use of them")
    return taken
