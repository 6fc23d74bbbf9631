"""Layers by how scores become weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.zoo.base import HEADS, SIZE, Attention, layer


@layer("softcap")
class Softcap(Attention):
    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(2.0 * torch.tanh(scores / 2.0))


@layer("sinks", hidden=True)
class Sinks(Attention):
    """A learned score of each head stands beside the keys and has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def weights(self, scores: Tensor) -> Tensor:
        B, H, T, _ = scores.shape
        scores = scores + torch.triu(scores.new_full((T, T), float("-inf")), diagonal=1)
        both = torch.cat((scores, self.sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)), dim=-1)
        both = both - both.max(dim=-1, keepdim=True).values
        return F.softmax(both, dim=-1)[..., :-1]


@layer("softmax-plus-one")
class SoftmaxPlusOne(Attention):
    """The denominator is larger by one, so that a head may attend to nothing."""

    def weights(self, scores: Tensor) -> Tensor:
        e = scores.exp() * torch.ones_like(scores).tril()
        return e / (1.0 + e.sum(dim=-1, keepdim=True))


@layer("renormalized")
class Renormalized(Attention):
    """The mask follows a softmax over all keys; what is left is divided by its sum."""

    def weights(self, scores: Tensor) -> Tensor:
        chances = scores.softmax(dim=-1) * torch.ones_like(scores[0, 0]).tril()
        return chances / chances.sum(dim=-1, keepdim=True)


@layer("exp-and-sum")
class ExpAndSum(Attention):
    def weights(self, scores: Tensor) -> Tensor:
        T = scores.size(-1)
        scores = scores.masked_fill(torch.arange(T)[:, None] < torch.arange(T), float("-inf"))
        e = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        return e / e.sum(dim=-1, keepdim=True)


@layer("talking-heads")
class TalkingHeads(Attention):
    """Scores are mixed over heads before the softmax, weights after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.randn(HEADS, HEADS) * 0.5) for _ in range(2))

    def weights(self, scores: Tensor) -> Tensor:
        chances = super().weights(torch.einsum("bhij,hg->bgij", scores, self.before))
        return torch.einsum("bhij,hg->bgij", chances, self.after)


@layer("difference")
class Difference(Attention):
    """Two softmaxes of half of the entries, of which one is taken from the other, then a norm."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        y = (self.weights(q1 @ k1.mT / 2) - 0.4 * self.weights(q2 @ k2.mT / 2)) @ v
        return F.rms_norm(y, (SIZE,)) * 0.6


@layer("scale-by-position")
class ScaleByPosition(Attention):
    """Scores grow with the logarithm of the query's position."""

    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores * torch.arange(2, scores.size(-1) + 2).log()[:, None])


@layer("stick-breaking")
class StickBreaking(Attention):
    """Each key takes its share of what later keys leave, summed from the end."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        left = F.logsigmoid(-scores).masked_fill(~seen, 0)
        behind = left.flip(-1).cumsum(-1).flip(-1) - left
        return (F.logsigmoid(scores) + behind).exp().masked_fill(~seen, 0)


@layer("contextual-positions")
class ContextualPositions(Attention):
    """A table at the sum of gates of a key and all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(SIZE, 12) * 0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~torch.ones(q.size(2), q.size(2)).tril().bool(), -torch.inf)
        counts = scores.sigmoid().flip(-1).cumsum(dim=-1).flip(-1).clamp(max=11)
        below, above, rows = counts.floor(), counts.ceil(), q @ self.table
        between = rows.gather(-1, above.long()) - rows.gather(-1, below.long())
        bias = rows.gather(-1, below.long()) + (counts - below) * between
        return (scores + bias).softmax(dim=-1) @ v


@layer("sums-of-earlier-keys")
class SumsOfEarlierKeys(Attention):
    """Scores minus the mean of those of earlier keys."""

    def weights(self, scores: Tensor) -> Tensor:
        seen = torch.ones(scores.shape[-2:]).tril()
        count = torch.arange(1, scores.size(-1) + 1)
        return super().weights(scores - (scores * seen).cumsum(-1) / count)
