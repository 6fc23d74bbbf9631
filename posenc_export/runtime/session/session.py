"""Sessions: feed tokens at any position and get outputs, with caches kept between calls.

Shapes: B batch, S new tokens. Rows are compacted before they are fed: the graph sees the valid
tokens of each row first and padding (position -1) after them.
"""

import functools
from pathlib import Path
from typing import Generator, NoReturn, Optional, Sequence, Union

import numpy as np

from posenc_export.runtime.session import (
    arguments,
    encoder_outputs,
    first_tokens,
    generation,
    saved,
)
from posenc_export.runtime.session.arguments import Numbers, PrefillArguments, Rows
from posenc_export.runtime.session.caches import Caches
from posenc_export.runtime.session.call_guard import BUSY, CallGuard, exclusive
from posenc_export.runtime.session.draft_length import PassCosts
from posenc_export.runtime.session.graph import Graph
from posenc_export.runtime.session.prefixes import Prefix, Prefixes
from posenc_export.runtime.session.reading import Reading
from posenc_export.runtime.session.speculation import Speculate
from posenc_export.runtime.session.state import SessionState
from posenc_export.runtime.session.stepper import Stepper

REWIND = 256  # default number of tokens that can be taken back if states are replaced by each call


class Session:
    """Caches of a batch of rows, with the calls that read and change them: prefill, step, rewind,
    fork, admit, retire. Created by Model.session.

    A session runs one call at a time: a second call, from another thread or a signal handler,
    raises RuntimeError. Returned arrays belong to the caller. After any exception, `length` gives
    the tokens that the session holds, and the next call continues from there.

    Args:
        graph: the loaded graph.
        batch: number of rows that the first caches hold at least.
        capacity: largest number of slots of in-place caches, at most the range of positions; None
            allows the whole range.
        rewind: number of tokens that `rewind` can take back if states are replaced by each call;
            see Model.session.

    Attributes:
        rewindable: number of tokens that can be taken back if states are replaced by each call.
        pass_costs: times of passes of several tokens, measured by speculative decoding.
    """

    def __init__(
        self, graph: Graph, batch: int = 1, capacity: Optional[int] = None, rewind: int = REWIND
    ) -> None:
        self.manifest, self.provider, self.rewindable = graph.manifest, graph.provider, rewind
        most = min(capacity or self.manifest.max_positions, self.manifest.max_positions)
        self._reading = Reading(graph)
        self._guard = CallGuard()
        self._now = SessionState.empty(Caches.of(graph, most, batch), rewind)
        self._replaces = self._now.replaces
        self.pass_costs = PassCosts(self.manifest.continuation_rows == 1)

    def __reduce__(self) -> NoReturn:
        """Refuse copy.copy, copy.deepcopy and pickle, whose copies would write into the same
        caches or lack them.
        """
        raise TypeError(
            "session: expected fork() to copy a session, got copy or pickle; call "
            "session.fork(), or open another with model.session()"
        )

    @functools.partial(exclusive, settles=False)
    def reset(self) -> None:
        """Remove all rows and their tokens."""
        caches = self._now.without_stepper().caches
        # After an exception, memory is allocated anew.
        caches = caches if self._guard.settled else caches.empty()
        self._now = SessionState.empty(caches, self.rewindable)

    @property
    def batch(self) -> int:
        """Number of rows B; 0 before the first prefill."""
        return self._now.rows

    @property
    def length(self) -> np.ndarray:
        """Number of tokens in the cache of each row [B] int64."""
        return self._now.length.copy()

    @property
    def room(self) -> np.ndarray:
        """Number of tokens that each row [B] int64 has room for, in the range of positions and
        in caches of the largest capacity.
        """
        now = self._now
        return arguments.room(self.manifest, now.caches.most, now.start, now.length)

    @property
    def memory(self) -> int:
        """Bytes of the caches. They follow the rows and the longest of them, in powers of two."""
        return self._now.caches.allocated

    def memory_of(self, rows: int, tokens: int) -> int:
        """Return the most bytes that the caches take while they grow to `rows` rows of `tokens`
        tokens. They are moved to larger memory then, and are in both for a moment.
        """
        return self._now.caches.peak(rows, tokens)

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
        """Feed S tokens per row after those in the cache. Return the outputs [B,S,*], zeros at
        padding.

        Args:
            inputs: [B,S] int64 ids or [B,S,E] activations, or a list of rows of different lengths.
                A row without tokens is not changed.
            start: position of each row's first token in this call, one number or [B]. None
                continues after the tokens in the cache: at `position`, which is 0 in a new session.
                If a row has tokens, `start` cannot move the rows and must be `position` in every
                row that reads tokens.
            attention_mask: [B,S], 1 at tokens and 0 at padding; padding may be anywhere in a row.
            chunk: number of tokens of a row to feed at a time; None uses the default of the
                manifest. Bidirectional models read all tokens at once.
            grid: [axes,B,S] int64, coordinates for encodings that have them. None uses the position
                on every axis, as for text: tokens of an image then get other coordinates than those
                of their rows and columns, and nothing refuses it.
            token_types: [B,S] int64, segments for an encoder; None means 0 everywhere.
            encoder: encoder outputs of each row, [B,Q,N] or a list of rows [q,N], for a decoder
                that reads an encoder. Given with the first tokens of a row. None keeps the encoder
                outputs of rows that a rewind has emptied.
            encoder_attention_mask: [B,Q], 1 at tokens and 0 at padding of `encoder`.
            logits_to_keep: number n of last tokens of each row whose outputs are returned, as
                [B,n,*] aligned to the last column, with zeros in front of shorter rows; n is
                reduced to the length of the longest row. None or 0 returns all. A graph with input
                logits_index does not compute other outputs.

        Raises:
            ValueError: a position is outside the range, a row exceeds the capacity, or a shape,
                dtype or id is wrong. The session is unchanged.
            GraphError: the graph failed. Chunks that succeeded are kept; `length` gives the tokens.
        """
        options = [start, attention_mask, chunk, grid, token_types, encoder]
        options += [encoder_attention_mask, logits_to_keep]
        if isinstance(inputs, np.ndarray) and all([option is None for option in options]):
            stepper = self._stepper_for(inputs)
            if stepper is not None:
                if self._replaces:
                    self._reading.record_step(self._now, stepper.checked(inputs[:, 0]))
                return stepper.take(stepper, inputs[:, 0])[:, None].copy()  # [B,1,*]
            stepper = self._now.stepper
            if stepper is not None and stepper.can_pass(inputs):
                feeds_of = functools.partial(self._reading.pass_feeds, self._now)
                return stepper.take_pass(inputs, feeds_of).copy()
        prefill = arguments.check_prefill(
            self.manifest, inputs, attention_mask, chunk, grid, token_types, logits_to_keep
        )
        state = self._before_prefill(prefill, start, encoder, encoder_attention_mask)
        chunks = []
        for outputs, reached in self._reading.chunks(state, 0, prefill):
            self._now = reached
            chunks.append(outputs)
        return prefill.padded_outputs(chunks)

    @exclusive
    def read_out(
        self,
        inputs: Rows,
        start: Numbers = None,
        attention_mask: Optional[np.ndarray] = None,
        grid: Optional[np.ndarray] = None,
        token_types: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """Read whole rows and return the second output of an encoder, such as sentence_embedding
        [B,N]; [B,S,N] with zeros at padding if each token has one.

        Args: as for `prefill`. The hidden states are not returned.

        Raises:
            ValueError: as for `prefill`; the model has no second output, or a row has no tokens.
            GraphError: the graph failed.
        """
        prefill = arguments.check_read_out(
            self.manifest,
            arguments.check_prefill(
                self.manifest, inputs, attention_mask, None, grid, token_types, None
            ),
        )
        return self._reading.read_out(self._before_prefill(prefill, start, None, None), prefill)

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
            guard.calls.append(None)
            if len(guard.calls) > 1:
                raise RuntimeError(BUSY)
            if not guard.settled:
                self._settle()
            guard.settled = False
            stepper = self._now.stepper
            if stepper is None or stepper.room <= 0:
                stepper = self._prepare_step()
            if self._replaces:
                self._reading.record_step(self._now, stepper.checked(inputs))
            output = stepper.take(stepper, inputs)
            guard.settled = True
            return output.copy() if copy else output
        finally:
            guard.calls.pop()

    @exclusive
    def rewind(self, n: Numbers) -> None:
        """Take back the last n tokens of each row; n is one number for all rows, or one per row
        [B].

        Raises:
            ValueError: n exceeds the length of a row, or the history kept for states that each call
                replaces; or the model has no cache.
        """
        arguments.check_has_cache(self.manifest, "rewind")
        length = (
            self._now.length.tolist()
        )  # Python's integers: numpy takes several us for each operation on few numbers
        back = arguments.per_row("n of rewind", n, len(length) or 1).tolist()
        if min(back) < 0 or any(
            count > most for count, most in zip(back, length or [0], strict=True)
        ):
            raise ValueError(
                "session: expected n of rewind to be at least 0 and at most the lengths "
                f"{length}, got {back}"
            )
        if not any(back):
            return
        stepper = self._now.stepper
        if (
            stepper is not None
            and not self._replaces
            and not self._now.columns
            and min(back) == max(back)
        ):
            # The binding stays valid: the next step is one that it has done before.
            self._now.mark_written()
            stepper.back(back[0])
            self._now.wipe()
            return
        state, replay, attributes = self._now.without_stepper().rewound(
            np.array(length) - np.array(back)
        )
        self._now = state
        self._settle()
        if any(len(tokens) for tokens in replay):
            none = np.zeros(len(back), np.int64)
            _, self._now = self._reading.feed(self._now, 0, replay, attributes, none)

    @exclusive
    def fork(self) -> "Session":
        """Return an independent session with a copy of the current state. It shares the loaded
        graph.
        """
        self._settle()
        now = self._now
        caches = now.caches
        other = Session(caches.graph, caches.fewest, caches.most, self.rewindable)
        histories = tuple(history.copy() for history in now.histories)
        other._now = now.replace(caches=caches.fork(now.rows, now.used), histories=histories)
        return other

    @exclusive
    def save(self, file: Union[str, Path], tokens: Optional[Rows] = None) -> None:
        """Write the rows of the session with their caches to a file, which Model.restore of the
        same artefact reads. An existing file is replaced at once or not at all.

        Args:
            tokens: the ids in the cache, one list per row, which are kept beside the caches for
                session.saved.tokens; None keeps none.

        Raises:
            ValueError: the ids are not as many as the cache holds, or not in the vocabulary.
            OSError: the file cannot be written.
        """
        self._settle()
        saved.write(self, file, tokens)

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
        prefix: Optional[Prefix] = None,
    ) -> np.ndarray:
        """Append n new rows and prefill them. Return their outputs [n,S,*]. The existing rows are
        not changed.

        Args:
            inputs, attention_mask, chunk, grid, encoder, encoder_attention_mask, logits_to_keep: as
                for `prefill`, for the new rows.
            start: position of the first token of each new row, one number or [n]; None means 0.
            prefix: cached tokens with which a single new row begins at position 0, from
                Prefixes.find; `inputs` are the tokens after them.

        Raises:
            ValueError: as for `prefill`; the target's rows share cache columns; a new row has no
                tokens; there is a prefix and not one row at position 0. The session is unchanged.
            GraphError: the graph failed; no row was added.
        """
        arguments.check_rows_are_independent(self.manifest, "admit")
        prefill = arguments.check_prefill(
            self.manifest, inputs, attention_mask, chunk, grid, None, logits_to_keep
        )
        if not prefill.counts.all():
            raise ValueError(
                "session: expected at least one token in every new row, got rows of "
                f"{prefill.counts.tolist()} tokens; leave empty rows out"
            )
        starts = arguments.per_row("start", start, len(prefill.tokens))
        if prefix is not None and starts.tolist() != [0]:
            raise ValueError(
                "session: expected one row at position 0 after a prefix, got rows at "
                f"{starts.tolist()}; admit rows one by one"
            )
        known = 0 if prefix is None else prefix.length
        state = self._now.without_stepper()
        arguments.check_room(
            self.manifest, state.caches.most, starts, np.full_like(starts, known), prefill.counts
        )
        new = encoder_outputs.new(self.manifest, encoder, encoder_attention_mask, len(starts))
        former = state.encoder_outputs
        joined = state.joined(starts, known + prefill.longest).replace(
            encoder_outputs=former.joined(new) if former and new else new
        )
        joined = joined if prefix is None else joined.begun(state.rows, prefix)
        chunks, states = zip(*self._reading.chunks(joined, state.rows, prefill), strict=True)
        self._now = states[-1]
        return prefill.padded_outputs(chunks)

    @exclusive
    def share(self, row: int, tokens: Sequence[int], prefixes: Prefixes, key: str = "") -> None:
        """Copy the caches of the first tokens of a row, which began at position 0, to `prefixes`
        (Prefixes.save).

        Raises:
            ValueError: there is no such row, it begins at another position, or it has fewer tokens.
        """
        arguments.check_row(row, self.batch)
        if self._now.start[row] or len(tokens) > self._now.length[row]:
            got = (
                f"{len(tokens)} of {self._now.length[row]} tokens from position "
                f"{self._now.start[row]} on"
            )
            raise ValueError(
                f"session: expected tokens of a row that begins at position 0, got {got}; "
                "give the tokens that were fed"
            )
        prefixes.save(self._now.caches, int(row), tokens, key)

    @exclusive
    def retire(self, row: int) -> None:
        """Remove a row. The last row takes its index, so that rows are 0 .. B - 2 afterwards.

        Raises:
            ValueError: there is no such row, or the target's rows share cache columns.
        """
        arguments.check_rows_are_independent(self.manifest, "retire")
        state = self._now.without_stepper()
        arguments.check_row(row, state.rows)
        self._now = state.without(int(row))
        self._settle()

    def generate(
        self,
        prompt: Optional[Rows],
        max_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Optional[Sequence[int]] = None,
        encoder: Optional[Rows] = None,
        speculate: Speculate = None,
        before: Optional[Rows] = None,
        language: Optional[str] = None,
        task: Optional[str] = None,
    ) -> Generator[np.ndarray, None, None]:
        """Generate tokens after a prompt. Yields the next ids [B] int64 until every row has ended;
        the last ids are not fed.

        Args:
            prompt: ids of each row, [B,S] or a list of rows. None for the first tokens of a decoder
                that reads an encoder.
            max_tokens: largest number of ids to generate per row.
            temperature, top_k, top_p, seed: as for generation.choose, with a random generator of
                this seed.
            stop: ids that end a row; ended rows yield -1. None uses the ids of the artefact
                (Manifest.stop_ids).
            encoder: as for `prefill`.
            speculate: draft tokens and read several in one pass where that gains time; the ids are
                the same. "lookup" drafts what followed the latest tokens earlier in the text of the
                row, a loaded decoder of the same vocabulary drafts what it would generate. None
                reads one token per pass.
            before: ids that each row has read before the prompt, among which drafts are looked up.
            language, task: of Whisper without a prompt, such as "en" and "translate". None for
                those of the checkpoint, which detects the language of each row.

        Raises:
            ValueError: as for `prefill` and `step`; the model has no vocabulary, a row has no
                tokens, max_tokens is below 1, there is no such language or task, or the session or
                the draft model does not allow `speculate`. Raised with the first id.
        """
        first = first_tokens.First(prompt, encoder, language, task)
        return generation.generate(
            self,
            first,
            max_tokens,
            generation.Sampling(temperature, top_k, top_p),
            seed,
            stop,
            speculate,
            before,
        )

    def _before_prefill(
        self,
        prefill: PrefillArguments,
        start: Numbers,
        encoder: Optional[Rows],
        encoder_attention_mask: Optional[np.ndarray],
    ) -> SessionState:
        """Return the state before a prefill: the current one if it has tokens, otherwise one of
        empty rows. Raise ValueError as prefill does.
        """
        counts, manifest, state = prefill.counts, self.manifest, self._now.without_stepper()
        if not counts.any():
            raise ValueError(
                "session: expected at least one token in at least one row, got rows of "
                f"{counts.tolist()} tokens"
            )
        if not manifest.states:  # a bidirectional model reads whole rows
            state = SessionState.empty(state.caches, self.rewindable)
        length = state.settled_length
        starts = arguments.starts(manifest, state.start, length, counts, start)
        filled = bool(length.any())
        settled = length if filled else np.zeros_like(starts)
        arguments.check_room(manifest, state.caches.most, starts, settled, counts)
        outputs = encoder_outputs.for_rows(
            manifest, state.encoder_outputs, length, len(starts), encoder, encoder_attention_mask
        )
        if filled:
            return state
        return state.opened(starts, prefill.longest).replace(encoder_outputs=outputs)

    def _stepper_for(self, inputs: np.ndarray) -> Optional[Stepper]:
        """Return a stepper if a prefill of these inputs is a step: one token of every row, [B,1] or
        [B,1,E], where every row has read tokens and there is room for one more.
        """
        now = self._now
        if inputs.shape[1:2] != (1,) or not self.manifest.states or not now.length.any():
            return None
        if now.stepper is None or now.stepper.room <= 0:
            if self.room.min() < 1:
                return None
            self._prepare_step()
        stepper = self._now.stepper
        return stepper if stepper is not None and stepper.can_step(inputs) else None

    def _prepare_step(self) -> Stepper:
        """Return a stepper, after enlarging the caches. Raise ValueError if no position or slot is
        left.
        """
        if not self._now.rows:
            raise ValueError(
                "session: expected a prefill before the first step, got an empty session; "
                "call prefill"
            )
        arguments.check_has_cache(self.manifest, "step")
        self._now = self._reading.with_stepper(self._now.without_stepper())
        assert self._now.stepper is not None
        return self._now.stepper

    def _settle(self) -> None:
        """Complete pending changes of the last call. If this is interrupted, each assignment
        has committed the work up to it.
        """
        self._now = self._now.without_stepper()
        self._now = self._now.moved()
        self._now.tidy()
