"""A session: tokens in at any offset, outputs out, with the cache kept between calls.

Shapes: B batch, S new tokens. Whatever padding comes in, rows are fed with their valid tokens first; the graph sees -1 only behind them.
"""

from typing import Any, Dict, Iterator, List, Optional

import numpy as np

from posenc_export.runtime import feeds
from posenc_export.runtime.history import History
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.rows import Beside, Numbers, Rows, align, beside, per_row
from posenc_export.runtime.sampling import choose
from posenc_export.runtime.stepper import Stepper


class Session:
    """Prefill, step, rewind, fork on one set of caches.

    Args:
        graph: OrtGraph or TorchGraph.
        manifest: its description.
        capacity: slots of in-place caches; the whole range of positions, or one bucket, where None.

    Raises:
        ValueError: a capacity below 1.
    """

    def __init__(self, graph: Any, manifest: Manifest, capacity: Optional[int] = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"session: capacity is at least 1 slot, got {capacity}; leave it out for the whole range")
        self.manifest, self._graph = manifest, graph
        self._most = min(capacity or manifest.max_positions, manifest.max_positions)
        self._input = manifest.inputs[0]
        self._vocabulary = int(manifest.config.get("vocabulary", 0))
        self._in_place = any(state.update == "in_place" for state in manifest.states)
        self._replaces = any(state.update == "replace" for state in manifest.states)
        self._cache: Any = None
        self.reset()

    def reset(self) -> None:
        """Forget everything, the number of rows included."""
        self._held, self._start = np.zeros(0, np.int64), np.zeros(0, np.int64)  # tokens of each row, without those of the stepper
        self._slots = np.zeros((0, 0), bool)  # of each row, which slots hold a token
        self._stepper: Optional[Stepper] = None
        self._history = History()
        self._rows = 0

    @property
    def provider(self) -> str:
        """Where the graph runs: "cpu" or "cuda"."""
        return str(self._graph.device)

    @property
    def batch(self) -> int:
        """Rows B; 0 before the first prefill."""
        return self._rows

    @property
    def length(self) -> np.ndarray:
        """Tokens in the cache [B] int64."""
        return self._held + (self._stepper.taken if self._stepper else 0)

    @property
    def position(self) -> np.ndarray:
        """Position of the next token of each row [B] int64."""
        return self._start + self.length

    def prefill(
        self,
        inputs: Rows,
        start: Numbers = None,
        attention_mask: Optional[np.ndarray] = None,
        chunk: Optional[int] = None,
        grid: Optional[np.ndarray] = None,
        token_types: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """Feed S tokens per row, behind those in the cache; output [B,S,*], zeros at padding.

        Args:
            inputs: [B,S] int64 ids or [B,S,E] activations, or a list of rows of any lengths; a row without tokens stays as it is.
            start: position of each row's first token, one or [B], for an empty cache; where None, `position`: 0, or what a rewind to nothing left.
            attention_mask: [B,S], 0 at padding, wherever it stands.
            chunk: tokens fed at a time; the manifest's where None. A bidirectional model reads all at once.
            grid: [axes,B,S] int64, coordinates for encodings that have them; the position on every axis where None, as for text.
            token_types: [B,S] int64, segments for an encoder; all 0 where None.

        Raises:
            ValueError: positions beyond the range, more tokens than capacity, shapes or ids that do not fit; the session is then as before.
        """
        valid, padded = align(inputs, attention_mask, self._input)
        rows = [padded[row, columns] for row, columns in enumerate(valid)]
        others = beside(grid, token_types, self.manifest, valid, padded.shape[:2])
        counts = np.array([len(row) for row in rows], np.int64)
        size = int(counts.max(initial=1)) if not self.manifest.states else self.manifest.chunk if chunk is None else chunk
        if size < 1:
            raise ValueError(f"session: chunk is at least 1 token, got {chunk}")
        if self._vocabulary:
            feeds.check_tokens(self._vocabulary, rows)
        if not self.manifest.states:
            self.reset()
        self._sync()
        self._open(self._starts(len(rows), start), counts)
        outputs: List[List[np.ndarray]] = [[] for _ in rows]
        for first in range(0, int(counts.max()), size):
            here = [row[first : first + size] for row in rows]
            for row, part in enumerate(self._feed(here, {name: [part[:, first : first + size] for part in parts] for name, parts in others.items()})):
                outputs[row].append(part)
        result = np.zeros((*padded.shape[:2], outputs[0][0].shape[-1]), outputs[0][0].dtype)
        for row, columns in enumerate(valid):
            result[row, columns] = np.concatenate(outputs[row])
        return result

    def step(self, inputs: np.ndarray) -> np.ndarray:
        """Feed one token per row: [B] int64 or [B,E] to [B,*]; the array may be overwritten by the next step: copy what you keep.

        Raises:
            ValueError: nothing prefilled, the range or capacity is used up, ids or shapes that do not fit.
        """
        stepper = self._stepper
        if stepper is None or stepper.room <= 0:  # of this binding: the range may be used up, or only the bucket
            stepper = self._prepare_step()
        if self._replaces:
            x = stepper.checked(inputs)
            self._history.record(self.length, self._cache.snapshot(), list(x[:, None]))
        return stepper.take(inputs)  # type: ignore[no-any-return]

    def rewind(self, n: Numbers) -> None:
        """Take back the last n tokens, of every row or [B].

        Raises:
            ValueError: more than a row holds, a model that keeps nothing.
        """
        self._check_keeps("a rewind")
        back = per_row("a rewind", n, self._rows or 1)
        length = self.length if self._rows else np.zeros(1, np.int64)
        if (back < 0).any() or (back > length).any():
            raise ValueError(f"session: a rewind is 0 .. the tokens of the row {length.tolist()}, got {back.tolist()}")
        if not back.any():
            return
        if self._replaces:
            self._replay(length - back)
        elif self.manifest.layout == "rows" and self._stepper is not None and back.min() == back.max():
            self._stepper.back(int(back[0]))  # the next step stands where an earlier one stood: its binding serves again
            self._hide()
        else:
            self._sync()
            self._held = self._held - back
            self._hide()

    def fork(self) -> "Session":
        """An independent session from here, sharing the loaded graph."""
        self._sync()
        other = Session(self._graph, self.manifest, self._most)
        other._held, other._start, other._slots, other._rows = self._held.copy(), self._start.copy(), self._slots.copy(), self._rows
        other._cache = self._cache.fork(int(self._held.max())) if self._rows else None
        other._history = self._history.copy()
        return other

    def generate(self, prompt: Rows, tokens: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Iterator[np.ndarray]:
        """Yield the next ids [B] int64, `tokens` times, after a prompt [B,S] or list of rows; arguments as sampling.choose. The last ids are not fed.

        Raises:
            ValueError: as prefill and step; a model without a vocabulary, a row without tokens. At the first id, as with any generator.
        """
        if self.manifest.kind != "decoder":
            raise ValueError(f"session: generate takes a decoder, got kind {self.manifest.kind}; call prefill")
        rows = [len(row) for row in prompt]
        if not all(rows):
            raise ValueError(f"session: a prompt has a token in every row, got {rows}; leave empty rows out")
        random = np.random.default_rng(seed)
        output = self.prefill(prompt)
        logits = np.stack([output[row, count - 1] for row, count in enumerate(rows)])
        for index in range(tokens):
            chosen = choose(logits, temperature, top_k, top_p, random)
            yield chosen
            if index + 1 < tokens:
                logits = self.step(chosen)

    def _starts(self, rows: int, start: Numbers) -> np.ndarray:
        """Position of each row's first token [B] int64, where a call of `rows` rows may follow."""
        starts = per_row("start", start, rows)
        if self._held.any():
            if rows != self._rows:
                raise ValueError(f"session: rows are the {self._rows} in the cache, got {rows}; reset first")
            if starts.any():
                raise ValueError(f"session: start is given for an empty cache, got {start} with {self._held.tolist()} tokens cached; reset first")
            return self._start
        if self.manifest.signature == "mask" and starts.any():
            raise ValueError(f"session: positions count the attention_mask from 0, got start {start}; export with signature positions")
        return self._start if start is None and rows == self._rows else starts

    def _open(self, starts: np.ndarray, counts: np.ndarray) -> None:
        """Check that `counts` tokens [B] fit; make an empty cache ready."""
        if not counts.any():
            raise ValueError(f"session: a call has a token in some row, got {counts.tolist()} tokens")
        if self._held.any():
            feeds.check_room(self.manifest, self._most, starts, self._held, counts)
            return
        feeds.check_room(self.manifest, self._most, starts, np.zeros_like(starts), counts)
        reuse = self._cache is not None and self._cache.batch == len(starts)
        self._rows, self._start, self._held = len(starts), starts, np.zeros_like(starts)
        if not reuse:
            self._cache = self._graph.open(self._rows, min(self.manifest.capacity_bucket or self._most, self._most))
        self._slots = np.zeros((self._rows, 0), bool)
        self._cache.hide(np.zeros((self._rows, self._cache.columns), bool))
        self._cache.trim(0)
        self._cache.restore([])
        self._history = History()

    def _feed(self, rows: List[np.ndarray], others: Beside) -> List[np.ndarray]:
        """One call, or one per row where the graph takes a single row; outputs [count,*] per row."""
        if self._replaces:
            self._history.record(self._held, self._cache.snapshot(), rows)
        counts = np.array([len(row) for row in rows])
        x, numbers = feeds.padded(rows, others)
        new = x.shape[1]
        self._cache.reserve(self._used + new)
        # Beside S > 1, a row without new tokens forbids one call: its padding would be written over its last token.
        single = self.manifest.continuation_rows == 1 and len(rows) > 1 and (new > 1 or not counts.all()) and bool(self._held.any())
        if single:
            outputs = [self._feed_row(x, numbers, counts, row) for row in range(len(rows))]
        else:
            output = self._cache.run(self._values(x, numbers, counts, slice(None)))
            outputs = [output[row, :count] for row, count in enumerate(counts)]
        self._held = self._held + counts
        if self.manifest.layout == "columns":
            self._slots = np.concatenate((self._slots, np.arange(new)[None] < counts[:, None]), axis=1)
        return outputs

    def _feed_row(self, x: np.ndarray, others: Dict[str, np.ndarray], counts: np.ndarray, row: int) -> np.ndarray:
        width = int(counts[row]) if self.manifest.layout == "rows" else x.shape[1]
        if not width:
            output = self.manifest.outputs[0]
            return np.zeros((0, int(output.axes[-1])), output.dtype)
        only = slice(row, row + 1)
        values = self._values(np.ascontiguousarray(x[only, :width]), {name: part[:, only, :width] for name, part in others.items()}, counts, only)
        return self._cache.run(values, row)[0, : counts[row]]  # type: ignore[no-any-return]

    def _values(self, x: np.ndarray, others: Dict[str, np.ndarray], counts: np.ndarray, rows: slice) -> Dict[str, np.ndarray]:
        return feeds.build(self.manifest, x, others, counts[rows], self._held[rows], self._start[rows], self._slots[rows])

    @property
    def _used(self) -> int:
        """Slots in use, of the longest row or of all rows together."""
        return int(self._held.max()) if self.manifest.layout == "rows" else self._slots.shape[1]

    def _check_keeps(self, what: str) -> None:
        if not self.manifest.states:
            raise ValueError(f"session: {what} needs what is cached, got a bidirectional model, which reads a row at once; call prefill")

    def _prepare_step(self) -> Stepper:
        if not self._rows:
            raise ValueError("session: a prefill comes before the first step, got an empty session; call prefill")
        self._check_keeps("a step")
        self._sync()
        one = np.ones(self._rows, np.int64)
        feeds.check_room(self.manifest, self._most, self._start, self._held, one)
        self._cache.reserve(self._used + 1)
        x = np.zeros([self._rows, 1, *(int(axis) for axis in self._input.axes[2:])], self._input.dtype)
        room = self.manifest.max_positions - int(self.position.max())
        if self._in_place:
            room = min(room, self._most - int(self._held.max()), self._cache.capacity - self._used)
        # The mask is a column longer at every step: no binding can be kept.
        room = 1 if self.manifest.signature == "mask" else room
        self._stepper = Stepper(self._cache, self._values(x, {}, one, slice(None)), self._input, self._vocabulary, room)
        return self._stepper

    def _sync(self) -> None:
        """Bring the lengths up to what the stepper took, and let the next step bind anew."""
        if self._stepper is not None:
            self._held = self._held + self._stepper.taken
            if self.manifest.layout == "columns":
                self._slots = np.concatenate((self._slots, np.ones((self._rows, self._stepper.taken), bool)), axis=1)
            self._stepper = None

    def _hide(self) -> None:
        """Let no graph see what is cached beyond `length`."""
        length = self.length
        if self.manifest.layout == "rows":
            self._cache.hide(np.arange(int(length.max()))[None] < length[:, None])
            return
        self._slots &= np.cumsum(self._slots, axis=1) <= length[:, None]
        self._cache.hide(self._slots)
        columns = int(np.flatnonzero(self._slots.any(0)).max(initial=-1)) + 1
        self._slots = self._slots[:, :columns].copy()
        self._cache.trim(columns)

    def _replay(self, target: np.ndarray) -> None:
        """Back to the last call before target [B] tokens, and forward again: what calls replace cannot be cut."""
        self._sync()
        self._held, states, again = self._history.back_to(target)
        self._hide()
        self._cache.restore(states)
        if any(len(row) for row in again):
            self._feed(again, {})
