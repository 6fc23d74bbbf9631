"""Layers without a softmax, or without attention."""

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.zoo.base import HEADS, SIZE, WIDTH, Attention, layer


@layer("retention")
class Retention(Attention):
    """Scores times a decay by distance."""

    def weights(self, scores: Tensor) -> Tensor:
        n = torch.arange(scores.size(-1))
        away = (n[:, None] - n[None, :]).float()
        gamma = 1 - 2.0 ** (-1.0 - torch.arange(HEADS))
        decay = torch.where(away >= 0, gamma[:, None, None] ** away.clamp(min=0), 0.0)
        return scores * decay


@layer("retention-normalized")
class RetentionNormalized(Retention):
    """Divided by the sum of a row, which is at least 1."""

    def weights(self, scores: Tensor) -> Tensor:
        retained = super().weights(scores)
        return retained / retained.detach().abs().sum(dim=-1, keepdim=True).clamp(min=1)


@layer("mean-of-earlier")
class MeanOfEarlier(nn.Module):
    """The mean of all earlier tokens, by a triangle divided by its sums."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tril(torch.ones(x.size(1), x.size(1)))
        return self.out((weights / weights.sum(1, keepdim=True)) @ x)


@layer("mean-by-cumsum", lambda x: x.cumsum(1) / torch.arange(1, x.size(1) + 1).view(1, -1, 1))
@layer("largest-of-earlier", lambda x: x.cummax(1).values)
class Totals(nn.Module):
    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.of = nn.Linear(WIDTH, WIDTH), of

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.of(x))


@layer("linear-masked")
class LinearMasked(Attention):
    """Products of positive features, masked by 0."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        scores = scores.tril()
        return (scores @ v) / (scores.sum(dim=-1, keepdim=True) + 1e-6)


@layer("linear-cumsum")
class LinearCumsum(Attention):
    """Sums of outer products of keys and values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(dim=2)
        total = torch.einsum("bhtd,bhtd->bht", q, k.cumsum(dim=2))
        return torch.einsum("bhtd,bhtde->bhte", q, sums) / total.unsqueeze(-1)


@layer("forget-gates")
class ForgetGates(Attention):
    """The bias of a pair is the sum of the gates of tokens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        self.sums = F.logsigmoid(self.gate(x)).transpose(1, 2).cumsum(dim=-1)
        return super().forward(x)

    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores + self.sums[..., :, None] - self.sums[..., None, :])


@layer("forget-gates-of-keys")
class ForgetGatesOfKeys(ForgetGates):
    """The same sums from the end, of a row of gates for each query."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        gates = self.sums.diff(dim=-1, prepend=torch.zeros_like(self.sums[..., :1]))
        gates = gates[..., None, :].repeat(1, 1, scores.size(2), 1).masked_fill(~seen, 0)
        return Attention.weights(self, scores + gates.flip(-1).cumsum(-1).flip(-1) - gates)


@layer("gated-recurrence")
class GatedRecurrence(nn.Module):
    """A gated sum of earlier values, computed for all tokens in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_and_gate, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.hidden_and_gate(x).chunk(2, dim=-1)
        kept = (-F.softplus(gate)).cumsum(dim=1)
        added = -F.softplus(-gate) + torch.where(
            hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden)
        )
        return self.out((kept + (added - kept).logcumsumexp(dim=1)).exp())


@layer("convolution-cut")
class ConvolutionCut(nn.Module):
    """A convolution padded on both sides and cut to the length, with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.project(x).chunk(2, dim=-1)
        y = self.conv1d(x.transpose(1, 2))[:, :, : x.size(1)].transpose(1, 2)
        return self.out(F.silu(y) * F.silu(z))


@layer("convolution-dilated")
class ConvolutionDilated(nn.Module):
    """A convolution whose second tap is 33 tokens before, and a shift by 25."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 2, dilation=33)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1d(F.pad(x.transpose(1, 2), (33, 0))).transpose(1, 2)
        return F.relu(y) + F.pad(x, (0, 0, 25, 0))[:, : x.size(1)]


@layer("convolution-before-attention", hidden=True)
class ConvolutionBeforeAttention(Attention):
    """A convolution of three tokens on queries, keys and values of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(SIZE, SIZE, 3, padding=2, groups=SIZE) for _ in range(3)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (
            convolution(t.reshape(-1, *t.shape[2:]).mT)[..., :-2].mT.reshape(t.shape)
            for convolution, t in zip(self.convolutions, (q, k, v), strict=True)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@layer("shift-by-cat", False)
@layer("shift-by-pad", True)
class Shift(nn.Module):
    """Each token is mixed with the one before it, then a squared ReLU and a gate."""

    def __init__(self, by_pad: bool) -> None:
        super().__init__()
        self.mix, self.by_pad = nn.Parameter(torch.rand(2, 1, WIDTH)), by_pad
        self.pad = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.gate = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.by_pad:
            before = self.pad(x)
        else:
            before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        key, gate = (x * m + before * (1 - m) for m in self.mix)
        return torch.sigmoid(self.gate(gate)) * self.value(torch.relu(self.key(key)) ** 2)
