"""A TorchScript module, a torch.export program or a live torch module behind the same interface; torch is imported only when used."""

from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.manifest import Manifest

Feeds = Dict[str, np.ndarray]


class TorchGraph:
    """A module in a calling convention: (input, position_ids, past_positions, states) or (inputs, ..., states).

    Args:
        module: eager, compiled, scripted or exported.
        manifest: its description; all states "append".
    """

    def __init__(self, module: Any, manifest: Manifest) -> None:
        self.module, self.manifest, self.device = module, manifest, "cpu"

    def open(self, batch: int, capacity: int) -> "TorchCache":
        """Empty caches for `batch` rows; they grow, capacity is ignored."""
        return TorchCache(self, batch)


class TorchCache:
    """The states of one session, as tensors that each call replaces."""

    grows = True

    def __init__(self, graph: TorchGraph, batch: int) -> None:
        import torch

        self.graph, self.batch, self.columns, self.capacity = graph, batch, 0, 0
        self.states: List[Any] = []
        for state in graph.manifest.states:
            sizes = [0 if isinstance(axis, str) else axis for axis in state.axes[1:]]
            self.states.append(torch.zeros([batch, *sizes], dtype=getattr(torch, state.dtype)))

    def run(self, feeds: Feeds, row: Optional[int] = None) -> np.ndarray:
        """One call on all rows; output [B,S,*]."""
        import torch

        arguments = [torch.from_numpy(array) for array in feeds.values()]
        with torch.inference_mode():
            if self.graph.manifest.states and self.graph.manifest.states[0].past == "past_positions":
                output, positions, present = self.graph.module(*arguments, self.states[0], self.states[1:])
                self.states = [positions, *present]
            else:
                output, self.states = self.graph.module(*arguments, self.states)
        self.columns += feeds[self.graph.manifest.inputs[0].name].shape[1]
        return output.numpy()  # type: ignore[no-any-return]

    def stepper(self, feeds: Feeds) -> Callable[[], np.ndarray]:
        """A call of one token per row that reads `feeds` anew each time; output [B,*]."""
        return lambda: self.run({name: array.copy() for name, array in feeds.items()})[:, 0]

    def reserve(self, slots: int) -> bool:
        """Growing caches need no room ahead."""
        return False

    def fork(self, slots: int) -> "TorchCache":
        """The same content; tensors are never written in place, so both may hold them."""
        other = TorchCache(self.graph, self.batch)
        other.states, other.columns = list(self.states), self.columns
        return other

    def snapshot(self) -> List[np.ndarray]:
        """The states that every call replaces."""
        return [value.numpy().copy() for state, value in zip(self.graph.manifest.states, self.states, strict=True) if state.update == "replace"]

    def restore(self, snapshot: Sequence[np.ndarray]) -> None:
        """Put back what `snapshot` gave; of nothing, what they were at first."""
        import torch

        replaced = [index for index, state in enumerate(self.graph.manifest.states) if state.update == "replace"]
        for number, index in enumerate(replaced):
            self.states[index] = torch.from_numpy(snapshot[number].copy()) if len(snapshot) else torch.zeros_like(self.states[index])

    def hide(self, keep: np.ndarray) -> None:
        """Mark columns as never written where keep [B,columns] is False."""
        import torch

        for index, state in enumerate(self.graph.manifest.states):
            if state.past == "past_positions":
                self.states[index] = torch.where(torch.from_numpy(keep), self.states[index], state.fill)

    def trim(self, columns: int) -> None:
        """Drop the columns from `columns` on."""
        for index, state in enumerate(self.graph.manifest.states):
            if state.update == "append":
                self.states[index] = self.states[index].narrow(state.axis, 0, columns).clone()
        self.columns = columns
