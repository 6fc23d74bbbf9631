"""Run a torch module of any form. torch is imported when it is used."""

import threading
from typing import Any, Callable, List, Sequence

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest, Value
from posenc_export.runtime.session.caches import BoundRun, Feeds, RunMemory

_lock = threading.Lock()
_limits: List[int] = []  # one entry per running call: the number of threads of its graph
_outside = [0]  # the number of threads when the first of these calls started


class TorchGraph:
    """A torch module of any form as a graph (runtime.session.caches.Graph), without states with the
    update rule "append". Its arguments are the inputs, past_positions if there is a cache, and the
    list of states and encoder outputs.
    """

    provider = device = "cpu"

    def __init__(self, module: Any, manifest: Manifest) -> None:
        self.module, self.manifest = module, manifest
        self._positions_first = manifest.stores_positions
        self._replaced = [index for index, state in enumerate(manifest.states) if state.replaced]

    def bind(
        self,
        feeds: Feeds,
        states: RunMemory,
        result: np.ndarray,
        output: int = 0,
        once: bool = False,
    ) -> BoundRun:
        import torch

        arguments = self._arguments(feeds, states)  # share the memory of feeds and buffers
        module, first, replaced = self.module, self._positions_first, self._replaced

        def run() -> None:
            with torch.inference_mode():
                outputs = module(*arguments)
            # Encoders have no states, and return further outputs in their place.
            result[...] = (outputs[-1][output - 1] if output else outputs[0]).numpy()
            for index in replaced:  # to the buffers that the next call reads
                states[index].arrays[1][...] = outputs[-1][index - first].numpy()

        return run

    def _arguments(self, feeds: Feeds, states: RunMemory) -> List[Any]:
        import torch

        def tensors(values: Sequence[Value]) -> List[Any]:
            return [torch.from_numpy(feeds[value.name]) for value in values]

        past = [torch.from_numpy(memory.arrays[0]) for memory in states]
        single = self._positions_first  # number of states before the list
        rest = [*past[single:], *tensors(self.manifest.encoder)]
        return [*tensors(self.manifest.inputs), *past[:single], rest]


def limited(run: Callable[..., Any], threads: int) -> Callable[..., Any]:
    """Return `run` with a number of threads per operator that leaves torch's own as it was.

    torch keeps one number per thread of the process. A thread that uses torch for the first time
    gets the number that any thread set last.
    """
    import torch

    def call(*arguments: Any) -> Any:
        own = torch.get_num_threads()
        if own == threads and not _limits:
            return run(*arguments)
        with _lock:
            if not _limits:
                _outside[0] = own
            # A thread that started during another call may have the number of that call.
            usual = _outside[0] if own in _limits else own
            _limits.append(threads)
            torch.set_num_threads(threads)
        try:
            return run(*arguments)
        finally:
            with _lock:
                _limits.remove(threads)
                torch.set_num_threads(usual)

    return call
