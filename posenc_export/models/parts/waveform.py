"""Convolutions that read sound (Baevski et al. 2020, wav2vec 2.0, 2)."""

import math
from typing import Any, List, Literal, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64
from posenc_export.models.parts.activations import activation as activation_of
from posenc_export.models.parts.features import Projected
from posenc_export.models.parts.norms import Identity, LayerNorm
from posenc_export.shared.refusal import refusal

LONGEST = 1 << 16  # channels, samples of a kernel and of a step
WINDOW = 1 << 20  # samples of a token
GAPS = "a kernel below its stride cannot be exported with this norm; choose norm layer"


class OverChannels(LayerNorm):
    """LayerNorm over the channels of each output of a convolution."""

    def forward(self, y: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """y [B*S,C,n], positions [B,S] to [B*S,C,n]."""
        size, weight, bias = self.normalized_shape, self.weight, self.bias
        y = torch.nn.functional.layer_norm(y.transpose(1, 2), size, weight, bias, self.eps)
        return y.transpose(1, 2)

    def exact(self, y: np.ndarray) -> np.ndarray:
        """y [S,C,n], float64."""
        return super().exact(y.swapaxes(1, 2)).swapaxes(1, 2)


class OverTime(LayerNorm):
    """w_c (y_c - mean y_c) / sqrt(var y_c + epsilon) + b_c over all outputs of a row, for each
    channel c. The first `own` outputs of a token count, and all outputs of the last one, since the
    others belong to the next token, too.
    """

    def __init__(self, size: int, own: int) -> None:
        super().__init__(size)
        self.own = own

    def forward(self, y: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """y [B*S,C,n], positions [B,S] with -1 at padding to [B*S,C,n]."""
        inside = positions.ge(0)
        number = inside.long().cumsum(1)
        last = number.eq(number.amax(1, keepdim=True)).unsqueeze(2)  # [B,S,1]
        own = torch.arange(y.size(2), device=y.device).lt(self.own)
        counted = (inside.unsqueeze(2) & (own | last)).float().unsqueeze(2)  # [B,S,1,n]
        wide = y.float().view(positions.size(0), positions.size(1), y.size(1), y.size(2))
        count = counted.sum(3, keepdim=True).sum(1, keepdim=True).clamp(min=1.0)  # [B,1,1,1]
        mean = (wide * counted).sum(3, keepdim=True).sum(1, keepdim=True) / count
        centred = wide - mean
        squares = (centred.square() * counted).sum(3, keepdim=True).sum(1, keepdim=True)
        scaled = (centred / (squares / count + self.eps).sqrt()).flatten(0, 1)
        return (scaled * self.weight.unsqueeze(1) + self.bias.unsqueeze(1)).to(y.dtype)

    def exact(self, y: np.ndarray) -> np.ndarray:
        """y [S,C,n], float64."""
        row = np.concatenate([*y[:-1, :, : self.own], y[-1]], axis=1)  # [C,outputs of the row]
        mean, deviation = row.mean(1), np.sqrt(row.var(1) + self.eps)
        scaled = (y.swapaxes(1, 2) - mean) / deviation
        return (scaled * float64.numbers(self.weight) + float64.numbers(self.bias)).swapaxes(1, 2)


class NoNorm(Identity):
    """y unchanged."""

    def forward(self, y: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return y


class Convolution(torch.nn.Module):
    """act(norm(conv x)) without padding."""

    def __init__(self, convolution: torch.nn.Conv1d, norm: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.convolution, self.norm, self.activation = convolution, norm, activation_of(name)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B*S,C,n], positions [B,S]."""
        return self.activation(self.norm(self.convolution(x), positions))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [S,C,n], float64."""
        weight, step = float64.numbers(self.convolution.weight), self.convolution.stride[0]
        windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2], 2)[:, :, ::step]
        products = np.tensordot(windows, weight, ([1, 3], [1, 2]))  # [S,n,C]
        outputs = (products + float64.numbers(self.convolution.bias)).swapaxes(1, 2)
        normed = self.norm.exact(outputs)  # type: ignore[operator]
        return np.asarray(self.activation.exact(normed))  # type: ignore[operator]


class Waveform(Projected):
    """Convolutions over samples of sound, then W norm(x) + b.

    The features of token t are the samples that it depends on, from sample t * step on, where step
    is the product of all strides; neighbours share samples. Other samples do not exist: those after
    the window of the last token of a row do not count in a norm over time.

    Args:
        width: model width E.
        convolutions: [channels, kernel, stride] of each.
        norm: "layer" for a norm over channels after each convolution, "group" for a norm over time
            after the first one.
        bias: whether convolutions have a bias.
        activation: key of ACTIVATIONS in parts/activations.py.
        epsilon: of the norm before W; None for no norm.

    Raises:
        ValueError: no convolutions, sizes that are not whole numbers from 1 to 65536, a window of
            more than 2^20 samples, or with gaps before the next one; with norm "group", outputs of
            the first convolution that no token reads.
    """

    def __init__(
        self,
        width: int,
        convolutions: Sequence[Sequence[int]],
        norm: Literal["layer", "group"] = "layer",
        bias: bool = False,
        activation: str = "gelu",
        epsilon: Optional[float] = None,
    ) -> None:
        size, step = window(convolutions)
        super().__init__(width, convolutions[-1][0], epsilon)
        self.size = size
        layers: List[Convolution] = []
        read = 1
        for channels, kernel, stride in convolutions:
            norms: Any = OverChannels(channels) if norm == "layer" else NoNorm()
            if norm == "group" and not layers:
                own, outputs = step // stride, (size - kernel) // stride + 1
                if outputs < own:
                    rule = f"tokens that read all {own} outputs of the first convolution, over"
                    rule = f"{rule} which norm group averages,"
                    got, remedy = f"{outputs} with convolutions {convolutions!r:.120}", GAPS
                    raise refusal("features waveform", rule, got, remedy)
                norms = OverTime(channels, own)
            built = torch.nn.Conv1d(read, channels, kernel, stride, bias=bias)
            layers.append(Convolution(built, norms, activation))
            read = channels
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,size], positions [B,S] int64 with -1 at padding to [B,S,E]."""
        y = x.flatten(0, 1).unsqueeze(1)  # [B*S,1,size]
        for layer in self.layers:
            y = layer(y, positions)
        return self.projection(self.norm(y.view(x.size(0), x.size(1), y.size(1))))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute one row x [n,size] to [n,E], float64."""
        y = x.astype(np.float64)[:, None]
        for layer in self.layers:
            y = layer.exact(y)  # type: ignore[operator]
        return super().exact(y[:, :, 0])


def window(convolutions: Sequence[Sequence[int]]) -> Tuple[int, int]:
    """Return the number of samples that a token reads, and the number of samples from the first
    sample of a token to that of the next. ValueError: as Waveform.
    """
    rule = f"convolutions to be [channels, kernel, stride] of 1 to {LONGEST} each"
    sizes = [size for sizes in convolutions for size in sizes]
    whole = all(type(size) is int and 1 <= size <= LONGEST for size in sizes)
    if not convolutions or not whole or any(len(sizes) != 3 for sizes in convolutions):
        raise refusal("features waveform", rule, f"{convolutions!r:.80}")
    size, step = 1, math.prod(stride for *_, stride in convolutions)
    for _, kernel, stride in reversed(convolutions):
        size = (size - 1) * stride + kernel
    if not step <= size <= WINDOW:
        rule = f"windows of {step} samples, the product of strides, to {WINDOW} samples"
        raise refusal("features waveform", rule, size, "choose other kernels or strides")
    return size, step
