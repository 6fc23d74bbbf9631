"""A session: tokens in at any offset, outputs out, with the cache kept between calls.

Shapes: B batch, S new tokens. Whatever padding comes in, rows are fed with their valid tokens first; the graph sees -1 only behind them.
"""

from typing import Callable, Iterator, Optional, Sequence

import numpy as np

from posenc_export.runtime import encoded, feeds, generation, rows
from posenc_export.runtime.committed import Caches, Committed, nothing
from posenc_export.runtime.exclusive import BUSY, Turn, exclusive, exclusive_as_it_is
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.memory import Memory
from posenc_export.runtime.reader import Reader
from posenc_export.runtime.rows import Numbers, Rows
from posenc_export.runtime.stepper import Stepper

REWIND = 256  # tokens that can be taken back where states are replaced by each call


class Session:
    """Prefill, step, rewind, fork on one set of caches; made by Model.session.

    One call at a time: a second one, from another thread or a signal handler, is refused. Arrays that calls return are the caller's own.
    After an exception of any kind the session holds what `length` says, and the next call goes on from there.

    Args:
        open_caches: empty caches for so many rows of so many slots.
        manifest: description of the graph.
        batch: rows that caches have room for at first.
        capacity: most slots of in-place caches, at most the range of positions; the whole range where None.
        rewind: tokens that `rewind` can take back, from the furthest a row has read, where states are replaced by each call; memory follows it.
        device: what runs the graph, Model.provider.
    """

    def __init__(
        self,
        open_caches: Callable[[int, int], Caches],
        manifest: Manifest,
        batch: int = 1,
        capacity: Optional[int] = None,
        rewind: int = REWIND,
        device: str = "cpu",
    ) -> None:
        self.manifest, self.provider = manifest, device
        self._memory = Memory(open_caches, manifest, batch, min(capacity or manifest.max_positions, manifest.max_positions), rewind)
        self._reader = Reader(manifest, self._memory, device)
        self._replaces, self._columns = self._memory.replaces, self._memory.columns
        self._turn = Turn()
        self._now = nothing()

    @exclusive_as_it_is
    def reset(self) -> None:
        """Forget everything, the number of rows included."""
        self._forget(keep_memory=self._turn.settled)

    @property
    def batch(self) -> int:
        """Rows B; 0 before the first prefill."""
        return self._now.rows

    @property
    def length(self) -> np.ndarray:
        """Tokens in the cache [B] int64."""
        return self._now.length.copy()

    @property
    def position(self) -> np.ndarray:
        """Position of the next token of each row [B] int64."""
        now = self._now
        return now.start + now.length

    @exclusive
    def prefill(
        self,
        inputs: Rows,
        start: Numbers = None,
        attention_mask: Optional[np.ndarray] = None,
        chunk: Optional[int] = None,
        grid: Optional[np.ndarray] = None,
        token_types: Optional[np.ndarray] = None,
        encoder: Optional[Rows] = None,
        encoder_attention_mask: Optional[np.ndarray] = None,
        logits_to_keep: Optional[int] = None,
    ) -> np.ndarray:
        """Feed S tokens per row, behind those in the cache; output [B,S,*], zeros at padding.

        Args:
            inputs: [B,S] int64 ids or [B,S,E] activations, or a list of rows of any lengths; a row without tokens stays as it is.
            start: position of each row's first token, one or [B], for an empty cache; where None, `position`: 0, or what a rewind to nothing left.
            attention_mask: [B,S], 0 at padding, wherever it stands.
            chunk: tokens fed at a time; the manifest's where None. A bidirectional model reads all at once.
            grid: [axes,B,S] int64, coordinates for encodings that have them; the position on every axis where None, as for text.
            token_types: [B,S] int64, segments for an encoder; all 0 where None.
            encoder: what the encoder gave for each row, [B,Q,N] or a list of rows [q,N], for a decoder that reads one, with the first tokens of its rows. Rows
                that a rewind emptied keep theirs where None.
            encoder_attention_mask: [B,Q], 0 at padding of encoder.
            logits_to_keep: outputs of the last n tokens of each row alone [B,n,*], those of its last token in the last column, zeros in front of a row of fewer
                tokens; n is at most the tokens of the longest row. None or 0 for all. A graph with input logits_index computes no others.

        Raises:
            ValueError: positions beyond the range, more tokens than capacity, shapes or ids that do not fit; the session is then as before.
            GraphError: the graph stopped; chunks that were read before are kept, as `length` says.
        """
        given = rows.take(self.manifest, inputs, attention_mask, chunk, grid, token_types, logits_to_keep)
        if not given.counts.any():
            raise ValueError(f"session: expected a token in some row, got {given.counts.tolist()} tokens")
        # A bidirectional model reads whole rows: nothing of the last call stays, once this one is known to fit.
        state = self._now.without_stepper(self._columns) if self.manifest.states else nothing().replace(caches=self._now.caches)
        starts = self._starts(state, len(given.tokens), start)
        empty = not state.held.any()
        feeds.check_room(self.manifest, self._memory.most, starts, np.zeros_like(starts) if empty else state.held, given.counts)
        read = encoded.for_call(self.manifest, state.encoded, state.held, len(starts), encoder, encoder_attention_mask)

        def commit(following: Committed) -> None:
            self._now = following

        return given.spread(self._reader.read(self._memory.opened(state, starts).replace(encoded=read) if empty else state, 0, given, commit))

    def step(self, inputs: np.ndarray, copy: bool = True) -> np.ndarray:
        """Feed one token per row: [B] int64 or [B,E] to [B,*].

        Args:
            inputs: a token of every row.
            copy: where False, the array is the session's own and is overwritten by its next call.

        Raises:
            ValueError: nothing prefilled, the range or capacity is used up, ids or shapes that do not fit.
            GraphError: the graph stopped; the token is not in the cache.
        """
        turn = self._turn
        try:  # what `exclusive` does, written out: a wrapper more costs every token 1 us behind a run that left Python's memory cold
            turn.calls.append(None)
            if len(turn.calls) > 1:
                raise RuntimeError(BUSY)
            if not turn.settled:
                self._settle()
            turn.settled = False
            stepper = self._now.stepper
            if stepper is None or stepper.room <= 0:  # of this binding: the range may be used up, or only the bucket
                stepper = self._prepare_step()
            if self._replaces:
                self._reader.remember_step(self._now, stepper.checked(inputs))
            output = stepper.take(stepper, inputs)
            turn.settled = True
            return output.copy() if copy else output
        finally:
            turn.calls.pop()

    @exclusive
    def rewind(self, n: Numbers) -> None:
        """Take back the last n tokens, of every row or [B].

        Raises:
            ValueError: more than a row holds, or more than is remembered where states are replaced by each call; a model that keeps nothing.
        """
        feeds.check_keeps(self.manifest, "a rewind")
        length = self._now.length
        back = rows.per_row("a rewind", n, len(length) or 1)
        if (back < 0).any() or (back > (length if len(length) else 0)).any():
            raise ValueError(f"session: a rewind is 0 .. the tokens of the row {length.tolist()}, got {back.tolist()}")
        if not back.any():
            return
        stepper = self._now.stepper
        if not self._replaces and not self._columns and stepper is not None and back.min() == back.max():
            self._memory.mark(self._now)
            stepper.back(int(back[0]))  # the next step stands where an earlier one stood: its binding serves again
            self._memory.wipe(self._now)
            return
        state, again, numbers = self._memory.taken_back(self._now.without_stepper(self._columns), length - back)
        self._memory.mark(self._now)
        self._now = state
        self._settle()
        if any(len(tokens) for tokens in again):
            _, self._now = self._reader.feed(self._now, 0, again, numbers, np.zeros_like(back))

    @exclusive
    def fork(self) -> "Session":
        """An independent session from here, sharing the loaded graph."""
        self._settle()
        memory = self._memory
        other = Session(memory.open_caches, self.manifest, memory.batch, memory.most, memory.rewind, self.provider)
        now = self._now
        caches = now.caches.fork(now.rows, self._memory.used(now)) if now.caches else None
        other._now = now.replace(caches=caches, histories=tuple(history.copy() for history in now.histories))
        return other

    @exclusive
    def admit(
        self,
        inputs: Rows,
        start: Numbers = None,
        attention_mask: Optional[np.ndarray] = None,
        chunk: Optional[int] = None,
        grid: Optional[np.ndarray] = None,
        encoder: Optional[Rows] = None,
        encoder_attention_mask: Optional[np.ndarray] = None,
        logits_to_keep: Optional[int] = None,
    ) -> np.ndarray:
        """New rows behind those that run, prefilled on their own; their output [n,S,*]. The rows that run stay as they are.

        Args:
            inputs, attention_mask, chunk, grid, encoder, encoder_attention_mask, logits_to_keep: of the new rows, as `prefill`.
            start: position of each new row's first token, one or [n]; 0 where None.

        Raises:
            ValueError: as prefill; a target whose rows share columns, a new row without tokens. The session is then as before.
            GraphError: the graph stopped; no row was admitted.
        """
        feeds.check_rows(self.manifest, "admit")
        given = rows.take(self.manifest, inputs, attention_mask, chunk, grid, None, logits_to_keep)
        if not given.counts.all():
            raise ValueError(f"session: expected a token in every admitted row, got {given.counts.tolist()} tokens")
        starts = rows.per_row("start", start, len(given.tokens))
        feeds.check_room(self.manifest, self._memory.most, starts, np.zeros_like(starts), given.counts)
        state = self._now.without_stepper(self._columns)
        new = encoded.take(self.manifest, encoder, encoder_attention_mask, len(starts))
        joined = self._memory.joined(state, starts) if state.rows else self._memory.opened(state, starts)
        reached = [joined.replace(encoded=state.encoded.joined(new) if state.encoded and new else new)]
        outputs = self._reader.read(reached[0], state.rows, given, reached.append)
        self._now = reached[-1]
        return given.spread(outputs)

    @exclusive
    def retire(self, row: int) -> None:
        """Drop a row; the last row takes its index, so that rows stay 0 .. B - 2.

        Raises:
            ValueError: no such row, a target whose rows share columns.
        """
        feeds.check_rows(self.manifest, "retire")
        state = self._now.without_stepper(self._columns)
        if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < state.rows:
            raise ValueError(f"session: expected a row 0 .. {state.rows - 1}, got {rows.shown(row)}")
        self._memory.mark(self._now)
        self._now = self._memory.without(state, int(row))
        self._settle()

    def generate(
        self,
        prompt: Rows,
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Optional[Sequence[int]] = None,
        encoder: Optional[Rows] = None,
    ) -> Iterator[np.ndarray]:
        """Yield the next ids [B] int64 after a prompt [B,S] or list of rows, until every row has ended. The last ids are not fed.

        Args:
            prompt: ids of each row.
            max_tokens: ids of a row at most.
            temperature, top_k, top_p, seed: as sampling.choose.
            stop: ids that end a row, which gives -1 from then on; those of the artefact (Manifest.stop_ids) where None.
            encoder: as prefill.

        Raises:
            ValueError: as prefill and step; a model without a vocabulary, a row without tokens, max_tokens below 1. At the first id, as with any generator.
        """
        return generation.generate(self, prompt, max_tokens, temperature, top_k, top_p, seed, stop, encoder)

    def _starts(self, state: Committed, count: int, start: Numbers) -> np.ndarray:
        """Position of each row's first token [B] int64, where a call of `count` rows may follow."""
        starts = rows.per_row("start", start, count)
        if state.held.any():
            if count != state.rows:
                raise ValueError(f"session: rows are the {state.rows} in the cache, got {count}; reset first")
            if starts.any():
                raise ValueError(f"session: start is given for an empty cache, got {rows.shown(start)} with {state.held.tolist()} tokens cached; reset first")
            return state.start
        if self.manifest.signature == "mask" and starts.any():
            raise ValueError(f"session: positions count the attention_mask from 0, got start {rows.shown(start)}; export with signature positions")
        return state.start if start is None and count == state.rows else starts

    def _prepare_step(self) -> Stepper:
        if not self._now.rows:
            raise ValueError("session: a prefill comes before the first step, got an empty session; call prefill")
        feeds.check_keeps(self.manifest, "a step")
        self._memory.mark(self._now)
        self._now = self._reader.ready_to_step(self._now.without_stepper(self._columns))
        assert self._now.stepper is not None
        return self._now.stepper

    def _settle(self) -> None:
        """Finish what the last call left undone. It may break off itself: each store below commits what is done."""
        self._memory.mark(self._now)
        self._now = self._now.without_stepper(self._columns)
        self._now = self._memory.moved(self._now)
        self._memory.tidy(self._now)

    def _forget(self, keep_memory: bool) -> None:
        """No rows; the memory of the caches serves again where nothing is wrong with it."""
        self._memory.mark(self._now)
        caches = self._now.without_stepper(self._columns).caches if keep_memory else None
        self._now = nothing().replace(caches=caches)
