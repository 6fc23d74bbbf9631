"""The call of a model without a cache: as in training, with its input only, and in float64 numpy,
which checks the eager module.
"""

from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings.shared.base import PositionEncoding, StateSpec
from posenc_export.encodings.shared.combined import coordinates_of, overrides, parts_of
from posenc_export.models.attention import check_direction
from posenc_export.ops import TokenPlaces
from posenc_export.shared.refusal import refusal

PACKAGE = __name__.partition(".")[0]


class Whole(torch.nn.Module):
    """A block or a stack, which is also called with its input alone.

    Args:
        config: its description.
        on_tokens, in_layers: its encodings. ValueError: one has a hook that is not called at its
            place, or reads other coordinates than the others.
    """

    def __init__(
        self, config: Any, on_tokens: PositionEncoding, in_layers: Sequence[PositionEncoding]
    ) -> None:
        super().__init__()
        # How to rebuild the same weights, empty if that is not possible (models.presets).
        self.source: dict[str, Any] = {}
        self.config, self.token_encoding = config, on_tokens
        for placed, hooks, actual, required in (
            ([on_tokens], ("rotate", "bias", "observe", "rescore"), "on tokens", "in layers"),
            (in_layers, ("embed", "embed_next"), "in layers", "on tokens"),
        ):
            for encoding in placed:
                if overrides(encoding, *hooks):
                    rule, got = "encodings at the place where they act", type(encoding).__name__
                    raise refusal("config", rule, f"{got} {actual}", f"put it {required}")
        check_direction(on_tokens, config.attentions[0].causal)
        read = coordinates_of([on_tokens, *in_layers])
        self.axes, self.coordinate_range, self.with_position = read
        self.embed_states = len(on_tokens.embed_states())

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call `forward`; with x alone compute whole sequences at positions 0 .. S-1, as for
        training. ValueError: as whole_pass and check_dtype.
        """
        check_dtype(self)
        if len(arguments) == 1 and not named:
            return whole_pass(self, *arguments)
        return super().__call__(*arguments, **named)

    def weight_dtype(self) -> torch.dtype:
        """Return the dtype of weights and activations."""
        dtype: torch.dtype = self.attentions()[0].projection.output.weight.dtype
        return dtype

    def attentions(self) -> list[Any]:
        """Return the attention of each layer."""
        raise NotImplementedError


def encodings_in(model: Any) -> list[PositionEncoding]:
    """Return the encodings of a model, each once: that of tokens, then those of layers."""
    in_layers = (attention.encoding for attention in model.attentions())
    return list(dict.fromkeys((model.token_encoding, *in_layers)))


def foreign_encodings(model: Any) -> list[PositionEncoding]:
    """Return the encodings of a model that its description names and whose classes are those of
    other packages, by layer.
    """
    parts = [part for encoding in encodings_in(model) for part in parts_of(encoding)]
    named = [part for part in parts if part.built[0]]
    return [part for part in named if type(part).__module__.partition(".")[0] != PACKAGE]


def check_dtype(model: Any) -> None:
    """Raise ValueError for a model in float64.

    Encodings and scores are computed in float32, whatever the weights are, since graphs compute
    them so. A model in float64 would have the precision of float32.
    """
    if model.weight_dtype() == torch.float64:
        got = "float64, in which encodings and scores are not computed"
        raise refusal("model", "weights in float32, float16 or bfloat16", got, "call .float()")


def empty_states(model: Any, x: Tensor) -> list[Tensor]:
    """Return the states before the first token of x [B,S,*], in the order of `forward`."""
    attentions, dtype = model.attentions(), model.weight_dtype()
    of_layers = [state for attention in attentions for state in attention.states()]

    def empty(state: StateSpec) -> Tensor:
        sizes = (state.sizes[0], 0, state.sizes[1]) if state.grows else tuple(state.sizes)
        own = getattr(torch, state.dtype) if state.dtype else dtype
        return torch.zeros((x.size(0), *sizes), dtype=own, device=x.device)

    return [empty(state) for state in (*model.token_encoding.embed_states(), *of_layers)]


def coordinates_at(model: Any, positions: Tensor) -> Tensor:
    """Return the coordinates of tokens at positions [B,S] without a grid."""
    if not model.axes:
        return positions
    own = torch.zeros_like(positions) if model.coordinate_range else positions
    planes = own.expand(model.axes, -1, -1)
    return torch.cat((positions[None], planes)) if model.with_position else planes


def whole_pass(model: Any, x: Tensor) -> Tensor:
    """Compute the outputs [B,S,*] of whole sequences at positions 0 .. S-1, without a grid.

    Args:
        model: an AttentionBlock or a Stack.
        x: token ids [B,S] int64 or hidden states [B,S,E].

    Raises:
        ValueError: x of another form or too long.
    """
    if not 2 <= x.dim() <= 3:
        rule = "x with axes [B,S] or [B,S,E]"
        raise refusal("model", rule, list(x.shape), "add the axis of rows")
    if x.size(1) > model.config.max_positions:
        rule = f"at most {model.config.max_positions} tokens, the range of positions"
        remedy = "give shorter sequences, or describe the model with more"
        raise refusal("model", rule, x.size(1), remedy)
    positions = torch.arange(x.size(1), device=x.device).expand(x.size(0), -1)  # [B,S]
    coordinates, first = coordinates_at(model, positions), torch.zeros_like(positions[:, 0])
    places = TokenPlaces(positions, coordinates, positions, first)
    output: Tensor = model(x, places, empty_states(model, x))[0]
    return output


def exact_pass(
    model: Any,
    inputs: np.ndarray,
    start: int,
    grid: np.ndarray | None = None,
    token_types: np.ndarray | None = None,
    encoder: np.ndarray | None = None,
) -> np.ndarray:
    """Compute one row without a cache in float64 numpy, to outputs [S,*].

    Args:
        model: block, stack or module that was read (export.read_module).
        inputs: token ids [S] int64, or hidden states [S,E].
        start: position of the first token.
        grid: coordinates [axes,S]; None as for a session.
        token_types: those [S] of a module that was read; None for all 0.
        encoder: keys and values of an encoder [Q,N], for a decoder that reads one.
    """
    positions = range(start, start + len(inputs))
    places: Sequence[Any] = positions
    if model.axes:
        default = [0] * len(positions) if model.coordinate_range else positions
        planes: list[Sequence[int]] = [positions] if model.with_position else []
        planes += [default] * model.axes if grid is None else list(grid)
        places = [tuple(int(number) for number in place) for place in zip(*planes, strict=True)]
    further = {"segments": token_types, "encoded": encoder}
    further = {name: value for name, value in further.items() if value is not None}
    return np.asarray(model.exact(inputs, positions, places, **further))
