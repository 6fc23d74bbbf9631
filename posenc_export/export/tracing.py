"""What makes traces of torch.export shorter, without another program."""

import contextlib
import gc
from typing import Iterator

import torch._dynamo.config


@contextlib.contextmanager
def short_traces() -> Iterator[None]:
    """Trace within the context without garbage collection and without torch's cache of shapes.

    A trace allocates millions of objects. The cache holds the shape and dtype of the output of each
    operator for its inputs; with dynamic sizes, its entries cost more time than they save.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            yield
    finally:
        if collects:
            gc.enable()
