"""A TorchScript module, a torch.export program or a live torch module behind the same interface; torch is imported only when used."""

from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime.committed import Call, Slots, Step
from posenc_export.runtime.errors import RUN_ERRORS, GraphError
from posenc_export.runtime.feeds import Feeds
from posenc_export.runtime.manifest import Manifest


class TorchGraph:
    """A module in a calling convention: (input, position_ids, past_positions, states) or (inputs, ..., states), what an encoder gave behind the states.

    Args:
        module: eager, compiled, scripted or exported.
        manifest: its description; all states "append".
    """

    def __init__(self, module: Any, manifest: Manifest) -> None:
        self.module, self.manifest, self.device = module, manifest, "cpu"

    def open(self, rows: int, capacity: int) -> "TorchCaches":
        """Empty caches for `rows` rows; they grow, capacity is not read."""
        import torch

        states = []
        for state in self.manifest.states:
            sizes = [0 if isinstance(axis, str) else axis for axis in state.axes[1:]]
            states.append(torch.zeros([rows, *sizes], dtype=getattr(torch, state.dtype)))
        return TorchCaches(self, rows, tuple(states))


@dataclass(frozen=True)
class TorchCaches:
    """The states of one session as tensors, none of them written in place (runtime.committed.Caches).

    Args:
        rows: R, all of them in use.
        states: a tensor for each state of the manifest.
    """

    graph: TorchGraph
    rows: int
    states: Tuple[Any, ...]

    def run(self, calls: Sequence[Call]) -> Tuple[List[Tuple[int, np.ndarray]], "TorchCaches"]:
        (call,) = calls  # a graph that takes one row at a time has compact rows, which no torch target has
        output, caches = self._run(call.feeds)
        return list(enumerate(output)), caches

    def step(self, feeds: Feeds, rows: int) -> Step:
        given = {value.name for value in self.graph.manifest.encoder}

        def take(caches: "TorchCaches") -> Tuple[np.ndarray, "TorchCaches"]:
            moving = {name: array.copy() for name, array in feeds.items() if name not in given}  # states may be views of their inputs
            output, caches = caches._run({**feeds, **moving})
            return output[:, 0], caches

        return Step(take)

    def _run(self, feeds: Feeds) -> Tuple[np.ndarray, "TorchCaches"]:
        import torch

        manifest = self.graph.manifest
        arguments = [torch.from_numpy(feeds[value.name]) for value in manifest.inputs]
        given = [torch.from_numpy(feeds[value.name]) for value in manifest.encoder]
        try:
            with torch.inference_mode():
                if manifest.states and manifest.states[0].past == "past_positions":
                    output, positions, present = self.graph.module(*arguments, self.states[0], [*self.states[1:], *given])
                    present = [positions, *present]
                else:
                    output, present = self.graph.module(*arguments, [*self.states, *given])
        except RUN_ERRORS as error:
            raise GraphError(error) from None
        return output.numpy(), TorchCaches(self.graph, self.rows, tuple(present))

    def reserve(self, slots: int, rows: int) -> "TorchCaches":
        return self  # they grow with each call, and rows do not come and go

    def cut(self, keep: np.ndarray) -> "TorchCaches":
        import torch

        columns = int(np.flatnonzero(keep.any(0)).max(initial=-1)) + 1
        mask = torch.from_numpy(keep[:, :columns].copy())
        states = list(self.states)
        for index, state in enumerate(self.graph.manifest.states):
            if state.update == "append":
                inside = mask.view([self.rows, *([1] * (state.axis - 1)), columns, *([1] * (len(state.axes) - state.axis - 1))])
                kept = states[index].narrow(state.axis, 0, columns)
                states[index] = torch.where(inside, kept, torch.full([1], state.fill, dtype=kept.dtype))
        return TorchCaches(self.graph, self.rows, tuple(states))

    def wipe(self, hidden: Sequence[Slots]) -> None:
        """Nothing is written in place."""

    def move(self, source: int, target: int, slots: int) -> None:
        raise NotImplementedError("rows that share columns do not come and go")  # the session refuses it before

    def snapshot(self, row: int) -> List[np.ndarray]:
        return [value[row].numpy().copy() for state, value in zip(self.graph.manifest.states, self.states, strict=True) if state.update == "replace"]

    def restored(self, states: Dict[int, Sequence[np.ndarray]]) -> "TorchCaches":
        import torch

        replaced = [index for index, state in enumerate(self.graph.manifest.states) if state.update == "replace"]
        present = list(self.states)
        for number, index in enumerate(replaced):
            present[index] = present[index].clone()
            for row, values in states.items():
                present[index][row] = torch.from_numpy(values[number]) if len(values) else self.graph.manifest.states[index].fill
        return TorchCaches(self.graph, self.rows, tuple(present))

    def emptied(self) -> "TorchCaches":
        return self.graph.open(self.rows, 0)

    def fork(self, rows: int, slots: int) -> "TorchCaches":
        return self
