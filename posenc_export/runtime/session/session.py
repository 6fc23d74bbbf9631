"""Sessions: feed tokens at any position and get outputs, with caches kept between calls.

Shapes: B batch, S new tokens. Rows are compacted before they are fed: the graph sees the valid
tokens of each row first and padding (position -1) after them.
"""

from typing import Generator, Optional, Sequence, Tuple

import numpy as np

from posenc_export.runtime.session import arguments, first_tokens, generation, prefixes, reading
from posenc_export.runtime.session.argument_arrays import Numbers, Rows
from posenc_export.runtime.session.arguments import Passed
from posenc_export.runtime.session.cached_rows import BUSY, CachedRows, exclusive
from posenc_export.runtime.session.errors import expected
from posenc_export.runtime.session.speculation import Speculate
from posenc_export.runtime.session.state import SessionState
from posenc_export.runtime.session.stepper import Stepper


class Session(CachedRows):
    """Caches of a batch of rows, with the calls that read and change them: prefill, step, rewind,
    fork, admit, retire. Created by Model.session.

    A session runs one call at a time: a second call, from another thread or a signal handler,
    raises RuntimeError. Returned arrays belong to the caller. After any exception, `length` gives
    the tokens that the session holds, and the next call continues from there.

    Args, Attributes: as for CachedRows, which has the calls that read no tokens.
    """

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
                continues at `position`, which is 0 in a new session. It cannot move rows that have
                tokens: in those that read more, it must be `position`.
            attention_mask: [B,S], 1 at tokens and 0 at padding before or behind them.
            chunk: number of tokens of a row to feed at a time; None for that of the manifest.
                Bidirectional models read all tokens at once.
            grid: [axes,B,S] int64, coordinates for encodings that have them. None uses the position
                on every axis, as for text: tokens of an image then get other coordinates than those
                of their rows and columns, and nothing refuses it. Edges of boxes are 0 then.
            token_types: [B,S] int64, segments for an encoder; None means 0 everywhere.
            encoder: encoder outputs of each row, [B,Q,N] or a list of rows [q,N], for a decoder
                that reads an encoder. Given with the first tokens of a row. None keeps the encoder
                outputs of rows that a rewind has emptied.
            encoder_attention_mask: [B,Q], 1 at tokens and 0 at padding of `encoder`.
            logits_to_keep: number n of last tokens of each row whose outputs are returned, as
                [B,n,*] aligned to the last column, with zeros in front of shorter rows; at most
                that of the longest row. None or 0 returns all. A graph with input logits_index does
                not compute other outputs.

        Raises:
            ValueError: a position is outside the range, a row exceeds the capacity, or a shape,
                dtype or id is wrong. The session is unchanged.
            GraphError: the graph failed. Chunks that succeeded are kept; `length` gives the tokens.
        """
        options = (start, attention_mask, chunk, grid, token_types)
        others = (encoder, encoder_attention_mask, logits_to_keep)
        alone = start is attention_mask is chunk is grid is token_types is None
        alone = alone and encoder is encoder_attention_mask is logits_to_keep is None
        if alone and isinstance(inputs, np.ndarray):
            stepper = self._stepper_for(inputs)
            if stepper is not None:
                if self._replaces:
                    self._reading.record_step(self._state, stepper.checked(inputs[:, 0]))
                return stepper.take(self._state, inputs[:, 0])[:, None].copy()  # [B,1,*]
            stepper = self._state.stepper
            if stepper is not None and stepper.can_pass(inputs):
                return self._reading.take_pass(self._state, inputs).copy()
        prompt = arguments.check_prefill(self.manifest, Passed(inputs, *options, *others))
        state = reading.open_rows(self._settled(), prompt)
        outputs, most = prompt.outputs(self.manifest.outputs[0]), state.caches.window.new
        for tokens in prompt.chunks(0, most):
            state = self._state = self._reading.run_chunk(state, tokens, outputs)
        return prompt.in_columns(outputs)

    @exclusive
    def read_out(
        self,
        inputs: Rows,
        start: Numbers = None,
        attention_mask: Optional[np.ndarray] = None,
        grid: Optional[np.ndarray] = None,
        token_types: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """Read whole rows and return the second output of a model, such as sentence_embedding
        [B,N]; [B,S,N] with zeros at padding if each token has one.

        Args: as for `prefill`. The hidden states are not returned.

        Raises:
            ValueError: as for `prefill`; the model has no second output, or a row has no tokens.
            GraphError: the graph failed.
        """
        arguments.check_read_out(self.manifest)
        passed = Passed(inputs, start, attention_mask, None, grid, token_types)
        prompt = arguments.check_prefill(self.manifest, passed)
        arguments.check_every_row(prompt.tokens.counts, "row")
        state = reading.open_rows(self._settled(), prompt)
        return self._reading.read_out(state, prompt)

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
            state = self._state
            stepper = state.stepper
            if stepper is None or stepper.room <= 0:
                state, stepper = self._prepare_step()
            if self._replaces:
                self._reading.record_step(state, stepper.checked(inputs))
            output = stepper.take(state, inputs)
            return output.copy() if copy else output
        finally:
            guard.pop()

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
        prefix: Optional[prefixes.Prefix] = None,
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
        options = (start, attention_mask, chunk, grid, None, encoder)
        passed = Passed(inputs, *options, encoder_attention_mask, logits_to_keep)
        prompt = arguments.check_prefill(self.manifest, passed)
        state = self._settled()
        first, state = state.rows, reading.before_admit(state, prompt, prefix)
        outputs, most = prompt.outputs(self.manifest.outputs[0]), state.caches.window.new
        for tokens in prompt.chunks(first, most):
            state = self._reading.run_chunk(state, tokens, outputs)
        self._state = state
        return prompt.in_columns(outputs)

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
        endless: bool = False,
    ) -> Generator[np.ndarray, None, None]:
        """Generate tokens after a prompt. Yields the next ids [B] int64 until every row has ended;
        the last ids are not fed.

        Args:
            prompt: ids of each row, [B,S] or a list of rows. None for the first tokens of a decoder
                that reads an encoder.
            max_tokens: largest number of ids to generate per row.
            temperature, top_k, top_p, seed: as for generation.choose, with a random generator of
                this seed.
            stop: ids that end a row; ended rows yield -1. None uses Manifest.stop_ids.
            encoder: as for `prefill`.
            speculate: draft tokens and read several in one pass where that gains time; the ids are
                the same. "lookup" drafts what followed the latest tokens earlier in the text of the
                row, a loaded decoder of the same vocabulary drafts what it would generate. None
                reads one token per pass.
            before: ids that each row has read before the prompt, among which drafts are looked up.
            language, task: of Whisper without a prompt, such as "en" and "translate". None for
                those of the checkpoint, which detects the language of each row.
            endless: before a row has no room, discard half of its tokens behind the first 4, also
                within the prompt (`discard`).

        Raises:
            ValueError: as for `prefill` and `step`; the model has no vocabulary, a row has no
                tokens, max_tokens is below 1, there is no such language or task, the session or the
                draft model does not allow `speculate`, or the session cannot `discard` tokens and
                `endless` is set. Raised with the first id.
        """
        first = first_tokens.First(prompt, encoder, language, task, endless)
        sampling = generation.Sampling(temperature, top_k, top_p, seed, max_tokens, stop)
        return generation.generate(self, first, sampling, speculate, before)

    def _stepper_for(self, inputs: np.ndarray) -> Optional[Stepper]:
        """Return a stepper if a prefill of these inputs, [B,1] or [B,1,E], is a step."""
        state = self._state
        if inputs.shape[1:2] != (1,) or not self.manifest.states or not state.length.any():
            return None
        if state.stepper is None or state.stepper.room <= 0:
            if self.room.min() < 1:
                return None
            self._prepare_step()
        stepper = self._state.stepper
        return stepper if stepper is not None and stepper.can_step(inputs) else None

    def _prepare_step(self) -> Tuple[SessionState, Stepper]:
        if not self._state.rows:
            raise expected("a prefill before the first step", "an empty session", "call prefill")
        arguments.check_has_cache(self.manifest, "step")
        state = self._state = self._reading.with_stepper(self._settled())
        assert state.stepper is not None
        return state, state.stepper
