"""The error that a session raises when a graph fails."""

# Exceptions of ONNX Runtime and libtorch for a failed run. ONNX Runtime raises its own types only
# from `InferenceSession.run`, which no session calls.
RUN_ERRORS = (RuntimeError, IndexError)


class GraphError(RuntimeError):
    """A graph failed during a call. The state of the session is unchanged.

    Args:
        error: exception of ONNX Runtime or libtorch; the first non-empty line of its message is
            kept.
    """

    def __init__(self, error: BaseException) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        super().__init__(
            f"session: expected the graph to run, got {type(error).__name__}: "
            f"{lines[0] if lines else 'no message'}"
        )
