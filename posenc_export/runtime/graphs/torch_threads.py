"""The number of threads that torch uses, set only while a graph runs."""

import threading
from typing import Any, Callable, List

_lock = threading.Lock()
_limits: List[int] = []  # one entry per running call: the number of threads of its graph
_outside = [0]  # the number of threads when the first of these calls started


def limited(run: Callable[..., Any], threads: int) -> Callable[..., Any]:
    """Return `run` as a function that uses a number of threads per operator and leaves torch's own number as it was.

    torch keeps one number per thread of the process. A thread that uses torch for the first time gets the number that any thread set last.
    """
    import torch

    def call(*arguments: Any) -> Any:
        own = torch.get_num_threads()
        if own == threads and not _limits:
            return run(*arguments)
        with _lock:
            if not _limits:
                _outside[0] = own
            usual = _outside[0] if own in _limits else own  # a thread that started during another call may have the number of that call
            _limits.append(threads)
            torch.set_num_threads(threads)
        try:
            return run(*arguments)
        finally:
            with _lock:
                _limits.remove(threads)
                torch.set_num_threads(usual)

    return call
