"""Silence warnings and loggers while a function of torch runs."""

import logging
import threading
import warnings
from contextlib import contextmanager
from typing import Iterator

_alone = threading.RLock()


@contextmanager
def quiet(
    *categories: type[Warning], message: str = "", logger: str = "", level: int = logging.ERROR
) -> Iterator[None]:
    """Ignore warnings whose text starts with a regular expression, and a logger below a level.

    Both belong to the process, so one thread runs at a time: if two overlapped, the second would
    restore the filters of the first.
    """
    with _alone, warnings.catch_warnings():
        for category in categories:
            warnings.filterwarnings("ignore", message, category)
        log = logging.getLogger(logger) if logger else logging.Logger("none")
        before = log.level
        log.setLevel(max(level, log.getEffectiveLevel()))
        try:
            yield
        finally:
            log.setLevel(before)
