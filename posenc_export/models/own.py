"""A torch.nn.Module of the user's own around one block or stack of this package."""

import copy
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export.encodings import PositionEncoding
from posenc_export.models.block import AttentionBlock
from posenc_export.models.config import ModuleConfig, StackConfig
from posenc_export.models.config_json import to_json, widest
from posenc_export.models.stack import Stack, Text
from posenc_export.models.trial import LENGTH, Inner, Trial, only_inner
from posenc_export.numerics import tolerance, worst_error

Rows = Callable[[np.ndarray], np.ndarray]


class OwnModule(torch.nn.Module):
    """A module of the user's own around one AttentionBlock or Stack.

    Its `forward` takes x and then what the block takes, hands that to the block as it came, once, and gives its output [B,S,N] and the states of the block.
    Its own layers act on each token alone, as norms and linear layers do. A layer that mixes tokens would need a state from call to call, and is refused.

    Args:
        module: float32, with one AttentionBlock or Stack somewhere in it.
        vocabulary: x is token ids [B,S] below it. Where neither it nor width is given, x is what the block or stack takes.
        width: x is hidden states [B,S,width].

    Raises:
        ValueError: another number of blocks and stacks, weights of another dtype, a forward of another form, layers that mix tokens, a stack with segments.
    """

    __jit_unused_properties__ = ["token_encoding"]
    __jit_ignored_attributes__ = ["config", "source", "text"]

    def __init__(self, module: torch.nn.Module, vocabulary: Optional[int] = None, width: Optional[int] = None) -> None:
        super().__init__()
        self.where = f"own module {type(module).__qualname__}"
        self.module, self.training = module, module.training
        inner = self.inner()
        self._check(inner, vocabulary, width)
        self.axes, self.embed_states = inner.axes, inner.embed_states
        self.source: dict = {}
        self.text = inner.text if isinstance(inner, Stack) else Text()
        if vocabulary is None and width is None:
            vocabulary, width = (inner.config.tokens.vocabulary, None) if isinstance(inner, Stack) else (None, inner.config.width)
        self.vocabulary, self.width = vocabulary or 0, width or 0
        outputs = Trial(self.where, copy.deepcopy(module).eval() if module.training else module, self.vocabulary, self.width).outputs()
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
        self._check_alone()

    def forward(
        self, x: Tensor, positions: Tensor, coordinates: Tensor, key_positions: Tensor, write_index: Tensor, states: List[Tensor]
    ) -> Tuple[Tensor, List[Tensor]]:
        """x [B,S] int64 or [B,S,width], the rest as AttentionBlock.forward, to output [B,S,N] and new states."""
        return self.module(x, positions, coordinates, key_positions, write_index, states)  # type: ignore[no-any-return]

    @torch.jit.unused
    def inner(self) -> Inner:
        """The block or stack in the module.

        Raises:
            ValueError: none, or several.
        """
        return only_inner(self.module, self.where)

    @torch.jit.unused
    def attentions(self) -> List[Any]:
        """The attention of each layer."""
        return list(self.inner().attentions())  # type: ignore[operator]

    @property
    def token_encoding(self) -> PositionEncoding:
        """What acts on tokens in the block or stack."""
        return self.inner().token_encoding

    @torch.jit.unused
    def own_weights(self) -> List[Tensor]:
        """Weights of the module that the block or stack does not have."""
        inside = {id(weight) for weight in self.inner().parameters()}
        return [weight for weight in self.parameters() if id(weight) not in inside]

    @torch.jit.unused
    def extent(self) -> Tuple[int, int]:
        """How many layers with weights a value passes, and the longest sum that they form."""
        own = {id(weight): weight for weight in self.own_weights()}
        layers = [part for part in self.modules() if any(id(weight) in own for weight in part.parameters(recurse=False))]
        sums = [weight.numel() // weight.size(0) for weight in own.values() if weight.dim() > 1]
        return len(self.attentions()) + len(layers), max([widest(self.inner().config), *sums])

    @torch.jit.unused
    def exact(self, x: np.ndarray, positions: range, places: Sequence[Any], segments: Optional[np.ndarray] = None) -> np.ndarray:
        """One row x [n] or [n,width] at positions and coordinates to [n,N]: the block by its formula in float64, the module around it in `exact_dtype`."""
        inner, index = self.inner(), torch.tensor(list(positions))[None]
        axes = np.broadcast_to(np.array(list(places)).T, (self.axes, len(positions)))  # one number for all axes where there is no grid
        coordinates = torch.from_numpy(axes.copy())[:, None] if self.axes else index
        return self._around(lambda row: np.asarray(inner.exact(row, positions, places)), x, index, coordinates)

    def _around(self, rows: Rows, x: np.ndarray, index: Tensor, coordinates: Tensor) -> np.ndarray:
        """The module with `rows` in place of its block, on one row x at positions index [1,n], in `exact_dtype`."""
        inner, dtype = self.inner(), getattr(torch, self.exact_dtype)
        around = copy.deepcopy(self.module, {id(inner): Formula(inner, rows, dtype)}).to(dtype).eval()
        row = torch.from_numpy(np.array(x))[None]
        with torch.no_grad():
            output, _ = around(row if self.vocabulary else row.to(dtype), index, coordinates, index, torch.zeros_like(index[:, 0]), [])
        return np.asarray(output[0].double().numpy())

    def _exact_dtype(self) -> str:
        """float64 where the module runs in it, else float32."""
        try:
            self._each_token(slice(0, 1))
        except RuntimeError:  # what torch raises where dtypes meet that do not agree
            return "float32"
        return "float64"

    def _check_alone(self) -> None:
        """Refuse own layers that make of a token what depends on others."""
        together = self._each_token(slice(None))
        alone = np.concatenate([self._each_token(slice(n, n + 1)) for n in range(LENGTH)])
        if not worst_error(alone, together) <= tolerance("float32", *self.extent()):
            rule = "expected its own layers to act on each token alone, got an output that changes with the tokens beside it"
            raise ValueError(f"{self.where}: {rule}; leave out what mixes tokens, convolutions and means over them for example")

    def _each_token(self, cut: slice) -> np.ndarray:
        """Tokens of a trial through the own layers, with numbers of each token alone in place of the block."""
        config, tokens = self.inner().config, np.arange(LENGTH) % max(self.vocabulary, 1)
        width = config.tokens.vocabulary if isinstance(config, StackConfig) and config.head is not None else config.width
        x = tokens if self.vocabulary else np.cos(np.outer(np.arange(1, LENGTH + 1), np.arange(1, self.width + 1)))
        index = torch.arange(LENGTH)[None, cut].clamp(max=config.max_positions - 1)
        coordinates = index.expand(self.axes, -1, -1) if self.axes else index
        return self._around(lambda row: row if row.ndim > 1 else np.sin(np.outer(row + 1, np.arange(1, width + 1))), x[cut], index, coordinates)

    def _check(self, inner: Inner, vocabulary: Optional[int], width: Optional[int]) -> None:
        if isinstance(inner, Stack) and inner.segments:
            raise ValueError(f"{self.where}: expected a Stack without segments, got {inner.segments} token types; export the Stack itself")
        if isinstance(inner, Stack) and (inner.config.tokens.features is not None or inner.config.key_values is not None or any(inner.reads_encoder)):
            raise ValueError(f"{self.where}: expected a Stack alone, got a part of an encoder and decoder; export the Stack itself")
        if vocabulary is not None and width is not None:
            raise ValueError(f"{self.where}: expected vocabulary or width, got both; x is token ids or hidden states")
        for name, size in (("vocabulary", vocabulary), ("width", width)):
            if size is not None and size < 1:
                raise ValueError(f"{self.where}: expected {name} of at least 1, got {size}")
        other = next((name for name, value in self.module.named_parameters() if value.is_floating_point() and value.dtype != torch.float32), None)
        if other is not None:
            found = str(self.module.get_parameter(other).dtype).removeprefix("torch.")
            raise ValueError(f"{self.where}: expected float32 weights, got {found} in {other}; call .float(), and give the artefact's dtype to export")


class Formula(torch.nn.Module):
    """Numbers for each token of a row in place of what a block or stack gives, in a copy of the module.

    Args:
        inner: the block or stack, which stays as it is.
        rows: x [n] or [n,E] float64 to [n,N].
        dtype: of what it gives.
    """

    def __init__(self, inner: Inner, rows: Rows, dtype: torch.dtype) -> None:
        super().__init__()
        self.kept = (inner, rows, dtype)  # a tuple: no submodule, so that casts of the copy leave it alone

    def __getattr__(self, name: str) -> Any:
        """What a module reads of its block beside calling it, a tied table for one."""
        kept = self.__dict__.get("kept")
        return getattr(kept[0], name) if kept and hasattr(kept[0], name) else super().__getattr__(name)

    def forward(self, x: Tensor, *where: Any) -> Tuple[Tensor, List[Tensor]]:
        """x [1,n] int64 or [1,n,E] to outputs [1,n,N]; there are no states."""
        _, rows, dtype = self.kept
        row = x[0].detach()
        return torch.from_numpy(rows(row.numpy() if x.dim() == 2 else row.double().numpy()))[None].to(dtype), []


Model = Union[Stack, AttentionBlock, OwnModule]


def as_model(model: Any) -> Model:
    """A model of this package as it is, another module as an OwnModule.

    Raises:
        ValueError: what is no module, or a module that OwnModule refuses.
    """
    if isinstance(model, (Stack, AttentionBlock, OwnModule)):
        return model
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"export: expected a Stack, an AttentionBlock or a torch.nn.Module around one, got {type(model).__name__}; give such a module")
    return OwnModule(model)


def inner_of(model: Model) -> Inner:
    """The block or stack that a model is or has in it."""
    return model.inner() if isinstance(model, OwnModule) else model
