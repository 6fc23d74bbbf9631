"""What a model reads in place of token ids: hidden states, or features such as a spectrogram."""

from typing import Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64
from posenc_export.models.parts.activations import activation as activation_of
from posenc_export.models.parts.norms import Identity, LayerNorm
from posenc_export.shared.refusal import refusal


class HiddenStates(torch.nn.Module):
    """Hidden states of width E as they are, for a model behind other layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.size = width

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [B,S,E]."""
        return x

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Return one row x [n,E] in float64."""
        return x.astype(np.float64)


class Projected(torch.nn.Module):
    """W norm(x) + b of features of `size` numbers. epsilon: of LayerNorm; None for no norm."""

    def __init__(self, width: int, size: int, epsilon: Optional[float] = None) -> None:
        super().__init__()
        self.size = size
        self.norm = Identity() if epsilon is None else LayerNorm(size, epsilon)
        self.projection = torch.nn.Linear(size, width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,size] to [B,S,E]."""
        return self.projection(self.norm(x))

    def exact(self, x: np.ndarray) -> np.ndarray:
        """One row x [n,size] to [n,E], float64."""
        return float64.linear(self.projection, self.norm.exact(x.astype(np.float64)))


class Convolutions(torch.nn.Module):
    """Two convolutions over time, kernel 3: act(conv x), then act(conv x) with stride 2 (Radford et
    al. 2022, Whisper, 2.2).

    The features of a token are two consecutive frames of C numbers. Frames before the first and
    after the last token are 0.

    Args:
        width: model width E.
        channels: numbers C in a frame, for example mel bins.
        activation: key of ACTIVATIONS in parts/activations.py.
    """

    def __init__(self, width: int, channels: int, activation: str = "gelu") -> None:
        super().__init__()
        if channels < 1:
            raise refusal("features convolutions", "channels to be at least 1", channels)
        self.channels, self.size = channels, 2 * channels
        self.first = torch.nn.Conv1d(channels, width, kernel_size=3, padding=1)
        self.second = torch.nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.activation = activation_of(activation)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B,S,2*C], positions [B,S] int64 with -1 at padding to [B,S,E]."""
        inside = positions.ge(0).to(x.dtype).unsqueeze(2).expand(-1, -1, 2).flatten(1).unsqueeze(1)
        frames = x.unflatten(2, [2, self.channels]).flatten(1, 2).transpose(1, 2)  # [B,C,2*S]
        # Else the bias at padding would reach the last token.
        between = self.activation(self.first(frames * inside)) * inside
        return self.activation(self.second(between)).transpose(1, 2)  # [B,S,E]

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute one row x [n,2*C] to [n,E], float64, one frame at a time."""
        frames = x.astype(np.float64).reshape(2 * len(x), self.channels)
        between = self._exact(self.first, frames, range(len(frames)))
        return self._exact(self.second, between, range(0, len(frames), 2))

    def _exact(self, layer: torch.nn.Conv1d, rows: np.ndarray, centres: range) -> np.ndarray:
        weight, bias = float64.numbers(layer.weight), float64.numbers(layer.bias)  # [out,in,3]
        rows_out = []
        for centre in centres:
            taps = [tap for tap in range(3) if 0 <= centre + tap - 1 < len(rows)]
            products = (weight[:, :, tap] @ rows[centre + tap - 1] for tap in taps)
            rows_out.append(sum(products) + bias)
        return np.asarray(self.activation.exact(np.stack(rows_out)))  # type: ignore[operator]
