"""The error of a call that a graph did not finish."""

# What ONNX Runtime and libtorch raise there; the former's own types come through `run`, which no session calls.
RUN_ERRORS = (RuntimeError, IndexError)


class GraphError(RuntimeError):
    """A graph stopped in the middle of a call. The session holds what it held before.

    Args:
        error: what ONNX Runtime or libtorch said; its first line that says something is kept.
    """

    def __init__(self, error: BaseException) -> None:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        super().__init__(f"session: expected the graph to run, got {type(error).__name__}: {lines[0] if lines else 'no message'}")
