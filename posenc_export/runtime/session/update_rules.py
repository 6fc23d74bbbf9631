"""The states of a graph by how a call updates them."""

from typing import NamedTuple, Sequence, Tuple

from posenc_export.runtime.artefact.manifest import State


class Rules(NamedTuple):
    """Indices of the states of a graph by their update rule (State.update)."""

    in_place: Tuple[int, ...]
    growing: Tuple[int, ...]
    replaced: Tuple[int, ...]
    windowed: Tuple[int, ...]  # those in place of which queries read the last tokens only
    fixed: bool  # whether there are states, all of them written in place

    @classmethod
    def of(cls, states: Sequence[State]) -> "Rules":
        """Return the rules of some states."""
        in_place = tuple([index for index, state in enumerate(states) if state.in_place])
        growing = tuple([index for index, state in enumerate(states) if state.grows])
        replaced = tuple([index for index, state in enumerate(states) if state.replaced])
        windowed = tuple([index for index, state in enumerate(states) if state.window])
        return cls(in_place, growing, replaced, windowed, 0 < len(in_place) == len(states))
