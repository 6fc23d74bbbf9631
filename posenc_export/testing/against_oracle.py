"""Compare the hooks of an encoding with its oracle at small and large positions."""

import functools
import math
from typing import Any, Callable, Iterator, Mapping, NamedTuple

import numpy as np
import torch

from posenc_export import encodings
from posenc_export.encodings import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.encodings.shared.functions import FunctionBias, FunctionRotation
from posenc_export.export.half_precision import PLACES
from posenc_export.models.randomness import drawn_from
from posenc_export.shared.numerics import entry_errors, tolerance

# Grouped heads, and numbers of heads and a width that are not powers of two.
HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 6, 3, 16, 48
# Errors below it may be those of angles in float32, 6e-8 of the position, or of tables in float16.
ROUNDING = 1e-2


Points = tuple[torch.Tensor, list[Any]]  # coordinates, and those of each token


class Compared(NamedTuple):
    """Results of a hook and of its oracle, of one shape, and the name of an entry's place."""

    hook: str
    actual: np.ndarray
    expected: np.ndarray
    name: Callable[..., str]


class Worst(NamedTuple):
    """The largest error of a hook (numerics.entry_errors), and its entry."""

    error: float
    place: str
    actual: float
    expected: float
    ahead: bool  # whether a query compares with a later key there


def geometry_of(max_positions: int, causal: bool) -> Geometry:
    """Sizes of the models of the checks."""
    return Geometry(WIDTH, HEADS, HEAD_SIZE, max_positions, causal, KV_HEADS)


def check(
    cls: type[PositionEncoding], spec: Mapping[str, Any], max_positions: int
) -> dict[str, float]:
    """Return the worst errors of embed, rotate and bias. Scores from content are compared in whole
    models instead.

    Raises:
        AssertionError: a hook that differs from the oracle; the message names the place of the
            largest difference.
    """
    by_hook: dict[str, Worst] = {}
    places = sorted({place for place in PLACES if place < max_positions} | {max_positions - 1})
    for kind in cls.works_in:
        with drawn_from(0):
            encoding = encodings.build(spec, geometry_of(max_positions, kind == "causal")).eval()
            results = (*_rows(encoding, places), *_scores(encoding, places, kind == "causal"))
        for compared in results:
            worst = _worst(compared)
            by_hook[compared.hook] = max(by_hook.get(compared.hook, worst), worst)
    bound = tolerance("float32", 1, 1)
    for hook, worst in by_hook.items():
        if not worst.error <= bound:
            problem = _problem(encoding, hook, worst, bound)
            raise AssertionError(f"check_encoding {cls.__name__}: {problem}")
    return {hook: worst.error for hook, worst in by_hook.items()}


def _problem(encoding: PositionEncoding, hook: str, worst: Worst, bound: float) -> str:
    derived = isinstance(encoding, (FunctionBias, FunctionRotation))
    if not (math.isfinite(worst.actual) and math.isfinite(worst.expected)):
        return _not_finite(hook, worst, derived)
    pair = f"expected {worst.expected:.8g}, got {worst.actual:.8g}"
    got = f"{worst.error:.1e}, worst at {worst.place}: {pair}"
    if derived:
        rule = f"{hook} within {bound:.1e} of your function in float64"
        return f"expected {rule}, got {got}; subtract positions before any division"
    if worst.error < ROUNDING:
        remedy = _precision(encoding, hook)
    else:
        remedy = "correct the hook or the oracle"
        if hook == "rotate" and _by_head(encoding):
            remedy = (
                "it rotates heads, or queries and keys, differently: override `rotate_heads` of "
                "the oracle, which gets all query heads of a token, and for keys `rotate_key` or "
                "`rotate_key_heads`"
            )
    says = "your module disagrees with your oracle"
    return f"expected {hook} within {bound:.1e} of its oracle, got {got}: {says}; {remedy}"


def _not_finite(hook: str, worst: Worst, derived: bool) -> str:
    got = f"{worst.actual:.8g} from {hook} and {worst.expected:.8g} from its oracle"
    if derived:
        got = f"{worst.actual:.8g} from your function"
    remedy = "correct the formula there"
    if worst.ahead:
        remedy = "compute with the absolute distance, or select with torch.where"
        if not derived:
            remedy += ', or set works_in = ("causal",) in the class'
    return f"expected finite numbers at {worst.place}, got {got}; {remedy}"


def _by_head(encoding: PositionEncoding) -> bool:
    """Whether heads, or q and k, are rotated differently without a hook that knows it."""
    if encoding.oracle().overrides("rotate_heads", "rotate_key", "rotate_key_heads"):
        return False
    head, positions = torch.ones(HEAD_SIZE), torch.tensor([[3]])
    if encoding.axes:
        positions = positions.expand(encoding.axes, 1, 1)
    q, k = (head.expand(1, 1, count, -1) for count in (HEADS, KV_HEADS))
    rotated = encoding.rotate(q, k, positions)
    heads = torch.cat(rotated, dim=2)  # [1,1,H+K,*]
    return not torch.allclose(heads, heads[:, :, :1].expand_as(heads), atol=ROUNDING)


def _precision(encoding: PositionEncoding, hook: str) -> str:
    """Return the remedy for a small error: what is rounded, or what to compute in float64."""
    for name, value in (*encoding.named_buffers(), *encoding.named_parameters()):
        if value.dtype in (torch.float16, torch.bfloat16):
            dtype = str(value.dtype).removeprefix("torch.")
            remedy = "keep fixed numbers in a Table and trained ones in an Exact, which are float32"
            return f"{name} is {dtype}: {remedy}"
    what = "fixed numbers" if hook == "bias" else "angles"
    return f"compute {what} in float64 and store them in a Table or an Exact"


def _worst(compared: Compared) -> Worst:
    errors = entry_errors(compared.actual, compared.expected, compared.hook == "rotate")
    entry = tuple(map(int, np.unravel_index(errors.argmax(), errors.shape)))
    ahead = compared.hook == "bias" and entry[-1] > entry[-2]
    # + 0.0: no -0
    actual, expected = float(compared.actual[entry]) + 0.0, float(compared.expected[entry]) + 0.0
    return Worst(float(errors[entry]), compared.name(*entry), actual, expected, ahead)


def _rows(encoding: PositionEncoding, places: list[int]) -> Iterator[Compared]:
    """Results of embed and rotate and of their oracles, if the encoding overrides them."""
    oracle = encoding.oracle()
    for coordinates, of_tokens in _coordinates(encoding, places):
        if overrides(encoding, "embed", "embed_next"):
            x = torch.randn(1, len(places), encoding.token_width(WIDTH))
            states = [torch.zeros(1, *carried.sizes) for carried in encoding.embed_states()]
            expected = oracle.embed_rows(_numbers(x[0]), of_tokens)
            actual = _numbers(encoding.embed_next(x, coordinates, states)[0][0])
            yield Compared("embed", actual, expected, _namer(of_tokens))
        if overrides(encoding, "rotate"):
            q = torch.randn(1, len(places), HEADS, HEAD_SIZE)
            k = torch.randn(1, len(places), KV_HEADS, HEAD_SIZE)
            turned_q, turned_k = encoding.rotate(q, k, coordinates)
            for what, x, turn, turned in (
                ("query", q, oracle.rotate_heads, turned_q),
                ("key", k, oracle.rotate_key_heads, turned_k),
            ):
                rows = zip(_numbers(x[0]), of_tokens, strict=True)
                expected = np.stack([turn(row, place) for row, place in rows])
                yield Compared("rotate", _numbers(turned[0]), expected, _namer(of_tokens, what))


def _namer(of_tokens: list[Any], what: str = "") -> Callable[..., str]:
    """Return a function from indices to an entry's name; what: "query" or "key" for heads."""

    def name(token: int, *rest: int) -> str:
        place = of_tokens[token]
        where = f"position {place}" if isinstance(place, int) else f"coordinates {place}"
        return f"{where}, entry {rest[-1]}{f' of {what} head {rest[0]}' if what else ''}"

    return name


def _coordinates(encoding: PositionEncoding, places: list[int]) -> Iterator[Points]:
    """Positions [1,n] and, for the oracle, each token's; on a grid [axes,1,n]."""
    index = torch.tensor([places])
    if not encoding.axes:
        yield index, places
        return
    yield index.expand(encoding.axes, 1, -1), places
    if not encoding.embed_states():  # a state of embed covers the image in its order of tokens
        yield _differing(index, encoding.axes)


def _differing(index: torch.Tensor, axes: int) -> Points:
    """Coordinates of tokens that differ by axis."""
    differing = torch.stack([index.roll(axis, 1) for axis in range(axes)])
    return differing, list(zip(*differing[:, 0].tolist(), strict=True))


def _scores(encoding: PositionEncoding, places: list[int], causal: bool) -> Iterator[Compared]:
    """The bias and its oracle, if there is one; 0 for hidden keys."""
    index, oracle = torch.tensor([places]), encoding.oracle()
    points: list[Points] = [(index, places)] if overrides(encoding, "bias") else []
    if encoding.grid_bias:
        points.append(_differing(index, encoding.axes + encoding.with_position))
    shape = (HEADS, len(places), len(places))
    seen = np.tril(np.ones(shape, bool)) if causal else np.ones(shape, bool)
    for coordinates, of_tokens in points:
        bias: torch.Tensor | None = encoding.bias(coordinates, coordinates)
        if bias is None:
            return
        expected = np.zeros(shape)
        for head, query, key in np.argwhere(seen).tolist():
            expected[head, query, key] = oracle.bias(head, of_tokens[query], of_tokens[key])
        actual = np.where(seen, np.broadcast_to(_numbers(bias[0]), shape), 0.0)
        yield Compared("bias", actual, expected, functools.partial(_pair, of_tokens))


def _pair(of_tokens: list[Any], head: int, query: int, key: int) -> str:
    return f"query {of_tokens[query]}, key {of_tokens[key]}, head {head}"


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()
