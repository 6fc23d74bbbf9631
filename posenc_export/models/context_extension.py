"""Extension of models with learned positions to a longer range: by copied rows, interpolated rows or a hierarchy of rows."""

from typing import Any, Dict, Tuple, TypeVar, Union

import msgspec
import torch

from posenc_export.encodings import PositionEncoding
from posenc_export.encodings.learned import Learned
from posenc_export.encodings.shared.combined import Combined
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import BlockConfig
from posenc_export.models.presets import MODELS
from posenc_export.models.stack import Stack

M = TypeVar("M", bound=Union[Stack, AttentionBlock])


def grown(model: M, max_positions: int, by: str = "copied") -> M:
    """Return a copy of a model with more rows in its table of learned positions.

    Other encodings are built again for the new range. Those that depend on max_positions, such as `normalized`, change with it.

    Args:
        model: a model with `learned` among its token encodings. It is not changed.
        max_positions: new number of positions N; the range is 0 .. N - 1.
        by: "copied" or "interpolated", as in Learned.extended. With "copied", positions of the old range keep their outputs.

    Raises:
        ValueError: as Learned.extended; a model without or with several `learned` encodings; other weights whose shape depends on max_positions.
    """
    index, learned = _found(model)
    return _with_range(model, max_positions, index, {"name": "learned", "offset": learned.offset}, learned.extended(max_positions, by))


def to_hierarchical(model: M, max_positions: int, share: float = 0.4) -> M:
    """Return a copy of a model whose M learned rows become the rows of `hierarchical`, for up to M^2 positions.

    Positions of the old range keep their rows, up to rounding. Other encodings are treated as in `grown`.

    Args:
        model: a model with `learned` among its token encodings. It is not changed.
        max_positions: new number of positions N; the range is 0 .. N - 1.
        share: parameter `share` of `hierarchical`.

    Raises:
        ValueError: as Learned.hierarchical; a model without or with several `learned` encodings; other weights whose shape depends on max_positions.
    """
    index, learned = _found(model)
    made = learned.hierarchical(max_positions, share)
    return _with_range(model, max_positions, index, {"name": "hierarchical", "rows": made.rows, "share": made.share}, made)


def _parts(encoding: PositionEncoding) -> Tuple[Any, ...]:
    return tuple(encoding.parts) if isinstance(encoding, Combined) else (encoding,)


def _found(model: Any) -> Tuple[int, Learned]:
    """Return the index of the learned encoding among the token encodings of a model, and the encoding."""
    if not isinstance(model, (Stack, AttentionBlock)):
        raise ValueError(f"longer: expected a Stack or an AttentionBlock, got {type(model).__name__}; pass the one inside your module")
    found = [(index, part) for index, part in enumerate(_parts(model.token_encoding)) if isinstance(part, Learned)]
    if len(found) != 1:
        names = ", ".join(type(part).__name__ for part in _parts(model.token_encoding))
        raise ValueError(f"longer: expected one learned token encoding, got {names}; choose a model with a table of learned positions")
    return found[0]


def _with_range(model: M, max_positions: int, index: int, spec: Dict[str, Any], encoding: PositionEncoding) -> M:
    """Return a copy of a model with another range and one token encoding replaced.

    Args:
        model: the model to copy.
        max_positions: new number of positions.
        index: which token encoding to replace.
        spec, encoding: specification of the new encoding, and an encoding with its weights.
    """
    made: Any = MODELS[type(model.config)](_config(model.config, max_positions, index, spec))
    place, given = _parts(made.token_encoding)[index], dict(model.named_parameters())
    own = {id(parameter) for parameter in place.parameters()}
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if id(parameter) in own:
                continue
            if given[name].shape != parameter.shape:
                rule = "longer: expected only one weight whose shape depends on max_positions"
                raise ValueError(f"{rule}, got also {name}, which would become {list(parameter.shape)}; this model cannot be extended")
            parameter.copy_(given[name])
    place.load_state_dict(encoding.state_dict())
    if isinstance(model, Stack):
        made.text = model.text
    for built in dict.fromkeys((made.token_encoding, *(attention.encoding for attention in made.attentions()))):
        built.prepare()
    longer: M = made.train(model.training)
    return longer


def _config(config: Any, max_positions: int, index: int, spec: Dict[str, Any]) -> Any:
    """Return the description with another range and one token encoding replaced."""
    holder = config if isinstance(config, BlockConfig) else config.tokens
    specs = tuple(spec if place == index else one for place, one in enumerate(holder.encodings))
    changed = {"encodings": specs} if holder is config else {"tokens": msgspec.structs.replace(holder, encodings=specs)}
    return msgspec.structs.replace(config, max_positions=max_positions, **changed)
