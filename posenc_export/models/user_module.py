"""Support for a user's own torch.nn.Module around one block or stack of this package."""

import copy
from typing import Any, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings import PositionEncoding
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import HIDDEN_STATES, ModuleConfig, StackConfig
from posenc_export.models.config_json import to_json, widest
from posenc_export.models.stack import Stack, Text
from posenc_export.models.user_module_check import (
    LENGTH,
    Formula,
    Inner,
    Rows,
    only_inner,
    outputs_of,
)
from posenc_export.models.whole_pass import check_dtype, coordinates_at, whole_pass
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.shared.refusal import refusal


class OwnModule(torch.nn.Module):
    """A user's own module around one AttentionBlock or Stack.

    The module's `forward` takes x and the further arguments of the block. It calls the block once
    and passes these arguments on unchanged. It returns an output [B,S,N] and the states from the
    block. Layers of the module outside the block must act on each token separately, as norms and
    linear layers do. Layers that mix tokens would need a state between calls and are refused.

    Args:
        module: a module with float32 weights that contains one AttentionBlock or Stack.
        vocabulary: number of token ids, if x is token ids [B,S]. If neither vocabulary nor width is
            given, x is what the block or stack takes.
        width: width of x, if x is hidden states [B,S,width].

    Raises:
        ValueError: not exactly one block or stack, weights in another dtype, a forward of another
            form, layers that mix tokens, a stack with segments.
    """

    __jit_unused_properties__ = ["token_encoding"]
    __jit_ignored_attributes__ = ["config", "source", "text"]

    def __init__(
        self, module: torch.nn.Module, vocabulary: Optional[int] = None, width: Optional[int] = None
    ) -> None:
        super().__init__()
        self.where = f"own module {type(module).__qualname__}"
        self.module, self.training = module, module.training
        inner = self.inner()
        self._check(inner, vocabulary, width)
        self.axes, self.coordinate_range = inner.axes, inner.coordinate_range
        self.with_position, self.embed_states = inner.with_position, inner.embed_states
        self.source: dict = {}
        self.text = inner.text if isinstance(inner, Stack) else Text()
        if vocabulary is None and width is None:
            ids = inner.config.tokens.vocabulary if isinstance(inner, Stack) else 0
            vocabulary, width = (ids, None) if ids else (None, inner.config.width)
        self.vocabulary, self.width = vocabulary or 0, width or 0
        trial = copy.deepcopy(module).eval() if module.training else module
        outputs = outputs_of(self.where, trial, self.vocabulary, self.width)
        self.config = ModuleConfig(
            name=f"{type(module).__module__}.{type(module).__qualname__}",
            inside=to_json(inner.config),
            width=self.width,
            tokens={"vocabulary": vocabulary, "segments": 0} if vocabulary else {},
            outputs=outputs,
            max_positions=inner.config.max_positions,
        )
        self.exact_dtype = "float64"
        self.exact_dtype = self._exact_dtype()
        self._check_tokens_separate()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call `forward`; with x alone, whole sequences at positions 0 .. S-1 (whole_pass)."""
        if len(arguments) == 1 and not named:
            return whole_pass(self, *arguments)
        return super().__call__(*arguments, **named)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        coordinates: Tensor,
        key_positions: Tensor,
        write_index: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,width], others as AttentionBlock, to [B,S,N] and new states."""
        y, present = self.module(x, positions, coordinates, key_positions, write_index, states)
        return y, present

    @torch.jit.unused
    def inner(self) -> Inner:
        """Return the block or stack inside the module."""
        return only_inner(self.module, self.where)

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """Return the attention of each layer."""
        return list(self.inner().attentions())

    @property
    def token_encoding(self) -> PositionEncoding:
        """Token encoding of the block or stack."""
        return self.inner().token_encoding

    @torch.jit.unused
    def own_weights(self) -> List[Tensor]:
        """Return the weights of the module outside the block or stack."""
        inside = {id(weight) for weight in self.inner().parameters()}
        return [weight for weight in self.parameters() if id(weight) not in inside]

    @torch.jit.unused
    def extent(self) -> Tuple[int, int]:
        """Return the depth, and the longest reduction in it. Tolerances depend on both."""
        own = {id(weight): weight for weight in self.own_weights()}
        ids = [{id(weight) for weight in part.parameters(recurse=False)} for part in self.modules()]
        layers = sum(bool(own.keys() & weights) for weights in ids)
        sums = [weight.numel() // weight.size(0) for weight in own.values() if weight.dim() > 1]
        return len(self.attentions()) + layers, max([widest(self.inner().config), *sums])

    @torch.jit.unused
    def exact(
        self,
        x: np.ndarray,
        positions: range,
        places: Sequence[Any],
        segments: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """One row x [n] or [n,width] to [n,N]: block in float64, other layers in `exact_dtype`."""
        inner, index = self.inner(), torch.tensor(list(positions))[None]
        coordinates = torch.tensor(list(places)).T[:, None] if self.axes else index

        def rows(row: np.ndarray) -> np.ndarray:
            return np.asarray(inner.exact(row, positions, places))

        return self._around(rows, x, index, coordinates)

    def _around(self, rows: Rows, x: np.ndarray, index: Tensor, coordinates: Tensor) -> np.ndarray:
        """Run the module on one row at positions [1,n], with `rows` in place of its block."""
        inner, dtype = self.inner(), getattr(torch, self.exact_dtype)
        replaced = copy.deepcopy(self.module, {id(inner): Formula(inner, rows, dtype)})
        around, row = replaced.to(dtype).eval(), torch.from_numpy(np.array(x))[None]
        row = row if self.vocabulary else row.to(dtype)
        with torch.no_grad():
            output, _ = around(row, index, coordinates, index, torch.zeros_like(index[:, 0]), [])
        return np.asarray(output[0].double().numpy())

    def _exact_dtype(self) -> str:
        try:
            self._each_token(slice(0, 1))
        except RuntimeError:  # raised by torch when dtypes do not match
            return "float32"
        return "float64"

    def _check_tokens_separate(self) -> None:
        """Check that layers outside the block do not mix tokens."""
        together = self._each_token(slice(None))
        alone = np.concatenate([self._each_token(slice(n, n + 1)) for n in range(LENGTH)])
        if not worst_error(alone, together) <= tolerance("float32", *self.extent()):
            rule = "layers outside the block to act on each token separately"
            remedy = "remove layers that mix tokens, such as convolutions and means over tokens"
            raise self._error(rule, "an output that depends on other tokens", remedy)

    def _each_token(self, cut: slice) -> np.ndarray:
        """Run the module on a slice of test tokens, with a function in place of the block."""
        config, numbers = self.inner().config, np.arange(1, LENGTH + 1)
        width = config.width
        if isinstance(config, StackConfig) and config.head is not None:
            width = config.tokens.vocabulary
        x = np.cos(np.outer(numbers, np.arange(1, self.width + 1)))
        if self.vocabulary:
            x = (numbers - 1) % self.vocabulary
        index = torch.arange(LENGTH)[None, cut].clamp(max=config.max_positions - 1)
        coordinates = coordinates_at(self, index)

        def wave(row: np.ndarray) -> np.ndarray:
            return row if row.ndim > 1 else np.sin(np.outer(row + 1, np.arange(1, width + 1)))

        return self._around(wave, x[cut], index, coordinates)

    def _check(self, inner: Inner, vocabulary: Optional[int], width: Optional[int]) -> None:
        if isinstance(inner, Stack):
            types, stack = inner.segments, "export the Stack itself"
            if types:
                raise self._error("a Stack without segments", f"{types} token types", stack)
            paired = inner.config.key_values is not None or any(inner.reads_encoder)
            if paired or _converts_features(inner):
                got = "the encoder or decoder of a pair"
                raise self._error("a Stack of a single model", got, stack)
        if vocabulary is not None and width is not None:
            remedy = "give vocabulary for token ids or width for hidden states"
            raise self._error("vocabulary or width", "both", remedy)
        for name, size in (("vocabulary", vocabulary), ("width", width)):
            if size is not None and size < 1:
                raise self._error(f"{name} of at least 1", size, "give its size")
        for name, value in self.module.named_parameters():
            if value.is_floating_point() and value.dtype != torch.float32:
                got = f"{str(value.dtype).removeprefix('torch.')} in {name}"
                remedy = "call .float() and pass the artefact's dtype to export"
                raise self._error("float32 weights", got, remedy)

    def _error(self, rule: str, got: Any, remedy: str) -> ValueError:
        return refusal(self.where, rule, got, remedy)


def _converts_features(inner: Stack) -> bool:
    features = inner.config.tokens.features
    return features is not None and features.get("name") != HIDDEN_STATES


Model = Union[Stack, AttentionBlock, OwnModule]


def as_model(model: Any) -> Model:
    """Return a model of this package unchanged, and wrap any other module in OwnModule. ValueError:
    no module, weights in float64, or OwnModule refuses it.
    """
    if isinstance(model, (Stack, AttentionBlock, OwnModule)):
        check_dtype(model)
        return model
    if not isinstance(model, torch.nn.Module):
        rule = "a Stack, an AttentionBlock or a torch.nn.Module around one"
        raise refusal("export", rule, type(model).__name__, "pass such a module")
    return OwnModule(model)


def inner_of(model: Model) -> Inner:
    """Return the block or stack that a model is or contains."""
    return model.inner() if isinstance(model, OwnModule) else model
