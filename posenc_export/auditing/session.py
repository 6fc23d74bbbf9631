"""A graph of others, driven by the calls of a session, and the inputs of each of its runs.

Shapes: B batch, S new tokens, P past slots, T = P + S, M capacity, V numbers of an output.
"""

import copy
from typing import Any, NamedTuple, Sequence

import numpy as np

from posenc_export.auditing.graph import Arrays, Run
from posenc_export.auditing.inputs import UNREAD, Cache, Interface, NotPossible, Value
from posenc_export.runtime.session.errors import GraphError
from posenc_export.shared.tables import counted

TAGS = 3  # numbers behind each output: row, index of the token in it, number of the call
NONE = -1  # no call: the caches are empty, or their slots were moved


class Call(NamedTuple):
    """One run of a graph. Arrays have one number for each row [B]."""

    new: int  # number of columns S
    past: int  # number of slots P of the cache
    start: np.ndarray  # position of the first token of each row
    before: np.ndarray  # number of tokens that each row had in the cache
    padding: np.ndarray  # columns of padding before the tokens of each row, in cache and call
    behind: np.ndarray  # columns of padding behind the new tokens of each row
    valid: np.ndarray  # columns without padding [B,S]
    source: int  # the call of its caches, or NONE
    slots: np.ndarray | None  # of that call, which the caches have [B,P]; None for all
    inputs: Arrays  # and caches that it was given, if a session keeps them
    caches: Arrays

    @property
    def rows(self) -> int:
        return len(self.start)


def taken(array: np.ndarray, rows: int, axis: int, slots: np.ndarray) -> np.ndarray:
    """Return the slots [B,P] of each row of a cache."""
    moved = np.moveaxis(array, (rows, axis), (0, 1))
    moved = moved[np.arange(len(slots))[:, None], slots]
    return np.ascontiguousarray(np.moveaxis(moved, (0, 1), (rows, axis)))


class ForeignSession:
    """The calls of a session on a graph that others exported. Caches are arrays: a rewind cuts
    them, a fork copies them, and rows of different lengths are aligned as Interface.padding says.

    Outputs have TAGS numbers more than those of the graph, by which a comparison knows which token
    it compares.

    Args:
        run: runs the graph.
        interface: what its inputs mean.
        keep: whether to keep the inputs of every run in `calls`.
    """

    def __init__(self, run: Run, interface: Interface, keep: bool = False) -> None:
        self.run, self.interface, self.keep = run, interface, keep
        self.reset()

    def reset(self) -> None:
        """Remove all rows."""
        self.calls: list[Call] = []  # shared with forks
        self._begin(0, 0)

    def _begin(self, rows: int, start: Any) -> None:
        self.caches: Arrays = {}
        self.start = np.broadcast_to(np.asarray(start or 0, np.int64), (rows,)).copy()  # [B]
        self.count: np.ndarray = np.zeros(rows, np.int64)  # [B]
        self.valid: np.ndarray = np.zeros((rows, 0), bool)  # [B,P]
        self.cropped, self.source = False, NONE
        self.slots: np.ndarray | None = None  # as of Call

    def prefill(
        self,
        inputs: Any,
        *,
        start: Any = None,
        attention_mask: np.ndarray | None = None,
        chunk: int | None = None,
        **others: Any,
    ) -> np.ndarray:
        """As Session.prefill, of all outputs. A call with attention_mask feeds its columns."""
        if not self.interface.caches or not len(self.start):
            self._begin(len(inputs), start)
        if attention_mask is not None:
            return self._call(np.asarray(inputs), attention_mask == 1)
        rows, size = [np.asarray(row) for row in inputs], max(map(len, inputs))
        step = chunk or size
        parts = [self._ragged([row[at : at + step] for row in rows]) for at in range(0, size, step)]
        return np.concatenate(parts, axis=1)

    def step(self, inputs: np.ndarray) -> np.ndarray:
        """As Session.step."""
        return self._call(inputs[:, None], np.ones((len(inputs), 1), bool))[:, 0]

    def rewind(self, n: Any) -> None:
        """As Session.rewind."""
        self._check_movable("a rewind")
        self.count = self.count - np.asarray(n)
        order = self.valid.cumsum(1)
        self.valid = self.valid & (order <= self.count[:, None])
        self._align()

    def fork(self) -> "ForeignSession":
        """As Session.fork."""
        return copy.copy(self)  # no array is changed in place, lists are replaced

    def _ragged(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Read rows [n,..] of different lengths. Outputs [B,S,V] begin with the first column."""
        counts = np.array([len(row) for row in rows])
        size = int(counts.max())
        left = self.interface.padding == "left" and not self.valid.any()
        shift = (size - counts) * left
        tokens = np.zeros((len(rows), size, *rows[0].shape[1:]), rows[0].dtype)
        valid = np.zeros((len(rows), size), bool)
        for index, row in enumerate(rows):
            tokens[index, shift[index] : shift[index] + len(row)] = row
            valid[index, shift[index] : shift[index] + len(row)] = True
        outputs = self._call(tokens, valid)
        for index in np.nonzero(shift)[0].tolist():
            outputs[index] = np.roll(outputs[index], -shift[index], axis=0)
        return outputs

    def _call(self, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Run the graph once on tokens [B,S,..], and keep its caches."""
        past = self.valid.shape[1]
        self._check(valid)
        total = np.concatenate((self.valid, valid), axis=1)
        if self.interface.padding == "right":  # the graph writes behind the tokens of each row
            total = np.arange(past + valid.shape[1]) < (self.count + valid.sum(1))[:, None]
        feeds = feeds_of(self.interface, tokens, valid, total, self.start + self.count)
        caches = {cache.past.name: self._past(cache, len(valid)) for cache in self.interface.caches}
        results = self.run({**feeds, **caches})
        outputs = self._tagged(results[self.interface.output.name], valid)
        columns = (valid.shape[1], past, self.start, self.count)
        padding, behind = total.argmax(1), valid[:, ::-1].argmax(1)
        kept = (feeds, caches) if self.keep else ({}, {})
        call = Call(*columns, padding, behind, valid, self.source, self.slots, *kept)
        self.source, self.slots = len(self.calls), None
        self.calls.append(call)
        self.count, self.valid = self.count + valid.sum(1), total
        known = self.interface.caches
        self.caches = {c.past.name: self._present(c, results[c.present], past) for c in known}
        if self.interface.padding == "left" and self.interface.caches:
            ends = np.where(total.any(1), total[:, ::-1].argmax(1), 0)
            if ends.any():
                self._align()
        return outputs

    def _tagged(self, outputs: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Return outputs [B,S,V] in float32 with TAGS more numbers, zeros at padding."""
        if outputs.ndim != 3 or len(outputs) != len(valid):
            got = f"outputs {list(outputs.shape)} for tokens {list(valid.shape)}"
            raise GraphError(ValueError(got))
        tags = np.zeros((*valid.shape, TAGS), np.float32)
        tags[..., 0] = np.arange(len(valid))[:, None]
        tags[..., 1] = self.count[:, None] + valid.cumsum(1) - 1
        tags[..., 2] = len(self.calls)
        if outputs.shape[1] != valid.shape[1]:
            raise NotPossible(f"the graph returns {outputs.shape[1]} of {valid.shape[1]} outputs")
        whole = np.concatenate((outputs.astype(np.float32), tags), axis=2)
        return np.where(valid[..., None], whole, np.float32(0))

    def _check(self, valid: np.ndarray) -> None:
        """Raise NotPossible for what the inputs of the graph cannot express."""
        graph, (rows, size) = self.interface, valid.shape
        past, capacity = self.valid.shape[1], self.interface.capacity
        if graph.batch not in (0, rows):
            raise NotPossible(f"the graph takes {counted(graph.batch, 'row')}")
        if graph.length not in (0, size):
            raise NotPossible(f"the graph takes {graph.length} tokens in each call")
        if capacity and past + size > capacity:
            raise NotPossible(f"the caches have {capacity} slots")
        if self.start.any() and "position_ids" not in graph.inputs:
            raise NotPossible("the graph has no input of positions")
        if valid.all() and self.valid.all():
            return
        if graph.padding == "none":
            raise NotPossible("the graph has no mask")
        if graph.padding == "right" and not (valid[:, 0].all() and (valid.all() or not past)):
            where = "in later calls" if past else "before the tokens"
            raise NotPossible(f"the graph counts the tokens of a row: no padding {where}")

    def _past(self, cache: Cache, rows: int) -> np.ndarray:
        """Return what a cache input is fed: the slots in use, and the free ones if it is static."""
        if cache.past.name in self.caches:
            array = self.caches[cache.past.name]
        else:
            axes = [axis if isinstance(axis, int) else 0 for axis in cache.past.axes]
            if len(axes) > 2 or cache.slots >= 0:  # else a count of tokens
                axes[cache.rows] = rows
            if cache.slots >= 0:
                axes[cache.slots] = 0
            array = np.zeros(axes, cache.past.held)
        if not cache.capacity:
            return array
        widths = [(0, 0)] * array.ndim
        widths[cache.slots] = (0, cache.capacity - array.shape[cache.slots])
        return np.pad(array, widths)

    def _present(self, cache: Cache, array: np.ndarray, past: int) -> np.ndarray:
        """Return the slots in use of a cache that the graph returned."""
        rank = len(cache.past.axes)
        if array.ndim != rank or (rank > 2 and array.shape[cache.rows] != len(self.valid)):
            got = f"{cache.present} {list(array.shape)} for {counted(len(self.valid), 'row')}"
            raise GraphError(ValueError(got))
        if cache.slots < 0:
            return array
        total, size = self.valid.shape[1], array.shape[cache.slots]
        if cache.capacity:
            self.cropped |= size < total
            return np.take(array, np.arange(min(total, size)), cache.slots)
        if size == total - past and past:  # only the new slots
            array = np.concatenate((self.caches[cache.past.name], array), cache.slots)
        elif size < total:
            self.cropped = True
        return array

    def _check_movable(self, what: str) -> None:
        """Raise NotPossible if slots cannot be removed from the caches."""
        if not self.interface.caches:
            raise NotPossible(f"the graph has no cache for {what}")
        if self.cropped or any(cache.slots < 0 for cache in self.interface.caches):
            raise NotPossible(f"the caches lack what {what} needs")

    def _align(self) -> None:
        """Remove the slots of padding but those before the tokens of shorter rows."""
        self._check_movable("rows of different lengths")
        kept = [np.nonzero(row)[0].tolist() for row in self.valid]
        longest, right = max(map(len, kept)), self.interface.padding == "right"
        counts_slots = "position_ids" not in self.interface.inputs
        slots = np.zeros((len(kept), longest), np.int64)
        self.valid = np.zeros((len(kept), longest), bool)
        for index, row in enumerate(kept):
            first = 0 if right else longest - len(row)
            place = slice(first, first + len(row))
            if counts_slots and row != [*range(place.start, place.stop)]:
                raise NotPossible("the graph counts slots as positions, so that none can be moved")
            slots[index, place], self.valid[index, place] = row, True
        for cache in self.interface.caches:
            array = self.caches[cache.past.name]
            self.caches[cache.past.name] = taken(array, cache.rows, cache.slots, slots)
        before = self.slots
        self.slots = slots if before is None else np.take_along_axis(before, slots, axis=1)


def feeds_of(
    interface: Interface,
    tokens: np.ndarray,
    valid: np.ndarray,
    total: np.ndarray,
    next_position: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the inputs by name.

    Args:
        tokens: [B,S] ids or [B,S,E].
        valid: [B,S], which of them are no padding.
        total: [B,T], which slots hold tokens, those of this call included.
        next_position: position of the first new token of each row [B].
    """
    past, new = total.shape[1] - valid.shape[1], valid.shape[1]
    positions = np.where(valid, next_position[:, None] + valid.cumsum(1) - 1, 0)
    count = total.sum(1)
    numbers = {
        "cache_position": np.arange(past, past + new),
        "past_length": np.array(past),
        "last_index": count - 1,
        "first_position": (next_position - count + valid.sum(1))[:, None],
        "total_length": np.array(past + new),
        "use_cache_branch": np.array(past > 0),
        "token_type_ids": np.zeros(valid.shape, np.int64),
        "logits_to_keep": np.array(0),
        "logits_index": np.broadcast_to(np.arange(new), valid.shape),
        UNREAD: np.array(0),
        "position_ids": positions,
        "input_ids": tokens,
        "hidden_states": tokens,
    }
    feeds = {}
    for meaning, value in interface.inputs.items():
        if meaning.startswith("attention_mask"):
            feeds[value.name] = _mask(value, total, new, interface.capacity)
        else:
            feeds[value.name] = _shaped(numbers[meaning.split(" ")[0]], value, len(valid))
    return feeds


def _shaped(numbers: np.ndarray, value: Value, rows: int) -> np.ndarray:
    """Return numbers with the rank and dtype of an input."""
    rank = len(value.axes)
    if numbers.ndim == 2 and rank == 3 and value.whole:  # positions on several axes
        axes = value.axes[0]
        numbers = np.repeat(numbers[None], axes if isinstance(axes, int) else 3, axis=0)
    elif numbers.ndim == 2 and rank == 1:
        numbers = numbers[0]
    while numbers.ndim < rank:
        numbers = numbers[None]
    if rank == numbers.ndim == 2 and len(numbers) == 1 and value.axes[0] not in (1, None):
        numbers = np.repeat(numbers, rows, axis=0)
    return numbers.astype(value.held, order="C")  # a scalar stays one


def _mask(value: Value, total: np.ndarray, new: int, capacity: int) -> np.ndarray:
    """Return the mask [B,T], or [B,1,S,T] with causality, in the dtype of the input."""
    length = value.axes[-1] if isinstance(value.axes[-1], int) else 0
    slots = max(length, total.shape[1])
    if capacity and not length and len(value.axes) == 4:
        slots = capacity
    visible = np.zeros((len(total), slots), bool)
    visible[:, : total.shape[1]] = total
    if len(value.axes) == 4:
        query, key = np.arange(total.shape[1] - new, total.shape[1])[:, None], np.arange(slots)
        visible = (visible[:, None] & (key <= query))[:, None]
        # A query of padding that sees nothing would be a division of zero by zero.
        visible |= (key == query) & ~visible.any(-1, keepdims=True)
    if value.whole or value.dtype == "bool" or len(value.axes) == 2:
        return visible.astype(value.held)
    return np.where(visible, 0, np.finfo(value.held).min).astype(value.held)
