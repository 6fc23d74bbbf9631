"""Random numbers from a seed, drawn from torch's default generator, which is restored."""

import contextlib
import threading
from typing import Iterator

import torch

_alone = threading.RLock()


@contextlib.contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed the default generator of the CPU within the context, and restore its state afterwards.

    The generator belongs to the process, so one thread runs at a time.
    """
    with _alone, torch.random.fork_rng(devices=[]):
        # Torch.manual_seed would also seed the generators of other devices.
        torch.default_generator.manual_seed(seed)
        yield
