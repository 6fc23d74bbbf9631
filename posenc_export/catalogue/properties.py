"""Properties of position encodings, measured on their hooks."""

import dataclasses
from typing import Any, Dict, List, Mapping

import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.catalogue.listing import needs_parameters
from posenc_export.encodings.shared.base import Geometry, PositionEncoding, Seen
from posenc_export.encodings.shared.combined import overrides
from posenc_export.models.layer import Mask
from posenc_export.models.parts import build as build_part
from posenc_export.models.randomness import drawn_from
from posenc_export.ops import TokenPlaces
from posenc_export.shared.numerics import tolerance

TOKENS, SIDE = 64, 91
# Encodings that derive rows and columns from positions use a square of SIDE x SIDE; both STARTS are
# in the first column.
GEOMETRY = Geometry(width=32, heads=2, head_size=TOKENS, max_positions=SIDE * SIDE)
STARTS = (0, SIDE * (SIDE - 2))
BOUND, TINY = tolerance("float32", 1, TOKENS), torch.finfo(torch.float32).tiny
COLUMNS = ("told apart", "offset only", "longer range", "trained numbers", "axes")
Row = Dict[str, str]


@dataclasses.dataclass(frozen=True)
class Response:
    """Results of the hooks of an encoding on S equal tokens."""

    tokens: Tensor  # changes of the tokens [S,E]
    rotated: Tensor  # query and key of each token, concatenated [S,n]
    products: Tensor  # dot products of the changes [1,S,S]
    # Scores of every query and key [H,S,S]; minus the score of the query's own key if the encoding
    # overrides `rescore`.
    scores: Tensor
    seen: Tensor  # mask of the entries of products and scores that the attention uses [S,S]


@torch.no_grad()
def respond(encoding: PositionEncoding, places: Tensor, causal: bool) -> Response:
    """Run the hooks of an encoding on equal tokens.

    Args:
        encoding: an encoding of any geometry with heads of TOKENS entries.
        places: positions [S], or coordinates [axes,S]; S is at most TOKENS.
        causal: whether later keys are hidden.
    """
    encoding.eval()
    random, width = torch.Generator().manual_seed(0), encoding.token_width(GEOMETRY.width)
    count, positions = places.size(-1), torch.atleast_2d(places)[:1]
    coordinates = places.unsqueeze(-2)  # [1,S] or [axes,1,S]
    token = torch.randn(1, 1, width, generator=random).expand(1, count, width)
    states = [torch.zeros(1, *state.sizes) for state in encoding.embed_states()]
    embedded = encoding.embed_next(token, coordinates, states)[0]  # [1,S,E]
    change = (embedded - token if width == GEOMETRY.width else embedded)[0]  # [S,E]
    numbers = torch.randn(2, 1, 1, GEOMETRY.heads, TOKENS, generator=random)
    q, k = numbers.expand(-1, -1, count, -1, -1)
    q, k = encoding.rotate(q, k, coordinates)  # [1,S,H,D]
    sees = Mask(build_part("sees", {"name": "causal" if causal else "both"}), encoding)
    mask = sees(TokenPlaces(positions, coordinates, positions, positions), q)
    if overrides(encoding, "rescore"):
        scores = _by_content(encoding, embedded, q, k, mask, positions)  # [1,H,S,S]
    else:
        scores = encoding.score_scale(TOKENS) * (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) + mask
    rotated = torch.cat((q.flatten(2), k.flatten(2)), dim=2)[0]
    seen = torch.ones(count, count, dtype=torch.bool)
    products = (change @ change.T)[None]
    return Response(change, rotated, products, scores[0], seen.tril() if causal else seen)


def _by_content(
    encoding: PositionEncoding, x: Tensor, q: Tensor, k: Tensor, mask: Tensor, positions: Tensor
) -> Tensor:
    """Scores [1,H,S,S] of `rescore`, from attention weights (values are rows of the identity)."""
    count, heads, size = q.size(1), q.size(2), TOKENS
    states = [torch.zeros(1, s.sizes[0], 0, s.sizes[1]) for s in encoding.layer_states()]
    states = encoding.observe(x, k, positions, torch.zeros(1, dtype=torch.int64), states)
    rows = torch.eye(count, size).expand(1, heads, -1, -1)
    scale = encoding.score_scale(size)
    mixed, none = (
        encoding.rescore(
            q, Seen(k.transpose(1, 2), values, mask, positions, positions), scale, states
        )
        for values in (rows, torch.zeros_like(rows))
    )
    weights = (mixed - none).unflatten(2, [heads, size])[..., :count].transpose(1, 2)  # [1,H,S,S]
    logs = weights.clamp(min=TINY).log()
    return logs - logs.diagonal(dim1=2, dim2=3).unsqueeze(3)


def differ(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    largest = torch.maximum(first.abs().max(), second.abs().max()).clamp(min=TINY)
    return bool((first - second).abs().max() > BOUND * largest)


def told_apart(response: Response) -> int:
    """How many tokens differ from every earlier token: in their change, their query or key, or the
    score that the last query gives to them.
    """
    parts = [response.tokens, response.rotated, response.scores[:, -1].T]
    rows = torch.cat([part / part.abs().max().clamp(min=TINY) for part in parts], dim=1)
    apart = (rows[:, None] - rows[None]).abs().amax(2) > BOUND
    return int((apart | torch.ones_like(apart).triu()).all(1).sum())


def offset_only(near: Response, far: Response) -> str:
    """ "yes" if products and scores depend on offsets only, "no" on more, "-" not on positions."""
    seen, inner = near.seen, near.seen[1:, 1:]
    moves = varies = shifts = False
    for first, second in ((near.products, far.products), (near.scores, far.scores)):
        moves |= differ(first[:, seen], second[:, seen])
        varies |= differ(first[:, seen], first[:, :1, :1].flatten(1))
        shifts |= differ(first[:, 1:, 1:][:, inner], first[:, :-1, :-1][:, inner])
    return "no" if moves or (varies and shifts) else "yes" if varies else "-"


def measure(name: str) -> Row:
    """The cells of one encoding, by column. Every cell is "-" if a parameter has no default.
    ValueError: unknown name, or an encoding that cannot be built.
    """
    if needs_parameters(name):
        return dict.fromkeys(COLUMNS, "-")
    encoding, causal = built({"name": name}), "causal" in encodings.KNOWN[name].works_in
    near, far = (respond(encoding, _line(encoding, start), causal) for start in STARTS)
    apart, relation = told_apart(near), offset_only(near, far)
    return {
        "told apart": f"{apart} of {TOKENS}",
        "offset only": relation,
        "longer range": longer({"name": name}),
        "trained numbers": trained(encoding),
        "axes": "-" if apart == 1 and relation == "-" else axes(encoding, name),
    }


def built(
    spec: Mapping[str, Any], max_positions: int = GEOMETRY.max_positions, seed: int = 0
) -> PositionEncoding:
    """Build an encoding with its initial weights, in the geometry of the page."""
    causal = "causal" in encodings.KNOWN[spec["name"]].works_in
    with drawn_from(seed):
        geometry = dataclasses.replace(GEOMETRY, max_positions=max_positions, causal=causal)
        return encodings.build(spec, geometry)


def _line(encoding: PositionEncoding, start: int) -> Tensor:
    """Positions of TOKENS tokens from `start` on, with the same number on every axis."""
    line = torch.arange(start, start + TOKENS)
    return line.expand(encoding.axes, -1) if encoding.axes else line


def same_response(
    encoding: PositionEncoding, other: PositionEncoding, places: Tensor, other_places: Tensor
) -> bool:
    """Whether two encodings change equal tokens equally, each at its own places."""
    causal = "causal" in encoding.works_in
    first, second = respond(encoding, places, causal), respond(other, other_places, causal)
    scores = first.scores[:, first.seen], second.scores[:, second.seen]
    return not (differ(first.tokens, second.tokens) or differ(*scores))


def longer(spec: Mapping[str, Any]) -> str:
    """ "same weights", "more weights" or "places change" for a range four times as long."""
    short, long = built(spec, TOKENS), built(spec, 4 * TOKENS)
    places = _line(short, 0)
    if not _loaded(long, short):
        return "more weights"
    return "same weights" if same_response(short, long, places, places) else "places change"


def _loaded(to: PositionEncoding, of: PositionEncoding) -> bool:
    """Load the weights of one encoding into another; False, without loading, if shapes differ."""
    if [value.shape for value in to.parameters()] != [value.shape for value in of.parameters()]:
        return False
    to.load_state_dict(of.state_dict())
    to.prepare()
    return True


def trained(encoding: PositionEncoding) -> str:
    """Number of trained numbers; "token table" if they belong to words."""
    if encoding.token_width(GEOMETRY.width) != GEOMETRY.width:
        return "token table"
    return str(sum(value.numel() for value in encoding.parameters()) or "none")


def axes(encoding: PositionEncoding, name: str) -> str:
    """Number of independent coordinates; "2, row-major" if row and column follow from one."""
    places = _line(encoding, 0)
    if encoding.axes:
        stretched = [_stretched(places, axis) for axis in range(encoding.axes)]
        return str(sum(not same_response(encoding, encoding, places, other) for other in stretched))
    if "columns" in encodings.parameters(name):
        spec = {"name": name, "rows": TOKENS}
        narrow, wide = (built({**spec, "columns": columns}, TOKENS) for columns in (8, 16))
        if not _loaded(wide, narrow) or not same_response(narrow, wide, places, places):
            return "2, row-major"
    return "1"


def _stretched(places: Tensor, axis: int) -> Tensor:
    """Coordinates [axes,S] with one axis multiplied by 2."""
    factors = torch.ones(len(places), 1, dtype=torch.int64)
    factors[axis] = 2
    return places * factors


def rows() -> List[Row]:
    """One row per known encoding."""
    return [row_of(name) for name in encodings.KNOWN]


def row_of(name: str) -> Row:
    """Name and cells of an encoding; if it cannot be built, the last cell has the reason."""
    try:
        encodings.KNOWN.check_one(name)
        return {"name": name, **measure(name)}
    except ValueError as error:
        return {"name": name, **dict.fromkeys(COLUMNS, "-"), COLUMNS[-1]: f"refused: {error}"}
