"""Sessions: feed tokens at any position and get outputs, with caches kept between calls.

Shapes: B batch, S new tokens. Rows are compacted before they are fed: the graph sees the valid
tokens of each row first and padding (position -1) after them.
"""

import functools
import math
from typing import Any, Callable, Generator, NoReturn, Self, Sequence, TypeVar

import numpy as np

from posenc_export.runtime.artefact.records import BYTES
from posenc_export.runtime.session import arguments, generation, runner
from posenc_export.runtime.session.arguments import Inputs, Numbers, RowTokens
from posenc_export.runtime.session.caches import INITIAL_SLOTS, Caches, Graph
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.generation import Speculate
from posenc_export.runtime.session.prefixes import Prefix, Prefixes
from posenc_export.runtime.session.rows import Rows

REWIND = 256  # default number of tokens that can be taken back if states are replaced by each call
Method = TypeVar("Method", bound=Callable[..., Any])
BUSY = (
    "session: expected one call at a time, got another while one runs; open a session for each "
    "thread with model.session()"
)


def exclusive(method: Method) -> Method:
    """Decorate a method of a session: raise RuntimeError while another call on it runs. Appending
    to its `_guard` and removing are atomic in CPython, so that an interrupt cannot split them.
    """

    @functools.wraps(method)
    def alone(self: Any, *arguments: Any, **named: Any) -> Any:
        guard = self._guard
        try:
            guard.append(None)
            if len(guard) > 1:
                raise RuntimeError(BUSY)
            return method(self, *arguments, **named)
        finally:
            guard.pop()

    return alone  # type: ignore[return-value]


class Session:
    """Caches of a batch of rows, with the calls that read and change them: prefill, step, rewind,
    fork, admit, retire. Created by Model.session.

    A session runs one call at a time: a second call, from another thread or a signal handler,
    raises RuntimeError. Returned arrays belong to the caller. After any exception, `length` gives
    the tokens that the session holds, and the next call continues from there.

    Args:
        graph: the loaded graph.
        batch, capacity, rewind: as for Model.session; capacity is at most the range of positions.

    Attributes:
        rewindable: number of tokens that can be taken back if states are replaced by each call.
    """

    def __init__(
        self, graph: Graph, batch: int = 1, capacity: int | None = None, rewind: int = REWIND
    ) -> None:
        self.manifest, self.provider, self.rewindable = graph.manifest, graph.provider, rewind
        most = min(capacity or self.manifest.max_positions, self.manifest.max_positions)
        self._runner = runner.Runner(graph)
        self._guard: list[None] = []
        self._state = Rows(Caches(graph, most, batch, rewind))

    def __reduce__(self) -> NoReturn:
        """Refuse copies that would write into the same caches or lack them."""
        rule = "expected fork() to copy a session, got copy or pickle"
        remedy = "call session.fork(), or open another with model.session()"
        raise TypeError(f"session: {rule}; {remedy}")

    @property
    def batch(self) -> int:
        """Number of rows B; 0 before the first prefill."""
        return self._state.count

    @property
    def length(self) -> np.ndarray:
        """Number of tokens in the cache of each row [B] int64."""
        return self._state.length.copy()

    @property
    def room(self) -> np.ndarray:
        """Number of tokens that each row [B] int64 has room for, in positions and caches."""
        return self._state.room

    @property
    def memory(self) -> int:
        """Bytes of the caches. Rows written in place on the CPU take memory as they grow, and only
        written slots count. In other caches, all allocated rows and slots count; both grow in
        powers of two.
        """
        caches, total = self._state.caches, 0
        for buffer in caches.buffers:
            lazy = buffer.mapping is not None  # of these, only slots that may be written count
            slots = int(caches.written.sum()) if lazy else 0
            total += slots * buffer.row_bytes // caches.extent if lazy else buffer.bytes
        return total

    @exclusive
    def prefill(
        self,
        inputs: Inputs,
        start: Numbers = None,
        attention_mask: np.ndarray | None = None,
        chunk: int | None = None,
        grid: np.ndarray | None = None,
        token_types: np.ndarray | None = None,
        encoder: Inputs | None = None,
        logits_to_keep: int | None = None,
    ) -> np.ndarray:
        """Feed S tokens per row after those in the cache. Return the outputs [B,S,*], zeros at
        padding.

        Args:
            inputs: [B,S] int64 ids or [B,S,E] activations, or a list of rows of different lengths.
                A row without tokens is not changed.
            start: position of each row's first token in this call, one number or [B]. None
                continues at `position`, which is 0 in a new session. It cannot move rows that have
                tokens: in those that read more, it must be `position`.
            attention_mask: [B,S], 1 at tokens and 0 at padding before or behind them.
            chunk: number of tokens of a row to feed at a time; None for that of the manifest.
                Bidirectional models read all tokens at once.
            grid: [axes,B,S] int64, coordinates for encodings that have them. None uses the position
                on every axis, as for text: tokens of an image then get other coordinates than those
                of their rows and columns, without an error. Edges of boxes are 0 then.
            token_types: [B,S] int64, segments for an encoder; None means 0 everywhere.
            encoder: encoder outputs of each row, [B,Q,N] or a list of rows [q,N], for a decoder
                that reads an encoder. Given with the first tokens of a row. None reuses the encoder
                outputs of rows that a rewind has emptied.
            logits_to_keep: number n of last tokens of each row whose outputs are returned, as
                [B,n,*] aligned to the last column, with zeros in front of shorter rows; at most
                that of the longest row. None or 0 returns all. A graph with input logits_index does
                not compute other outputs.

        Raises:
            ValueError: a position is outside the range, a row exceeds the capacity, or a shape,
                dtype or id is wrong. The session is unchanged.
            GraphError: the graph failed. Chunks that succeeded are kept; `length` gives the tokens.
        """
        plain = start is attention_mask is chunk is grid is token_types is None
        plain = plain and encoder is logits_to_keep is None
        if plain and self._state.count and isinstance(inputs, np.ndarray):
            few = self._read_few(inputs)
            if few is not None:
                return few
        prompt = arguments.check_prefill(
            self.manifest, inputs, start, attention_mask, chunk, grid, token_types,
            encoder, logits_to_keep,
        )  # fmt: skip
        rows = runner.open_rows(self._settled(), prompt)
        outputs = prompt.outputs(self.manifest.outputs[0])
        for tokens in prompt.chunks(0, rows.caches.window.new):
            rows = self._read(rows, tokens, outputs)
        return prompt.in_columns(outputs)

    @exclusive
    def read_out(
        self,
        inputs: Inputs,
        start: Numbers = None,
        attention_mask: np.ndarray | None = None,
        grid: np.ndarray | None = None,
        token_types: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read whole rows and return the second output of a model, such as sentence_embedding
        [B,N].

        Args: as for `prefill`. The hidden states are not returned.

        Raises:
            ValueError: as for `prefill`; the model has no second output, or a row has no tokens.
            GraphError: the graph failed.
        """
        arguments.check_read_out(self.manifest)
        prompt = arguments.check_prefill(
            self.manifest, inputs, start, attention_mask, None, grid, token_types
        )
        arguments.check_every_row(prompt.tokens.counts, "row")
        return self._runner.read_out(runner.open_rows(self._settled(), prompt), prompt)

    def step(self, inputs: np.ndarray, copy: bool = True) -> np.ndarray:
        """Feed one token per row and return the outputs [B,*].

        Args:
            inputs: one token per row, [B] int64 or [B,E].
            copy: if False, the returned array belongs to the session and is overwritten by its next
                call.

        Raises:
            ValueError: there was no prefill, no position or cache slot is left, or a shape, dtype
                or id is wrong.
            GraphError: the graph failed; the token is not in the cache.
        """
        guard = self._guard
        # The code of `exclusive`, inlined: a wrapper would cost 1 us per token, since each run of
        # the graph evicts Python's memory from the CPU cache.
        try:
            guard.append(None)
            if len(guard) > 1:
                raise RuntimeError(BUSY)
            rows = self._state
            if rows.ready <= 0:
                rows = self._prepare_step()
            output = rows.bound[1].take(rows, inputs)
            return output.copy() if copy else output
        finally:
            guard.pop()

    @exclusive
    def admit(
        self,
        inputs: Inputs,
        start: Numbers = None,
        attention_mask: np.ndarray | None = None,
        chunk: int | None = None,
        grid: np.ndarray | None = None,
        encoder: Inputs | None = None,
        logits_to_keep: int | None = None,
        prefix: Prefix | None = None,
    ) -> np.ndarray:
        """Append n new rows and prefill them. Return their outputs [n,S,*]. The existing rows are
        not changed.

        Args:
            inputs, attention_mask, chunk, grid, encoder, logits_to_keep: as for `prefill`, for the
                new rows.
            start: position of the first token of each new row, one number or [n]; None means 0.
            prefix: cached tokens with which a single new row begins at position 0, from
                Prefixes.find; `inputs` are the tokens after them.

        Raises:
            ValueError: as for `prefill`; the target's rows share cache columns; a new row has no
                tokens; there is a prefix and not one row at position 0. The session is unchanged.
            GraphError: the graph failed; no row was added.
        """
        arguments.check_rows_are_independent(self.manifest, "admit")
        prompt = arguments.check_prefill(
            self.manifest, inputs, start, attention_mask, chunk, grid, None, encoder, logits_to_keep
        )
        rows = self._settled()
        first, rows = rows.count, runner.admit_rows(rows, prompt, prefix)
        outputs = prompt.outputs(self.manifest.outputs[0])
        for tokens in prompt.chunks(first, rows.caches.window.new):
            rows = self._runner.with_room(rows, tokens.rows, tokens.counts).settled()
            rows = self._runner.run_chunk(rows, tokens, outputs)
        self._state = rows
        return prompt.in_columns(outputs)

    def generate(
        self,
        prompt: Inputs | None,
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        encoder: Inputs | None = None,
        speculate: Speculate = None,
        before: Inputs | None = None,
    ) -> Generator[np.ndarray, None, None]:
        """Generate tokens after a prompt. Yields the next ids [B] int64 until every row has ended;
        the last ids are not fed.

        Args:
            prompt: ids of each row, [B,S] or a list of rows. None for the first tokens of a decoder
                that reads an encoder.
            max_tokens: largest number of ids per row; a row without room for more ends earlier.
            temperature, top_k, top_p, seed: as for generation.Sampling; each row has a random
                generator of its own, of this seed and the row's index.
            stop: ids that end a row; ended rows yield -1. None uses Manifest.stop_ids.
            encoder: as for `prefill`.
            speculate: "lookup" drafts what followed the latest tokens earlier in the text of the
                row, and reads several in one pass, more after drafts that were right; the ids are
                the same. None reads one token per pass.
            before: ids that each row has read before the prompt, among which drafts are looked up.

        Raises:
            ValueError: as for `prefill` and `step`; the model has no vocabulary, a row has no
                tokens, max_tokens is below 1, or the session does not allow `speculate`. Raised
                with the first id.
        """
        sampling = generation.Sampling(temperature, top_k, top_p, seed, max_tokens, stop)
        return generation.generate(self, prompt, sampling, encoder, speculate, before)

    @exclusive
    def reset(self) -> None:
        """Remove all rows and their tokens."""
        self._state = Rows(self._settled().caches)

    @exclusive
    def trim(self) -> None:
        """Return memory of tokens that have left the caches to the system, where rows take memory
        as they are written. It takes as long as a few steps.
        """
        caches = self._state.caches
        written, kept = caches.written, np.zeros_like(caches.written)
        kept[: self.batch] = self._state.length
        for row in np.flatnonzero(written > kept + INITIAL_SLOTS).tolist() if caches.lazy else ():
            for buffer in caches.buffers:
                if buffer.mapping is not None:
                    buffer.release(row, int(kept[row]))
            written[row] = kept[row]

    def memory_of(self, rows: int, tokens: int) -> int:
        """Return the most bytes that the caches take while they grow to `rows` rows of `tokens`
        tokens. If the caches must move to larger memory, both memories count.
        """
        caches, now = self._state.caches, self.memory
        count, extent = 1 << (rows - 1).bit_length(), caches.fitting(tokens)
        fits = rows <= caches.rows and extent <= caches.extent
        if caches.lazy:  # `trim` leaves up to INITIAL_SLOTS slots of a row
            count, extent = rows, tokens + INITIAL_SLOTS
            fits = rows <= max(caches.rows, caches.fewest_rows)
        elif fits:
            return now
        states = self.manifest.states
        numbers = [math.prod(caches.shape(state, count, extent)) for state in states]
        needed = sum(n * BYTES[state.dtype] for n, state in zip(numbers, states, strict=True))
        return max(needed, now) if fits else needed + max(now, needed // 2)

    @property
    def position(self) -> np.ndarray:
        """Position of the next token of each row [B] int64."""
        state = self._state
        return state.first_position + state.length

    @exclusive
    def rewind(self, n: Numbers) -> None:
        """Take back the last n tokens of each row; n is one number for all rows, or one per row
        [B].

        Raises:
            ValueError: n exceeds the length of a row, or the history kept for states that each call
                replaces; or the model has no cache.
        """
        # Python's integers: numpy takes several us for each operation on few numbers.
        length = self._state.length.tolist()
        back = arguments.check_rewind(self.manifest, length, n)
        if not any(back) or self._state.step_back(back):
            return
        target = np.array(length) - np.array(back)
        self._state, replay = self._settled().rewound(target)
        rows = self._settled()
        if replay.counts.any():
            unread = np.zeros((rows.count, 0))  # no output is requested
            self._read(rows, replay, unread)

    @exclusive
    def fork(self) -> Self:
        """Return an independent session on the same graph with a copy of the current state."""
        rows = self._settled()
        caches = rows.caches
        other = type(self)(caches.graph, caches.fewest_rows, caches.capacity, caches.rewind)
        other._state = rows.replace(caches=caches.fork(rows.used, rows.turn))
        return other

    @exclusive
    def share(self, row: int, tokens: Sequence[int], prefixes: Prefixes, key: str = "") -> None:
        """Copy the caches of the first tokens of a row, which began at position 0, to `prefixes`
        (Prefixes.save).

        Raises:
            ValueError: there is no such row, it begins at another position, or it has fewer
                tokens.
        """
        arguments.check_row(row, self.batch)
        state = self._settled()
        first, length = state.first_position[row], state.length[row]
        if first or len(tokens) > length:
            got = f"{len(tokens)} of {length} tokens from position {first} on"
            rule = "tokens of a row that begins at position 0"
            raise expected(rule, got, "give the tokens that were fed")
        prefixes.save(state, int(row), tokens, key)

    @exclusive
    def retire(self, row: int) -> None:
        """Remove a row. The last row takes its index, so that rows are 0 .. B - 2 afterwards.

        Raises:
            ValueError: there is no such row, or the target's rows share cache columns.
        """
        arguments.check_rows_are_independent(self.manifest, "retire")
        state = self._settled()
        arguments.check_row(row, state.count)
        self._state = state.without(int(row))
        self._settled()

    def _settled(self) -> Rows:
        """Return the rows for a call other than a step. Drops bindings, writes what is pending, as
        after an interrupt, and clears slots behind the tokens if the graph reads them.
        """
        rows = self._state
        if rows.bound:
            rows.unbind()
        if rows.pending:
            rows = self._do_pending(rows)
        if rows.caches.reads_hidden:
            rows.wipe()
        return rows

    def _read(self, rows: Rows, tokens: RowTokens, outputs: np.ndarray) -> Rows:
        """Read tokens, and return the rows of the session after them."""
        rows = self._runner.with_room(rows, tokens.rows, tokens.counts)
        if rows.pending:
            rows = self._do_pending(rows)
        rows = self._state = self._runner.run_chunk(rows, tokens, outputs)
        return rows

    def _do_pending(self, rows: Rows) -> Rows:
        """Assign rows, do their pending writes, and return the rows without these."""
        self._state = rows
        rows = self._state = rows.settled()
        return rows

    def _read_few(self, inputs: np.ndarray) -> np.ndarray | None:
        """Read S tokens per row, [B,S] or [B,S,E], as a step, or as a pass if a step is bound.
        Return the outputs [B,S,*], or None if that is not possible.
        """
        rows, new = self._state, inputs.shape[1] if inputs.ndim > 1 else 0
        if new == 1:
            if not self.manifest.states or not rows.length.any():
                return None
            if rows.ready <= 0:
                if rows.room.min() < 1:
                    return None
                rows = self._prepare_step()
        if rows.ready <= 0 or not 1 <= new <= self._runner.widest(rows):
            return None
        token = rows.bound[1].tokens
        if (len(inputs), *inputs.shape[2:]) != token.shape or inputs.dtype != token.dtype:
            return None
        if new not in rows.bound:
            rows.bound[new] = self._runner.bind(rows, new)
        if new > 1:
            return rows.bound[new].take(rows, inputs).copy()
        return rows.bound[1].take(rows, inputs[:, 0])[:, None].copy()

    def _prepare_step(self) -> Rows:
        """Return the rows with a bound step. Raise ValueError if no position or slot is left."""
        if not self._state.count:
            raise arguments.no_rows("the first step")
        arguments.check_has_cache(self.manifest, "step")
        rows = self._settled()
        ones = np.ones(rows.count, np.int64)
        rows.check_room(ones)
        rows = self._do_pending(self._runner.with_room(rows, slice(0, rows.count), ones))
        rows = self._state = self._runner.bind_step(rows)
        return rows
