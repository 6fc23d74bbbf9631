"""A session: tokens in at any offset, outputs out, with the cache kept between calls.

Shapes: B batch, S new tokens. Whatever padding comes in, rows are fed with their valid tokens first; the graph sees -1 only behind them.
"""

from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Union

import numpy as np

from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.sampling import choose

Rows = Union[np.ndarray, Sequence[Any]]
CHUNK = 512  # tokens fed at a time unless told: bounds a bias to [H,512,T]


class Session:
    """Prefill, step, rewind, fork on one set of caches.

    Args:
        graph: OrtGraph or TorchGraph.
        manifest: its description.
        capacity: slots of in-place caches; the whole range of positions, or one bucket, where None.
    """

    def __init__(self, graph: Any, manifest: Manifest, capacity: Optional[int] = None) -> None:
        self.manifest, self._graph = manifest, graph
        self._most = min(capacity or manifest.max_positions, manifest.max_positions)
        self._input = manifest.inputs[0]
        self._vocabulary = int(manifest.config.get("vocabulary", 0))
        self._in_place = any(state.update == "in_place" for state in manifest.states)
        self._cache: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget everything, the number of rows included."""
        self._length, self._start = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._slots = np.zeros((0, 0), bool)  # of each row, which slots hold a token
        self._step: Optional[Callable[[], np.ndarray]] = None
        self._rows = 0

    @property
    def batch(self) -> int:
        """Rows B; 0 before the first prefill."""
        return self._rows

    @property
    def _length(self) -> np.ndarray:
        """Tokens per row: those at the last binding and the steps since, which a step only counts."""
        return self._settled + self._steps

    @_length.setter
    def _length(self, value: np.ndarray) -> None:
        self._settled, self._steps = value, 0

    @property
    def length(self) -> np.ndarray:
        """Tokens in the cache [B] int64."""
        return self._length.copy()

    @property
    def position(self) -> np.ndarray:
        """Position of the next token of each row [B] int64."""
        return self._start + self._length

    def prefill(self, inputs: Rows, start: Union[int, Sequence[int]] = 0, attention_mask: Optional[np.ndarray] = None, chunk: Optional[int] = None) -> np.ndarray:
        """Feed S tokens per row, behind those in the cache; output [B,S,*], zeros at padding.

        Args:
            inputs: [B,S] int64 ids or [B,S,E] activations, or a list of rows of any lengths.
            start: position of each row's first token, one or [B]; only for an empty cache.
            attention_mask: [B,S], 0 at padding, wherever it stands.
            chunk: tokens fed at a time.

        Raises:
            ValueError: positions beyond the range, more tokens than capacity, shapes or ids that do not fit the model.
        """
        valid, padded = _valid(inputs, attention_mask, self._input.dtype)
        rows = [padded[row, columns] for row, columns in enumerate(valid)]
        self._open(len(rows), start)
        counts = np.array([len(row) for row in rows])
        self._check(padded, rows, counts)
        size = chunk or CHUNK
        if size < 1:
            raise ValueError(f"session: chunk is at least 1, got {chunk}")
        parts: List[List[np.ndarray]] = [[] for _ in rows]
        for first in range(0, int(counts.max()), size):
            for row, part in enumerate(self._feed([row[first : first + size] for row in rows])):
                parts[row].append(part)
        result = np.zeros((*padded.shape[:2], parts[0][0].shape[-1]), parts[0][0].dtype)
        for row, columns in enumerate(valid):
            result[row, columns] = np.concatenate(parts[row])
        return result

    def step(self, inputs: np.ndarray) -> np.ndarray:
        """Feed one token per row: [B] int64 or [B,E] to [B,*]; the array may be overwritten by the next step.

        Raises:
            ValueError: nothing prefilled, the range or capacity is used up, ids or shapes that do not fit.
        """
        if self._step is None:
            self._prepare_step()
        if self._room <= 0:  # of this binding: the range may be used up, or only the bucket
            self._check_room(np.ones(self._rows, np.int64))
            self._prepare_step()
        if self._vocabulary:
            tokens = np.asarray(inputs)
            if tokens.shape != (self._rows,):
                self._refuse_tokens(tokens)
            self._new[...] = tokens
            if self._unsigned.max() >= self._vocabulary:
                self._refuse_tokens(tokens)
        else:
            self._new[...] = inputs
        for counter in self._counters:
            counter += 1
        assert self._step is not None
        output = self._step()
        self._steps += 1
        self._room -= 1
        return output[:, 0]

    def rewind(self, n: Union[int, Sequence[int]]) -> None:
        """Take back the last n tokens, of every row or [B].

        Raises:
            ValueError: more than a row holds.
        """
        back = np.broadcast_to(np.asarray(n, np.int64), (self._rows,))
        if (back < 0).any() or (back > self._length).any():
            raise ValueError(f"session: a rewind is 0 .. the tokens of the row {self._length.tolist()}, got {back.tolist()}")
        if self.manifest.layout == "rows" and self._step is not None and self._counters and back.min() == back.max():
            for counter in self._counters:  # the next step stands where an earlier one stood: its binding serves again
                counter -= int(back[0])
            self._room += int(back[0])
        else:
            self._sync()
        self._length = self._length - back
        if self.manifest.layout == "rows":
            self._cache.hide(np.arange(int(self._length.max(initial=0)))[None] < self._length[:, None])
        else:
            order = np.cumsum(self._slots, axis=1)
            self._slots &= order <= self._length[:, None]
            self._cache.hide(self._slots)
            used = np.flatnonzero(self._slots.any(0))
            columns = int(used[-1]) + 1 if len(used) else 0
            self._slots = self._slots[:, :columns].copy()
            self._cache.trim(columns)

    def fork(self) -> "Session":
        """An independent session from here, sharing the loaded graph."""
        self._sync()
        other = Session(self._graph, self.manifest, self._most)
        other._length, other._start, other._slots, other._rows = self._length.copy(), self._start.copy(), self._slots.copy(), self._rows
        other._cache = self._cache.fork() if self._cache is not None else None
        return other

    def generate(self, prompt: Rows, tokens: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Iterator[np.ndarray]:
        """Yield the next ids [B] int64, `tokens` times, after a prompt [B,S] or list of rows; arguments as sampling.choose.

        Raises:
            ValueError: as prefill and step.
        """
        random = np.random.default_rng(seed)
        rows = [len(row) for row in prompt]
        output = self.prefill(prompt)
        logits = np.stack([output[row, count - 1] for row, count in enumerate(rows)])
        for index in range(tokens):
            chosen = choose(logits, temperature, top_k, top_p, random)
            yield chosen
            if index + 1 < tokens:
                logits = self.step(chosen)

    def _open(self, rows: int, start: Union[int, Sequence[int]]) -> None:
        fresh = not self._rows or not self._length.any()
        if fresh:
            starts = np.broadcast_to(np.asarray(start, np.int64), (rows,)).copy()
            if self.manifest.signature == "mask" and starts.any():
                raise ValueError(f"session: positions count the attention_mask from 0, got start {start}; export with signature positions")
            reuse = self._cache is not None and self._cache.batch == rows
            self._rows, self._start, self._length = rows, starts, np.zeros(rows, np.int64)
            bucket = min(self.manifest.capacity_bucket or self._most, self._most)
            if not reuse:
                self._cache = self._graph.open(rows, bucket)
            self._slots = np.zeros((rows, 0), bool)
            self._cache.hide(np.zeros((rows, self._cache.columns), bool))
            self._cache.trim(0)
            self._step = None
            return
        if rows != self._rows:
            raise ValueError(f"session: rows are the {self._rows} in the cache, got {rows}; reset first")
        if np.any(np.asarray(start) != 0):
            raise ValueError(f"session: start is given for an empty cache, got {start} with {self._length.tolist()} tokens cached; reset first")

    def _feed(self, rows: List[np.ndarray]) -> List[np.ndarray]:
        """One call, or one per row where the graph takes a single row; outputs [count,*] per row."""
        self._sync()
        counts = np.array([len(row) for row in rows])
        new = int(counts.max())
        x = np.zeros((len(rows), new, *rows[0].shape[1:]), rows[0].dtype)
        for row, part in enumerate(rows):
            x[row, : len(part)] = part
        self._cache.reserve(int(self._length.max()) + new if self.manifest.layout == "rows" else self._slots.shape[1] + new)
        single = self.manifest.continuation_rows == 1 and len(rows) > 1 and new > 1 and bool(self._length.any())
        if single:
            outputs = [self._feed_row(x, counts, row) for row in range(len(rows))]
        else:
            output = self._cache.run(self._values(x, counts, slice(None)))
            outputs = [output[row, :count] for row, count in enumerate(counts)]
        self._length = self._length + counts
        if self.manifest.layout == "columns":
            self._slots = np.concatenate((self._slots, np.arange(new)[None] < counts[:, None]), axis=1)
        return outputs

    def _feed_row(self, x: np.ndarray, counts: np.ndarray, row: int) -> np.ndarray:
        width = int(counts[row]) if self.manifest.layout == "rows" else x.shape[1]
        if not width:
            return np.zeros((0, self._output_width), self.manifest.outputs[0].dtype)
        only = slice(row, row + 1)
        values = self._values(np.ascontiguousarray(x[only, :width]), counts, only)
        return self._cache.run(values, row)[0, : counts[row]]  # type: ignore[no-any-return]

    @property
    def _output_width(self) -> int:
        return int(self.manifest.outputs[0].axes[-1])

    def _values(self, x: np.ndarray, counts: np.ndarray, rows: slice) -> Dict[str, np.ndarray]:
        """What the graph asks for, by name, for some rows."""
        counts, length, start = counts[rows], self._length[rows], self._start[rows]
        offsets = np.arange(x.shape[1])
        inside = offsets[None] < counts[:, None]
        slots = length[:, None] + offsets
        makers: Dict[str, Callable[[], np.ndarray]] = {
            self._input.name: lambda: x,
            "position_ids": lambda: np.where(inside, start[:, None] + slots, -1),
            "cache_position": lambda: slots,
            "first_position": lambda: start[:, None].copy(),
            "seqlens_k": lambda: (length + counts - 1).astype(np.int32),
            "total_sequence_length": lambda: np.array((length + counts).max(), np.int32),
            "attention_mask": lambda: np.concatenate((self._slots[rows], inside), axis=1).astype(np.int64),
        }
        return {value.name: makers[value.name]() for value in self.manifest.inputs}

    def _prepare_step(self) -> None:
        if not self._rows or not self._length.any():
            raise ValueError("session: a prefill comes before the first step, got an empty cache; call prefill")
        if (self._length == 0).any():
            raise ValueError("session: every row holds a token before a step, got an empty row; prefill it")
        self._cache.reserve(int(self._length.max()) + 1)
        self._x = np.zeros((self._rows, 1, *([int(self._input.axes[2])] if len(self._input.axes) == 3 else [])), self._input.dtype)
        self._new = self._x[:, 0]
        self._unsigned = self._x.view(np.uint64) if self._vocabulary else self._x  # one comparison sees ids below 0 as well
        self._stepped_from = self._length.copy()
        room = self._room_of_rows()
        if self._in_place and self.manifest.capacity_bucket:
            room = min(room, self._cache.capacity - int(self._length.max()))
        self._room = room
        if self.manifest.signature == "mask":  # the mask is a column longer at every step: no feed can be kept
            self._counters: List[np.ndarray] = []
            self._step = self._step_with_mask
            return
        feeds = self._values(self._x, np.ones(self._rows, np.int64), slice(None))
        self._counters = _counters(feeds, [name for name in feeds if name not in (self._input.name, "first_position")])
        self._step = self._cache.stepper(feeds)

    def _step_with_mask(self) -> np.ndarray:
        values = self._values(self._x, np.ones(self._rows, np.int64), slice(None))
        self._slots = np.concatenate((self._slots, np.ones((self._rows, 1), bool)), axis=1)
        self._stepped_from = self._stepped_from + 1
        self._cache.reserve(self._slots.shape[1])
        return self._cache.run(values)  # type: ignore[no-any-return]

    def _sync(self) -> None:
        """Steps count lengths only; bring the columns up to them, and let the next step bind anew."""
        if self._step is not None and self.manifest.layout == "columns":
            steps = int((self._length - self._stepped_from)[0])
            self._slots = np.concatenate((self._slots, np.ones((self._rows, steps), bool)), axis=1)
        self._step = None

    def _room_of_rows(self) -> int:
        used = int(self._length.max()) if self.manifest.layout == "rows" else self._slots.shape[1]
        capacity = self._most - used if self._in_place else self.manifest.max_positions
        return min(capacity, self.manifest.max_positions - int(self.position.max()))

    def _check(self, padded: np.ndarray, rows: List[np.ndarray], counts: np.ndarray) -> None:
        if not counts.any() or (not self._length.any() and not counts.all()):
            raise ValueError(f"session: every row has a token, got {counts.tolist()}; leave empty rows out")
        if padded.ndim != len(self._input.axes) or (padded.ndim == 3 and padded.shape[2] != self._input.axes[2]):
            raise ValueError(f"session: {self._input.name} is {list(self._input.axes)}, got shape {list(padded.shape)}")
        if self._vocabulary:
            for row in rows:
                if len(row) and (row.min() < 0 or row.max() >= self._vocabulary):
                    self._refuse_tokens(row)
        self._check_room(counts)

    def _check_room(self, counts: np.ndarray) -> None:
        self._sync()
        last = int((self.position + counts).max()) - 1
        if last >= self.manifest.max_positions or int(self._start.min(initial=0)) < 0:
            where = last if last >= self.manifest.max_positions else int(self._start.min())
            raise ValueError(f"session: positions are 0 .. {self.manifest.max_positions - 1}, got {where}; rewind, or export with larger max_positions")
        if self._in_place and int((self._length + counts).max()) > self._most:
            raise ValueError(f"session: the cache holds {self._most} tokens, got {int((self._length + counts).max())}; load with a larger capacity")

    def _refuse_tokens(self, tokens: np.ndarray) -> None:
        if tokens.ndim != 1:
            raise ValueError(f"session: a step takes [{self._rows}] tokens, got shape {list(tokens.shape)}")
        if len(tokens) != self._rows and self._step is not None:
            raise ValueError(f"session: a step takes {self._rows} tokens, got {len(tokens)}")
        raise ValueError(f"session: token ids are 0 .. {self._vocabulary - 1}, got {int(tokens.min())} .. {int(tokens.max())}")


def _counters(feeds: Dict[str, np.ndarray], names: List[str]) -> List[np.ndarray]:
    """Put the feeds of these names, each one lower, into one array per dtype, so that one addition moves them all to the next step."""
    found = []
    for dtype in sorted({feeds[name].dtype.str for name in names}):
        group = [name for name in names if feeds[name].dtype.str == dtype]
        block = np.concatenate([feeds[name].reshape(-1) - 1 for name in group]).astype(dtype)
        ends = np.cumsum([feeds[name].size for name in group])
        for name, end in zip(group, ends, strict=True):
            feeds[name] = block[end - feeds[name].size : end].reshape(feeds[name].shape)
        found.append(block)
    return found


def _valid(inputs: Rows, attention_mask: Optional[np.ndarray], dtype: str) -> Any:
    """Columns of the valid tokens of each row, and all rows as one array [B,S,*]."""
    if not isinstance(inputs, np.ndarray) and attention_mask is None:
        rows = [np.asarray(row, dtype) for row in inputs]
        padded = np.zeros((len(rows), max((len(row) for row in rows), default=0), *rows[0].shape[1:]), dtype) if rows else np.zeros((0, 0), dtype)
        for index, row in enumerate(rows):
            padded[index, : len(row)] = row
        return [np.arange(len(row)) for row in rows], padded
    padded = np.asarray(inputs)
    if padded.dtype != np.dtype(dtype):
        raise ValueError(f"session: inputs are {dtype}, got {padded.dtype}")
    mask = np.ones(padded.shape[:2]) if attention_mask is None else np.asarray(attention_mask)
    if mask.shape != padded.shape[:2]:
        raise ValueError(f"session: attention_mask is {list(padded.shape[:2])} as the inputs, got {list(mask.shape)}")
    return [np.flatnonzero(row) for row in mask], padded
