"""Faults of sessions and of the caches of sessions."""

from typing import Any, Callable

from posenc_export.runtime import Session
from posenc_export.runtime.session.arguments import RowTokens
from posenc_export.runtime.session.caches import REPLACED
from posenc_export.runtime.session.rows import Rows
from posenc_export.runtime.session.runner import Runner
from tests.faults.planting import Fault


class LeavesHiddenSlots(Session):
    """Truncates its rows, but clears no slots after them."""

    def _settled(self) -> Rows:
        if self._state.bound:
            self._state.unbind()
        self._state = self._state.settled()
        return self._state


class KeepsWhatIsRewound(LeavesHiddenSlots):
    """Rewinds its number of tokens, but clears no slots."""

    def rewind(self, n: Any) -> None:
        self._state = self._settled().replace(length=self.length - n)


class MovesNoRow(Session):
    """Changes the index of the last row, but does not move its tokens."""

    def _settled(self) -> Rows:
        if self._state.bound:
            self._state.unbind()
        self._state = self._state.replace(pending=())
        return super()._settled()


class ForgetsCoordinates(Session):
    """Replays tokens after a rewind with the positions of text."""

    def rewind(self, n: Any) -> None:
        self._state.histories = tuple(
            history._replace(tokens=[(token, place * 0) for token, place in history.tokens])
            for history in self._state.histories
        )
        super().rewind(n)


class ForgetsStates(Session):
    """Starts every call from the states of an empty session."""

    def prefill(self, *arguments: Any, **named: Any) -> Any:
        self._forget_states()
        return super().prefill(*arguments, **named)

    def step(self, *arguments: Any, **named: Any) -> Any:
        self._forget_states()
        return super().step(*arguments, **named)

    def _forget_states(self) -> None:
        rows = self._settled()
        for memory in rows.caches.of(REPLACED):
            for row in range(rows.count):
                memory.buffers[rows.turn].clear(row)


class ForksShareCaches(Session):
    """Forks without copying the caches."""

    def fork(self) -> Session:
        other = super().fork()
        other._state = other._state.replace(caches=self._state.caches)
        return other


def _narrow(row: int) -> Callable[[Any], Any]:
    """Return a function that loses the outputs past the width of one row of a call."""

    def plant(right: Any) -> Any:
        def feed(self: Runner, state: Any, tokens: RowTokens, outputs: Any) -> Any:
            state, of = right(self, state, tokens, outputs), min(row, len(tokens.x) - 1)
            outputs[:, tokens.columns[of] + tokens.counts[of] :] = 0
            return state

        return feed

    return plant


STALE = (
    ("rope", "onnx", KeepsWhatIsRewound),
    ("fox", "onnx-static", KeepsWhatIsRewound),
    ("rope", "onnx-static", LeavesHiddenSlots),
    ("rope", "onnx-static", ForksShareCaches),
    ("alibi", "ort", ForksShareCaches),
    ("rope", "ort", MovesNoRow),
    ("fox", "onnx-static", MovesNoRow),
    ("linear mrope", "ort", ForgetsCoordinates),
    ("linear mrope", "onnx", ForgetsCoordinates),
    ("input_rnn", "", ForgetsStates),
    ("conditional_conv", "", ForgetsStates),
)
FAULTS = {
    fault.name: fault
    for fault in (
        *(
            Fault(f"{fault.__name__}, {model} {target or 'eager'}", "session", fault, model, target)
            for model, target, fault in STALE
        ),
        *(
            Fault(
                f"outputs past the width of row {row} are lost",
                "function",
                _narrow(row),
                "block rope",
                "ort",
                (Runner, "run_chunk"),
            )
            for row in range(3)
        ),
    )
}
