"""Sessions: feed tokens at any position and get outputs, with caches kept between calls.

Shapes: B batch, S new tokens. Rows are compacted before they are fed: the graph sees the valid tokens of each row first and padding (position -1) after them.
"""

from typing import Callable, Iterator, NoReturn, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session import arguments, encoder_outputs, generation, graph_inputs
from posenc_export.runtime.session.arguments import Numbers, Rows
from posenc_export.runtime.session.cache_manager import CacheManager
from posenc_export.runtime.session.call_guard import BUSY, CallGuard, exclusive, exclusive_unsettled
from posenc_export.runtime.session.graph_runner import GraphRunner
from posenc_export.runtime.session.state import Caches, SessionState, no_rows
from posenc_export.runtime.session.stepper import Stepper

REWIND = 256  # default number of tokens that can be taken back if states are replaced by each call


class Session:
    """Caches of a batch of rows, with the calls that read and change them: prefill, step, rewind, fork, admit, retire. Created by Model.session.

    A session runs one call at a time: a second call, from another thread or a signal handler, raises RuntimeError. Returned arrays belong to the caller.
    After any exception, `length` gives the tokens that the session holds, and the next call continues from there.

    Args:
        open_caches: function of a number of rows and a number of slots; returns empty caches.
        manifest: description of the graph.
        batch: number of rows to allocate caches for.
        capacity: largest number of slots of in-place caches, at most the range of positions; None allows the whole range.
        rewind: number of tokens that `rewind` can take back if states are replaced by each call; see Model.session.
        device: Model.provider.
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
        self._memory = CacheManager(open_caches, manifest, batch, min(capacity or manifest.max_positions, manifest.max_positions), rewind)
        self._reader = GraphRunner(manifest, self._memory, device)
        self._replaces, self._columns = self._memory.replaces, self._memory.columns
        self._turn = CallGuard()
        self._now = no_rows()

    def __reduce__(self) -> NoReturn:
        """Refuse copy.copy, copy.deepcopy and pickle, whose copies would write into the same caches or lack them."""
        raise TypeError("session: expected fork() to copy a session, got copy or pickle; call session.fork(), or open another with model.session()")

    @exclusive_unsettled
    def reset(self) -> None:
        """Remove all rows and their tokens."""
        self._forget(keep_memory=self._turn.settled)

    @property
    def batch(self) -> int:
        """Number of rows B; 0 before the first prefill."""
        return self._now.rows

    @property
    def length(self) -> np.ndarray:
        """Number of tokens in the cache of each row [B] int64."""
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
        """Feed S tokens per row after those in the cache. Return the outputs [B,S,*], zeros at padding.

        Args:
            inputs: [B,S] int64 ids or [B,S,E] activations, or a list of rows of different lengths. A row without tokens is not changed.
            start: position of each row's first token in this call, one number or [B]. None continues after the tokens in the cache: at `position`, which is 0 in a
                new session. If a row has tokens, `start` cannot move the rows and must be `position` in every row that reads tokens.
            attention_mask: [B,S], 1 at tokens and 0 at padding; padding may be anywhere in a row.
            chunk: number of tokens of a row to feed at a time; None uses the default of the manifest. Bidirectional models read all tokens at once.
            grid: [axes,B,S] int64, coordinates for encodings that have them. None uses the position on every axis, as for text.
            token_types: [B,S] int64, segments for an encoder; None means 0 everywhere.
            encoder: encoder outputs of each row, [B,Q,N] or a list of rows [q,N], for a decoder that reads an encoder. Given with the first tokens of a row. None
                keeps the encoder outputs of rows that a rewind has emptied.
            encoder_attention_mask: [B,Q], 1 at tokens and 0 at padding of `encoder`.
            logits_to_keep: number n of last tokens of each row whose outputs are returned, as [B,n,*] aligned to the last column, with zeros in front of shorter
                rows; n is reduced to the length of the longest row. None or 0 returns all. A graph with input logits_index does not compute other outputs.

        Raises:
            ValueError: a position is outside the range, a row exceeds the capacity, or a shape, dtype or id is wrong. The session is unchanged.
            GraphError: the graph failed. Chunks that succeeded are kept; `length` gives the tokens.
        """
        given = arguments.take(self.manifest, inputs, attention_mask, chunk, grid, token_types, logits_to_keep)
        if not given.counts.any():
            raise ValueError(f"session: expected at least one token in at least one row, got rows of {given.counts.tolist()} tokens")
        state = self._state_to_continue()
        starts = arguments.starts(self.manifest, state.start, state.held, given.counts, start)
        empty = not state.held.any()
        graph_inputs.check_room(self.manifest, self._memory.most, starts, np.zeros_like(starts) if empty else state.held, given.counts)
        read = encoder_outputs.for_call(self.manifest, state.encoded, state.held, len(starts), encoder, encoder_attention_mask)
        return given.spread(self._reader.read(self._memory.opened(state, starts).replace(encoded=read) if empty else state, 0, given, self._commit))

    def step(self, inputs: np.ndarray, copy: bool = True) -> np.ndarray:
        """Feed one token per row and return the outputs [B,*].

        Args:
            inputs: one token per row, [B] int64 or [B,E].
            copy: if False, the returned array belongs to the session and is overwritten by its next call.

        Raises:
            ValueError: there was no prefill, no position or cache slot is left, or a shape, dtype or id is wrong.
            GraphError: the graph failed; the token is not in the cache.
        """
        turn = self._turn
        try:  # the code of `exclusive`, inlined: a wrapper would cost 1 us per token, since each run of the graph evicts Python's memory from the CPU cache
            turn.calls.append(None)
            if len(turn.calls) > 1:
                raise RuntimeError(BUSY)
            if not turn.settled:
                self._settle()
            turn.settled = False
            stepper = self._now.stepper
            if stepper is None or stepper.room <= 0:  # _prepare_step enlarges the caches, or raises if no position or slot is left
                stepper = self._prepare_step()
            if self._replaces:
                self._reader.record_step(self._now, stepper.checked(inputs))
            output = stepper.take(stepper, inputs)
            turn.settled = True
            return output.copy() if copy else output
        finally:
            turn.calls.pop()

    @exclusive
    def rewind(self, n: Numbers) -> None:
        """Take back the last n tokens of each row; n is one number for all rows, or one per row [B].

        Raises:
            ValueError: n exceeds the length of a row, or the history kept for states that each call replaces; or the model has no cache.
        """
        graph_inputs.check_has_cache(self.manifest, "rewind")
        length = self._now.length.tolist()  # Python's integers: numpy takes several us for each operation on few numbers
        back = arguments.per_row("n of rewind", n, len(length) or 1).tolist()
        if min(back) < 0 or any(count > held for count, held in zip(back, length or [0], strict=True)):
            raise ValueError(f"session: expected n of rewind to be at least 0 and at most the lengths {length}, got {back}")
        if not any(back):
            return
        stepper = self._now.stepper
        if not self._replaces and not self._columns and stepper is not None and min(back) == max(back):
            self._memory.count_written(self._now)
            stepper.back(back[0])  # the binding stays valid: the next step is one that it has done before
            self._memory.wipe(self._now)
            return
        state, replay, attributes = self._memory.rewound(self._now.without_stepper(self._columns), np.array(length) - np.array(back))
        self._memory.count_written(self._now)
        self._now = state
        self._settle()
        if any(len(tokens) for tokens in replay):
            _, self._now = self._reader.feed(self._now, 0, replay, attributes, np.zeros(len(back), np.int64))

    @exclusive
    def fork(self) -> "Session":
        """Return an independent session with a copy of the current state. It shares the loaded graph."""
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
        """Append n new rows and prefill them. Return their outputs [n,S,*]. The existing rows are not changed.

        Args:
            inputs, attention_mask, chunk, grid, encoder, encoder_attention_mask, logits_to_keep: as for `prefill`, for the new rows.
            start: position of the first token of each new row, one number or [n]; None means 0.

        Raises:
            ValueError: as for `prefill`; the target's rows share cache columns; a new row has no tokens. The session is unchanged.
            GraphError: the graph failed; no row was added.
        """
        graph_inputs.check_rows_are_independent(self.manifest, "admit")
        given = arguments.take(self.manifest, inputs, attention_mask, chunk, grid, None, logits_to_keep)
        if not given.counts.all():
            raise ValueError(f"session: expected at least one token in every new row, got rows of {given.counts.tolist()} tokens; leave empty rows out")
        starts = arguments.per_row("start", start, len(given.tokens))
        graph_inputs.check_room(self.manifest, self._memory.most, starts, np.zeros_like(starts), given.counts)
        state = self._now.without_stepper(self._columns)
        new = encoder_outputs.take(self.manifest, encoder, encoder_attention_mask, len(starts))
        joined = self._memory.joined(state, starts) if state.rows else self._memory.opened(state, starts)
        reached = [joined.replace(encoded=state.encoded.joined(new) if state.encoded and new else new)]
        outputs = self._reader.read(reached[0], state.rows, given, reached.append)
        self._now = reached[-1]
        return given.spread(outputs)

    @exclusive
    def retire(self, row: int) -> None:
        """Remove a row. The last row takes its index, so that rows are 0 .. B - 2 afterwards.

        Raises:
            ValueError: there is no such row, or the target's rows share cache columns.
        """
        graph_inputs.check_rows_are_independent(self.manifest, "retire")
        state = self._now.without_stepper(self._columns)
        if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < state.rows:
            raise ValueError(f"session: expected a row index 0 .. {state.rows - 1}, got {arguments.short_repr(row)}")
        self._memory.count_written(self._now)
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
        """Generate tokens after a prompt. Yields the next ids [B] int64 until every row has ended; the last ids are not fed.

        Args:
            prompt: ids of each row, [B,S] or a list of rows.
            max_tokens: largest number of ids to generate per row.
            temperature, top_k, top_p, seed: as for sampling.choose, with a random generator of this seed.
            stop: ids that end a row; ended rows yield -1. None uses the ids of the artefact (Manifest.stop_ids).
            encoder: as for `prefill`.

        Raises:
            ValueError: as for `prefill` and `step`; the model has no vocabulary, a row has no tokens, or max_tokens is below 1. Raised with the first id.
        """
        return generation.generate(self, prompt, max_tokens, temperature, top_k, top_p, seed, stop, encoder)

    def _commit(self, state: SessionState) -> None:
        self._now = state

    def _state_to_continue(self) -> SessionState:
        """Return the state from which a prefill continues: the current one, or an empty one for bidirectional models, which read whole rows."""
        return self._now.without_stepper(self._columns) if self.manifest.states else no_rows().replace(caches=self._now.caches)

    def _prepare_step(self) -> Stepper:
        if not self._now.rows:
            raise ValueError("session: expected a prefill before the first step, got an empty session; call prefill")
        graph_inputs.check_has_cache(self.manifest, "step")
        self._memory.count_written(self._now)
        self._now = self._reader.ready_to_step(self._now.without_stepper(self._columns))
        assert self._now.stepper is not None
        return self._now.stepper

    def _settle(self) -> None:
        """Complete pending changes of the last call. If this is interrupted, each assignment below has committed the work up to it."""
        self._memory.count_written(self._now)
        self._now = self._now.without_stepper(self._columns)
        self._now = self._memory.apply_moves(self._now)
        self._memory.tidy(self._now)

    def _forget(self, keep_memory: bool) -> None:
        """Remove all rows. The caches are reused if `keep_memory`, which requires that the last call succeeded."""
        self._memory.count_written(self._now)
        caches = self._now.without_stepper(self._columns).caches if keep_memory else None
        self._now = no_rows().replace(caches=caches)
