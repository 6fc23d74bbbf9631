"""Run a TorchScript module, a torch.export program, native code or an eager torch module. torch
is imported only when it is used.
"""

import threading
from typing import Any, Callable, List, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.buffered_caches import BufferedCaches
from posenc_export.runtime.session.errors import RUN_ERRORS, GraphError
from posenc_export.runtime.session.state import Call, Feeds, Step

_lock = threading.Lock()
_limits: List[int] = []  # one entry per running call: the number of threads of its graph
_outside = [0]  # the number of threads when the first of these calls started


class TorchGraph:
    """A torch module as a graph (runtime.session.buffered_caches.Graph).

    Its arguments are the inputs, past_positions if there is a cache, and the list of states and
    encoder outputs.

    Args:
        module: an eager, compiled, scripted or exported module.
        manifest: description of the module; it has no states with the update rule "append".
        provider: name of the provider, as `load` takes it, never "auto".
    """

    strided = (
        True  # the module reads views of the first slots, so that its cost follows the slots in use
    )

    def __init__(self, module: Any, manifest: Manifest, provider: str = "cpu") -> None:
        self.module, self.manifest, self.provider, self.device = module, manifest, provider, "cpu"
        self._positions_first = manifest.stores_positions
        self._replaced = [index for index, state in enumerate(manifest.states) if state.replaced]

    def open(self, rows: int, capacity: int) -> BufferedCaches:
        """Allocate empty caches for `rows` rows of `capacity` slots."""
        return BufferedCaches.open(self, rows, capacity)

    def run(self, caches: BufferedCaches, call: Call) -> np.ndarray:
        output, present = self._taker()(self._arguments(caches, call.feeds, call.first, call.rows))
        if call.output:  # encoders have no states, and return further outputs in their place
            return present[call.output - 1].numpy()  # type: ignore[no-any-return]
        self._keep(caches, present, slice(call.first, call.first + call.rows))
        return output.numpy()  # type: ignore[no-any-return]

    def step(self, caches: BufferedCaches, feeds: Feeds, rows: int) -> Step:
        idle, window = list(range(rows, caches.rows)), slice(rows)
        arguments = self._arguments(
            caches, feeds, 0, rows
        )  # tensors that share the memory of feeds and buffers
        take = self._taker()

        def again(caches: BufferedCaches) -> Tuple[np.ndarray, BufferedCaches]:
            return take(arguments)[0].numpy()[:, 0], caches

        def anew(caches: BufferedCaches) -> Tuple[np.ndarray, BufferedCaches]:
            output, present = take(self._arguments(caches, feeds, 0, rows))
            self._keep(caches, present, window)
            return output.numpy()[:, 0], caches.after(1, idle)

        return Step(anew if self._replaced else again)

    def _arguments(self, caches: BufferedCaches, feeds: Feeds, first: int, rows: int) -> List[Any]:
        import torch

        states = []
        for state, past in zip(self.manifest.states, caches.past, strict=True):
            slots = (
                (slice(None),) * (state.axis - 1) + (slice(caches.capacity),)
                if state.in_place
                else ()
            )
            states.append(torch.from_numpy(past.array[(slice(first, first + rows), *slots)]))
        fed = [torch.from_numpy(feeds[value.name]) for value in self.manifest.inputs]
        encoder = [torch.from_numpy(feeds[value.name]) for value in self.manifest.encoder]
        return (
            [*fed, *states[:1], [*states[1:], *encoder]]
            if self._positions_first
            else [*fed, [*states, *encoder]]
        )

    def _taker(self) -> Callable[[List[Any]], Tuple[Any, List[Any]]]:
        """Return a function, for one thread at a time, that runs the module on arguments and
        returns its output and its last output, the list of states.
        """
        import torch

        module, inference = self.module, torch.inference_mode()

        def take(arguments: List[Any]) -> Tuple[Any, List[Any]]:
            try:
                with inference:
                    outputs = module(*arguments)
            except RUN_ERRORS as error:
                raise GraphError(error) from None
            return outputs[0], outputs[-1]

        return take

    def _keep(self, caches: BufferedCaches, present: List[Any], rows: slice) -> None:
        """Copy the states that each call replaces into the buffers that the next call reads."""
        for index in self._replaced:
            caches.present[index].array[rows] = present[index - self._positions_first].numpy()


def limited(run: Callable[..., Any], threads: int) -> Callable[..., Any]:
    """Return `run` as a function that uses a number of threads per operator and leaves torch's own
    number as it was.

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
            usual = (
                _outside[0] if own in _limits else own
            )  # a thread that started during another call may have the number of that call
            _limits.append(threads)
            torch.set_num_threads(threads)
        try:
            return run(*arguments)
        finally:
            with _lock:
                _limits.remove(threads)
                torch.set_num_threads(usual)

    return call
