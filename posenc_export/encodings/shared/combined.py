"""Several encodings in one, such as rotation and temperature, or trained rows and a bias."""

from typing import Any, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.shared.base import Oracle, PositionEncoding, Seen, StateSpec, own_hooks
from posenc_export.shared.refusal import refusal

SIZE = 64  # of a head, for which scales are compared


def parts_of(encoding: PositionEncoding) -> list[PositionEncoding]:
    """The parts of a combined encoding; another encoding itself."""
    return list(encoding.parts) if isinstance(encoding, Combined) else [encoding]


def overrides(encoding: PositionEncoding, *hooks: str) -> bool:
    """Whether an encoding, or a part of a combined one, overrides one of these hooks."""
    return any(own_hooks(type(part), *hooks) for part in parts_of(encoding))


class Coordinates(NamedTuple):
    """What an encoding reads in `embed` and `rotate`: the attributes of PositionEncoding."""

    axes: int = 0
    coordinate_range: int = 0
    with_position: bool = False

    def __str__(self) -> str:
        limit = f" below {self.coordinate_range}" if self.coordinate_range else ""
        return f"{self.axes} axes{limit}{' behind the position' if self.with_position else ''}"


def coordinates_of(parts: Sequence[PositionEncoding]) -> Coordinates:
    """Return the coordinates that encodings read. All must read the same ones, but if all act on
    tokens alone, some may read positions and others coordinates. ValueError: other differences.
    """
    on_tokens, turning = ("embed", "embed_next"), ("rotate",)
    readers = [p for p in parts if p.grid_bias or overrides(p, *on_tokens, *turning)]
    read = {Coordinates(p.axes, p.coordinate_range, p.with_position) for p in readers}
    most = max(read, default=Coordinates())
    tokens_only = not any(part.grid_bias or overrides(part, *turning) for part in readers)
    if tokens_only and len(read) == 2 and Coordinates() in read:
        return most._replace(with_position=True)
    if len(read) > 1:
        got = f"encodings of {' and '.join(map(str, sorted(read)))}"
        rule = "encodings that read the same coordinates"
        raise refusal("encodings", rule, got, "use encodings of one kind")
    return most


def _check_sizes(parts: Sequence[PositionEncoding]) -> None:
    """Raise ValueError if a part reads queries and keys whose size another one has changed."""
    for index, part in enumerate(parts):
        others = [p for p in parts if overrides(p, "rescore", "observe", "score_scale")]
        others += [p for p in parts[index + 1 :] if overrides(p, "rotate")]
        names = [type(p).__name__ for p in others if not (p is part or p.any_size)]
        if part.key_size(1) != 1 and names:
            rule = f"no encoding with {type(part).__name__} that needs its size of keys"
            raise refusal("encodings", rule, names[0], "leave one out")


def _check_scale(parts: Sequence[PositionEncoding]) -> None:
    """Raise ValueError if a part scales scores otherwise than by 1 / sqrt(D), which another one
    computes itself.
    """
    scaling = [part for part in parts if part.score_scale(SIZE) != SIZE**-0.5]
    computing = [p for p in parts if overrides(p, "rescore") and p not in scaling]
    if scaling and computing:
        rule = f"no encoding that scales scores with {type(computing[0]).__name__}, which computes "
        got = type(scaling[0]).__name__
        raise refusal("encodings", f"{rule}them itself", got, "leave one out")


class Combined(PositionEncoding):
    """Applies the hooks of its parts one after the other and adds their biases.

    It has the states of the parts, in order, and the smallest of their ranges.

    Args:
        parts: encodings. At most one may compute scores from content, one scale scores, one change
            the size of keys, and one the width of the token table.

    Raises:
        ValueError: two parts that do the same of these, parts with different coordinates.
    """

    __jit_ignored_attributes__ = ["works_in"]  # TorchScript does not support its type
    counts: list[int]
    by_content: list[bool]
    on_grid: list[bool]

    def __init__(self, parts: Sequence[PositionEncoding]) -> None:
        super().__init__()
        for hooks in (("rescore", "observe"), ("score_scale",), ("key_size",), ("token_width",)):
            both = [type(part).__name__ for part in parts if overrides(part, *hooks)]
            if len(both) > 1:
                rule = f"at most one encoding that overrides {hooks[0]}"
                raise refusal("encodings", rule, " and ".join(both), "leave one out")
        _check_scale(parts)
        _check_sizes(parts)
        self.grid_bias = any(part.grid_bias for part in parts)
        of_scores = [part for part in parts if overrides(part, "bias", "rescore", "observe")]
        if self.grid_bias and not all(part.grid_bias for part in of_scores):
            names = " and ".join(type(part).__name__ for part in of_scores)
            raise refusal("encodings", "biases that all read coordinates", names, "leave one out")
        self.parts: Any = torch.nn.ModuleList(parts)
        self.axes, self.coordinate_range, self.with_position = coordinates_of(parts)
        self.chunk = min(part.chunk for part in parts)
        # Whether some parts read the position, and others the coordinates behind it.
        self.apart = self.with_position and not any(part.with_position for part in parts)
        self.on_grid = [part.axes > 0 for part in parts]
        self.shared = all(part.shared for part in parts)
        kinds = ("causal", "bidirectional")
        self.works_in = tuple(k for k in kinds if all(k in part.works_in for part in parts))
        self.counts = [len(part.embed_states()) for part in parts]
        self.by_content = [overrides(part, "rescore", "observe") for part in parts]

    def embed_next(
        self, x: Tensor, positions: Tensor, states: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """`embed_next` of every part, with its states."""
        present: list[Tensor] = []
        first = 0
        for index, part in enumerate(self.parts):
            end, places = first + self.counts[index], positions
            if self.apart:
                places = positions[1:] if self.on_grid[index] else positions[0]
            x, next_states = part.embed_next(x, places, states[first:end])
            present, first = present + next_states, end
        return x, present

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`rotate` of every part."""
        for part in self.parts:
            q, k = part.rotate(q, k, positions)
        return q, k

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """The sum of the biases of the parts; None if all are None."""
        total: Tensor | None = None
        for part in self.parts:
            bias = part.bias(q_positions, k_positions)
            if bias is not None:
                total = bias if total is None else total + bias
        return total

    def observe(
        self, x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: list[Tensor]
    ) -> list[Tensor]:
        """`observe` of the part that reads content, the only one with layer states."""
        for index, part in enumerate(self.parts):
            if self.by_content[index]:
                states = part.observe(x, k, positions, write_index, states)
        return states

    def rescore(self, q: Tensor, seen: Seen, scale: float, states: list[Tensor]) -> Tensor:
        """`rescore` of the part that computes scores from content, or plain attention."""
        y: Tensor | None = None
        for index, part in enumerate(self.parts):
            if self.by_content[index]:
                y = part.rescore(q, seen, scale, states)
        return ops.attend(q, seen.keys, seen.values, seen.mask, None, scale) if y is None else y

    def prepare(self) -> None:
        """Prepare all parts."""
        for part in self.parts:
            part.prepare()

    def _overriding(self, hook: str) -> Any:
        """The part that overrides a hook, or the first part."""
        return next((part for part in self.parts if overrides(part, hook)), self.parts[0])

    def key_size(self, head_size: int) -> int:
        return int(self._overriding("key_size").key_size(head_size))

    def token_width(self, width: int) -> int:
        return int(self._overriding("token_width").token_width(width))

    def initialise_tokens(self, table: Tensor) -> None:
        """Initialise the token table as the first part does."""
        self.parts[0].initialise_tokens(table)

    def embed_states(self) -> list[StateSpec]:
        return [state for part in self.parts for state in part.embed_states()]

    def row_rules(self) -> list[str]:
        return [rule for part in self.parts for rule in part.row_rules()]

    def bias_rule(self) -> str:
        biases = [part for part in self.parts if overrides(part, "bias")]
        return biases[0].bias_rule() if len(biases) == 1 else ""

    def layer_states(self) -> list[StateSpec]:
        return [state for part in self.parts for state in part.layer_states()]

    def score_scale(self, head_size: int) -> float:
        return float(self._overriding("score_scale").score_scale(head_size))


class CombinedOracle(Oracle, of=Combined):
    def __init__(self, encoding: Combined) -> None:
        super().__init__(encoding)
        self.parts: list[Oracle] = [part.oracle() for part in encoding.parts]

    def _overriding(self, hook: str) -> Oracle:
        return next((part for part in self.parts if part.overrides(hook)), self.parts[0])

    def embed_rows(self, x: np.ndarray, positions: Sequence[Any]) -> np.ndarray:
        for part, on_grid in zip(self.parts, self.encoding.on_grid, strict=True):
            places = positions
            if self.encoding.apart:
                places = [place[1:] if on_grid else place[0] for place in positions]
            x = part.embed_rows(x, places)
        return x

    def rotate_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        for part in self.parts:
            x = part.rotate_heads(x, position)
        return x

    def rotate_key_heads(self, x: np.ndarray, position: int) -> np.ndarray:
        for part in self.parts:
            x = part.rotate_key_heads(x, position)
        return x

    def observe(self, x: np.ndarray, first: int = 0) -> None:
        for part in self.parts:
            part.observe(x, first)

    def score_scale(self, head_size: int) -> float:
        return self._overriding("score_scale").score_scale(head_size)

    def bias(self, head: int, query: int, key: int) -> float:
        return sum(part.bias(head, query, key) for part in self.parts)

    def content(self, head: int, q: np.ndarray, k: np.ndarray, query: int, key: int) -> float:
        return sum(part.content(head, q, k, query, key) for part in self.parts)

    def scores(
        self, head: int, q: np.ndarray, keys: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        by_content = self._overriding("scores")
        if not by_content.overrides("scores"):
            return super().scores(head, q, keys, query, positions)
        others = [part for part in self.parts if part is not by_content]
        added = [sum(part.bias(head, query, p) for part in others) for p in positions]
        return by_content.scores(head, q, keys, query, positions) + np.array(added)

    def values(
        self, head: int, values: np.ndarray, query: int, positions: Sequence[int]
    ) -> np.ndarray:
        return self._overriding("values").values(head, values, query, positions)
