"""The errors of sessions."""

from functools import partial

from posenc_export.shared.refusal import refusal

# Exceptions of ONNX Runtime and libtorch for a failed run. ONNX Runtime raises its own types only
# from `InferenceSession.run`, which no session calls.
RUN_ERRORS = (RuntimeError, IndexError)


class GraphError(RuntimeError):
    """A graph failed during a call, with the first line of the message of the runtime's exception.
    The session keeps no token of the run that failed.
    """

    def __init__(self, error: BaseException) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        got = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        super().__init__(f"session: expected the graph to run, got {got}")


expected = partial(refusal, "session")  # by rule, value and remedy
