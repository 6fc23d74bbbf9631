"""Extension of learned positions to a longer range: copied, interpolated or hierarchical rows."""

from typing import Any, Dict, Tuple, TypeVar, Union

import msgspec
import torch

from posenc_export.encodings import PositionEncoding
from posenc_export.encodings.learned import Learned
from posenc_export.encodings.shared.combined import parts_of
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import BlockConfig
from posenc_export.models.presets import MODELS
from posenc_export.models.stack import Stack
from posenc_export.models.whole_pass import encodings_in
from posenc_export.shared.refusal import refusal

M = TypeVar("M", bound=Union[Stack, AttentionBlock])


def extend_positions(model: M, max_positions: int, by: str = "copied") -> M:
    """Return a copy of a model with more rows in its table of learned positions.

    Other encodings are built again for the new range. Those that depend on max_positions, such as
    `normalized`, change with it.

    Args:
        model: a model with `learned` among its token encodings. It is not changed.
        max_positions: new number of positions N; the range is 0 .. N - 1.
        by: "copied" or "interpolated", as in Learned.extended. With "copied", positions of the old
            range keep their outputs.

    Raises:
        ValueError: as Learned.extended; a model without or with several `learned` encodings; other
            weights whose shape depends on max_positions.
    """
    index, learned = _learned(model)
    spec = {"name": "learned", "offset": learned.offset}
    return _with_range(model, max_positions, index, spec, learned.extended(max_positions, by))


def to_hierarchical(model: M, max_positions: int, share: float = 0.4) -> M:
    """Return a copy of a model whose M learned rows become the rows of `hierarchical`, for up to
    M^2 positions.

    Positions of the old range keep their rows, up to rounding. Other encodings are treated as in
    `extend_positions`.

    Args:
        model: a model with `learned` among its token encodings. It is not changed.
        max_positions: new number of positions N; the range is 0 .. N - 1.
        share: parameter `share` of `hierarchical`.

    Raises:
        ValueError: as Learned.hierarchical; a model without or with several `learned` encodings;
            other weights whose shape depends on max_positions.
    """
    index, learned = _learned(model)
    encoding = learned.hierarchical(max_positions, share)
    spec = {"name": "hierarchical", "rows": encoding.rows, "share": encoding.share}
    return _with_range(model, max_positions, index, spec, encoding)


def _learned(model: Any) -> Tuple[int, Learned]:
    """Return the learned encoding among the token encodings of a model, and its index."""
    if not isinstance(model, (Stack, AttentionBlock)):
        rule, remedy = "a Stack or an AttentionBlock", "pass the one inside your module"
        raise refusal("longer", rule, type(model).__name__, remedy)
    parts = parts_of(model.token_encoding)
    learned = [(index, part) for index, part in enumerate(parts) if isinstance(part, Learned)]
    if len(learned) != 1:
        names = ", ".join(type(part).__name__ for part in parts)
        remedy = "choose a model with a table of learned positions"
        raise refusal("longer", "one learned token encoding", names, remedy)
    return learned[0]


def _with_range(
    model: M, max_positions: int, index: int, spec: Dict[str, Any], encoding: PositionEncoding
) -> M:
    """Return a copy with another range and the token encoding `index` replaced, as `spec` says."""
    longer: Any = MODELS[type(model.config)](_config(model.config, max_positions, index, spec))
    replaced, weights = parts_of(longer.token_encoding)[index], dict(model.named_parameters())
    new = {id(parameter) for parameter in replaced.parameters()}
    with torch.no_grad():
        for name, parameter in longer.named_parameters():
            if id(parameter) in new:
                continue
            if weights[name].shape != parameter.shape:
                rule = "only one weight whose shape depends on max_positions"
                got = f"also {name}, which would become {list(parameter.shape)}"
                raise refusal("longer", rule, got, "this model cannot be extended")
            parameter.copy_(weights[name])
    replaced.load_state_dict(encoding.state_dict())
    if isinstance(model, Stack):
        longer.text = model.text
    for built in encodings_in(longer):
        built.prepare()
    return longer.train(model.training)


def _config(config: Any, max_positions: int, index: int, spec: Dict[str, Any]) -> Any:
    holder = config if isinstance(config, BlockConfig) else config.tokens
    encodings = (*holder.encodings[:index], spec, *holder.encodings[index + 1 :])
    changed: Dict[str, Any] = {"encodings": encodings}
    if holder is not config:
        changed = {"tokens": msgspec.structs.replace(holder, encodings=encodings)}
    return msgspec.structs.replace(config, max_positions=max_positions, **changed)
