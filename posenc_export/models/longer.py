"""Models with learned positions, brought to a longer range: rows copied, interpolated, or taken apart in a hierarchy."""

from typing import Any, Dict, Tuple, TypeVar, Union

import msgspec
import torch

from posenc_export.encodings import PositionEncoding
from posenc_export.encodings.learned import Learned
from posenc_export.encodings.together import Together
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import BlockConfig
from posenc_export.models.presets import MODELS
from posenc_export.models.stack import Stack

M = TypeVar("M", bound=Union[Stack, AttentionBlock])


def grown(model: M, max_positions: int, by: str = "copied") -> M:
    """A model with more rows in its learned table; its other weights are copies.

    Encodings beside the table are built for the new range: those that depend on max_positions, such as `normalized`, change with it.

    Args:
        model: with `learned` on tokens; left as it is.
        max_positions: N, the new range 0 .. N - 1.
        by: "copied" or "interpolated", as Learned.grown. Copied rows give positions of the old range what they gave before.

    Raises:
        ValueError: as Learned.grown; a model without `learned` or with several, other weights whose shape follows max_positions.
    """
    index, learned = _found(model)
    return _with_range(model, max_positions, index, {"name": "learned", "offset": learned.offset}, learned.grown(max_positions, by))


def to_hierarchical(model: M, max_positions: int, share: float = 0.4) -> M:
    """A model whose M learned rows serve as those of `hierarchical`, up to M^2 positions; its other weights are copies.

    Positions of the old range keep their rows, to rounding. Encodings beside the table are treated as by `grown`.

    Args:
        model: with `learned` on tokens; left as it is.
        max_positions: N, the new range 0 .. N - 1.
        share: a of `hierarchical`.

    Raises:
        ValueError: as Learned.hierarchical; a model without `learned` or with several, other weights whose shape follows max_positions.
    """
    index, learned = _found(model)
    made = learned.hierarchical(max_positions, share)
    return _with_range(model, max_positions, index, {"name": "hierarchical", "rows": made.rows, "share": made.share}, made)


def _parts(encoding: PositionEncoding) -> Tuple[Any, ...]:
    return tuple(encoding.parts) if isinstance(encoding, Together) else (encoding,)


def _found(model: Any) -> Tuple[int, Learned]:
    """The learned positions of a model, and where they stand among the encodings on tokens."""
    if not isinstance(model, (Stack, AttentionBlock)):
        raise ValueError(f"longer: expected a Stack or an AttentionBlock, got {type(model).__name__}; give the one inside it")
    found = [(index, part) for index, part in enumerate(_parts(model.token_encoding)) if isinstance(part, Learned)]
    if len(found) != 1:
        names = ", ".join(type(part).__name__ for part in _parts(model.token_encoding))
        raise ValueError(f"longer: expected one learned encoding on tokens, got {names}; only such a table can be made longer")
    return found[0]


def _with_range(model: M, max_positions: int, index: int, spec: Dict[str, Any], encoding: PositionEncoding) -> M:
    """The model with another range and another encoding on tokens in one place.

    Args:
        spec, encoding: of that place.
    """
    made: Any = MODELS[type(model.config)](_config(model.config, max_positions, index, spec))
    place, given = _parts(made.token_encoding)[index], dict(model.named_parameters())
    own = {id(parameter) for parameter in place.parameters()}
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if id(parameter) in own:
                continue
            if given[name].shape != parameter.shape:
                rule = "longer: expected one table that follows max_positions"
                raise ValueError(f"{rule}, got {name} too, which would be {list(parameter.shape)}; this model cannot be made longer")
            parameter.copy_(given[name])
    place.load_state_dict(encoding.state_dict())
    if isinstance(model, Stack):
        made.text = model.text
    for built in dict.fromkeys((made.token_encoding, *(attention.encoding for attention in made.attentions()))):
        built.prepare()
    longer: M = made.train(model.training)
    return longer


def _config(config: Any, max_positions: int, index: int, spec: Dict[str, Any]) -> Any:
    """The description with another range and another encoding on tokens in one place."""
    holder = config if isinstance(config, BlockConfig) else config.tokens
    specs = tuple(spec if place == index else one for place, one in enumerate(holder.encodings))
    changed = {"encodings": specs} if holder is config else {"tokens": msgspec.structs.replace(holder, encodings=specs)}
    return msgspec.structs.replace(config, max_positions=max_positions, **changed)
