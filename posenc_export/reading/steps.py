"""How a call computes the values of a graph: one step for each node that depends on the tokens."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from posenc_export.reading.axes import Roles, factors, kinds
from posenc_export.reading.values import aten

TRIANGLES = (aten.tril.default, aten.triu.default)
Sinks = None | Node | Tensor
Reads = tuple[Roles | None, ...]  # roles of each input, None for weights and sizes


class Cached(NamedTuple):
    """A value that is cached for all tokens.

    Attributes:
        node: the value, with one axis of tokens.
        order: its factors in the order rows, tokens, heads, entries; None for its own order.
        copies: number of equal heads for which one is cached.
    """

    node: Node
    order: tuple[int, ...] | None = None
    copies: int = 1


@dataclass(frozen=True)
class Step:
    """A step with the roles of its output, for several outputs one tuple of roles each."""

    roles: Any


@dataclass(frozen=True)
class Given(Step):
    """An input."""


@dataclass(frozen=True)
class OfMemory(Step):
    """A part of the outputs of an encoder, as keys or values of a layer.

    Attributes:
        order: the factors as [B,M,heads,size].
        begin: of the part, among the numbers of each token.
    """

    order: tuple[int, ...]
    begin: int
    heads: int
    size: int


@dataclass(frozen=True)
class Item(Step):
    """One of several outputs."""


@dataclass(frozen=True)
class Each(Step):
    """An operator that acts on each token, or each pair of a query and a key, alone.

    Attributes:
        reads: roles in which it reads its inputs.
        sizes: "K" if sizes among its arguments count keys, otherwise "Q".
    """

    reads: Reads
    sizes: str = "Q"


@dataclass(frozen=True)
class OverKeys(Step):
    """An operator that reduces keys, for which keys that hold the number `fill` do not count.

    Attributes:
        undefined: where all that a query sees holds at most this, the module, which hides later
            keys by finite numbers, reads these; a call gives NaN. -inf if that cannot be.
    """

    reads: Reads
    fill: float
    sizes: str = "K"
    undefined: float = -math.inf


@dataclass(frozen=True)
class Cut(Step):
    """tril or triu of pairs, by their positions; `shift` is the diagonal."""

    lower: bool
    shift: int

    @classmethod
    def of(cls, node: Node, roles: Roles) -> "Cut | None":
        """Return the step of a node whose value has these roles, None for other operators."""
        shift: Any = node.args[1] if node.target in TRIANGLES and len(node.args) > 1 else 0
        pairs, has_right = kinds(roles[-2:]), any(factor.right for factor in factors(roles))
        if node.target not in TRIANGLES or has_right or type(shift) is not int:
            return None
        if len(pairs) != 2 or set(pairs) != {"Q", "K"}:
            return None
        return cls(roles, node.target is aten.tril.default, shift)


@dataclass(frozen=True)
class Window(Step):
    """The end of a region that reads the last `reach` tokens before each token of `root`."""

    root: Node
    region: tuple[Node, ...]
    reach: int


@dataclass(frozen=True)
class Open(Step):
    """Part of a region from `root` on that has not ended; `first` is its first operator."""

    root: Node
    first: Node


@dataclass(frozen=True)
class Rotated(Step):
    """Heads of `root` that are turned by position.

    Attributes:
        root_order, order: the factors of the root and of the output as [B,S,H,D].
        cos, sin: names of tables [N,r/2] of lengths.Lengths.
        form: which pairs are turned.
        linear: as in ops.rotate_pairs.
        of_axis: name of the table [A,r/2] of the pairs that each coordinate turns; empty if the
            position turns all of them.
    """

    root: Node
    root_order: tuple[int, ...]
    order: tuple[int, ...]
    cos: str
    sin: str
    form: Any
    linear: bool
    of_axis: str


@dataclass(frozen=True)
class Skew(Step):
    """Scores by distance, the value `root`, that a region rearranges to scores by key."""

    root: Node


@dataclass(frozen=True)
class Running(Step):
    """A total of `source` over each token and all earlier ones (ops.recurrence.running_total). Its
    state is [B,1,2,C].
    """

    source: Node
    kind: str


@dataclass(frozen=True)
class Recurrent(Step):
    """A recurrence over all tokens; its state is [B,H,D,V].

    Attributes:
        state: H, D and V.
    """

    state: tuple[int, int, int]


@dataclass(frozen=True)
class Attend(Step):
    """Softmax attention as a whole.

    Attributes:
        q: queries, and the order of their factors as [B,S,H,D].
        key, value: what is cached.
        y_order: the factors of the output as [B,S,H,D].
        heads: number of query heads.
        scale, softcap: of the scores.
        bias: a plan of lengths.Lengths and the roles of its pairs; None for none.
        before, after, chunk: as in ops.attention_mask.
        sinks: a score of each head that the softmax includes without a value, or the weight that
            holds these scores; None for none.
    """

    q: Node
    q_order: tuple[int, ...]
    key: Cached
    value: Cached
    y_order: tuple[int, ...]
    heads: int
    scale: float
    softcap: float
    bias: Any
    bias_roles: Roles
    before: int
    after: int
    chunk: int
    sinks: Sinks
