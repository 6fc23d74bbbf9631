"""A reading beside its module: every way in which a session divides a sequence into calls."""

from typing import Any, Callable, Sequence

import torch
from torch import Tensor

from posenc_export.ops import TokenPlaces

PIECES = (5, 4, 1, 1, 1, 6, 2)  # tokens of the calls, 20 together
SLOTS = 29  # of a cache that is larger than what is written


def outputs(module: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """Return the module's own outputs of all tokens [B,S,N]; a module that gives those of the last
    token alone is called with every beginning of x.
    """
    whole = _tensor(module(x))
    if whole.dim() == 3 and whole.shape[1] == x.shape[1]:
        return whole
    beginnings = [_tensor(module(x[:, : n + 1])) for n in range(x.shape[1])]
    return torch.stack([y[:, -1] if y.dim() == 3 else y for y in beginnings], dim=1)


def _tensor(answer: Any) -> Tensor:
    """Return the logits, or else the first tensor, of what a module gives."""
    if isinstance(answer, dict):
        return answer["logits"] if "logits" in answer else next(iter(answer.values()))
    return answer[0] if isinstance(answer, tuple) else getattr(answer, "logits", answer)


class Rows:
    """Caches of rows that are called with tokens at positions and slots of their own."""

    def __init__(self, reading: Any, rows: int, slots: int) -> None:
        self.reading = reading
        # Slots that were never written may hold anything.
        self.states = [
            cache.empty(rows, slots)
            if cache.values
            else torch.randn(cache.empty(rows, slots).shape) * 3
            for cache in reading.caches
        ]
        self.key_positions = torch.full((rows, slots), -1)

    def call(self, x: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """x [B,S] or [B,S,E] at positions and slots [B,S]: outputs [B,S,N]."""
        self.key_positions = self.key_positions.scatter(1, slots, positions)
        states = [state.clone() for state in self.states]
        places = TokenPlaces(positions, positions, self.key_positions, slots)
        y, self.states = self.reading(x, places, states)
        return y

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        self.states = [state[list(rows)] for state in self.states]
        self.key_positions = self.key_positions[list(rows)]


def errors(reading: Any, module: Callable[[Tensor], Any], x: Tensor) -> dict[str, float]:
    """Largest errors of a reading by kind of call, relative to the module's largest output.

    whole: all tokens in one call without caches; pieces: in calls of PIECES; late: the same in
    caches whose first slots were never written, rows at other slots, and more slots than tokens;
    ragged: two rows of different lengths with padding before one and after the other, then steps;
    reordered: rows exchanged, repeated and dropped between calls. x: [2,20] or [2,20,E].
    """
    wanted, length = outputs(module, x), x.shape[1]
    scale = float(wanted.abs().max())
    every = torch.arange(length).expand(2, -1)

    def error(pairs: list[Any]) -> float:
        """Largest error of pairs of an output and the one that is wanted."""
        worst = max(float((y - want).abs().max()) for y, want in pairs)
        return worst / scale if worst == worst else float("inf")

    def pieces(slots: int, first: Tensor) -> float:
        rows, found, start = Rows(reading, 2, slots), [], 0
        for count in PIECES:
            now = slice(start, start + count)
            y = rows.call(x[:, now], every[:, now], every[:, now] + first)
            found.append((y, wanted[:, now]))
            start += count
        return error(found)

    none = [cache.empty(2, 0) for cache in reading.caches]
    whole, _ = reading(x, TokenPlaces(every, every, every, every), none)
    return {
        "whole": error([(whole, wanted)]),
        "pieces": pieces(length, torch.zeros(2, 1, dtype=torch.int64)),
        "late": pieces(SLOTS, torch.tensor([[2], [7]])),
        "ragged": error(_ragged(reading, x, wanted)),
        "reordered": error(_reordered(reading, x, wanted)),
    }


def _ragged(reading: Any, x: Tensor, wanted: Tensor) -> list[Any]:
    """Row 0: 4 tokens, then 3 of padding; row 1: 2 of padding, then 5 tokens; then steps and a
    chunk of both."""
    rows, lengths = Rows(reading, 2, SLOTS), [4, 5]
    positions = torch.tensor([[0, 1, 2, 3, -1, -1, -1], [-1, -1, 0, 1, 2, 3, 4]])
    slots = torch.arange(7).expand(2, -1)
    tokens = torch.stack([x[row, positions[row]] for row in (0, 1)])
    y = rows.call(tokens, positions, slots)
    found = [(y[0, :4], wanted[0, :4]), (y[1, 2:], wanted[1, :5])]
    written = 7
    for count in (1, 1, 3, 1):
        positions = torch.stack([torch.arange(n, n + count) for n in lengths])
        slots = torch.arange(written, written + count).expand(2, -1)
        tokens = torch.stack([x[row, positions[row]] for row in (0, 1)])
        y = rows.call(tokens, positions, slots)
        found += [(y[row], wanted[row, positions[row]]) for row in (0, 1)]
        lengths, written = [n + count for n in lengths], written + count
    return found


def _reordered(reading: Any, x: Tensor, wanted: Tensor) -> list[Any]:
    """6 tokens of both rows; then rows 1, 0, 1 go on, of which 1 and 0 remain at last."""
    rows, found, start, order = Rows(reading, 2, SLOTS), [], 0, [0, 1]
    for taken, count in ([0, 1], 6), ([1, 0, 1], 1), ([0, 1, 2], 3), ([2, 1], 1), ([0, 1], 2):
        order = [order[row] for row in taken]
        rows.take(taken)
        slots = torch.arange(start, start + count).expand(len(order), -1)
        y = rows.call(x[order, start : start + count], slots, slots)
        found.append((y, wanted[order, start : start + count]))
        start += count
    return found
