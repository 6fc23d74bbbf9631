"""Layers by how positions enter them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.reading.zoo.base import (
    HEADS,
    POSITIONS,
    SIZE,
    WIDTH,
    Attention,
    Rotated,
    angles,
    halves,
    layer,
    pairs,
    slopes,
)


@layer("rope-cut")
class RopeCut(Rotated):
    """Tables [N,D/2] as buffers, cut to the length; norms of queries and keys with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.register_buffer("cos", angles(POSITIONS).cos())
        self.register_buffer("sin", angles(POSITIONS).sin())

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[: q.size(2)], self.sin[: q.size(2)]
        return pairs(self.q_norm(q), cos, sin), pairs(self.k_norm(k), cos, sin)


@layer("rope-of-last-length")
class RopeOfLastLength(Rotated):
    """bfloat16 tables of the last length, kept as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seq_len_cached: int | None = None
        self.cos_cached = self.sin_cached = None

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q.shape[2] != self.seq_len_cached:
            self.seq_len_cached = q.shape[2]
            turns = angles(q.shape[2])
            self.cos_cached, self.sin_cached = turns.cos().bfloat16(), turns.sin().bfloat16()
        cos, sin = self.cos_cached[None, None], self.sin_cached[None, None]
        return halves(q, cos, sin), halves(k, cos, sin)


@layer("rope-grown")
class RopeGrown(Rotated):
    """Tables of an initial length, made again whenever a call is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.grow(4)

    def grow(self, length: int) -> None:
        turns = angles(length).repeat_interleave(2, dim=-1)
        self.register_buffer("cos", turns.cos(), persistent=False)
        self.register_buffer("sin", turns.sin(), persistent=False)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if q.size(2) > self.cos.size(0):
            self.grow(q.size(2))
        cos, sin = self.cos[: q.size(2)], self.sin[: q.size(2)]
        return self.turn(q, cos, sin), self.turn(k, cos, sin)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        beside = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)
        return x * cos + beside * sin


@layer("rope-no-autocast")
class RopeNoAutocast(Rotated):
    """Half of the entries, written in place, in a region without autocast; tables by no_grad."""

    @torch.no_grad()
    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        return angles(length, 4).cos(), angles(length, 4).sin()

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            cos, sin = self.tables(q.size(2))
            return self.turn(q.float(), cos, sin), self.turn(k.float(), cos, sin)

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = x.clone()
        y[..., 0:4:2] = x[..., 0:4:2] * cos - x[..., 1:4:2] * sin
        y[..., 1:4:2] = x[..., 1:4:2] * cos + x[..., 0:4:2] * sin
        return y


@layer("rope-of-values")
class RopeOfValues(Rotated):
    """Values are rotated too, and the output is turned back."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = angles(q.size(2)).cos(), angles(q.size(2)).sin()
        q, k, v = (halves(t, cos, sin) for t in (q, k, v))
        return halves(F.scaled_dot_product_attention(q, k, v, is_causal=True), cos, -sin)


@layer("xpos-centred")
class XposCentred(Rotated):
    """Tables of queries and of keys depend on the length, their product does not."""

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        T = q.size(2)
        cos, sin = angles(T).cos(), angles(T).sin()
        power = (torch.arange(T) - T // 2) / 32
        scale = ((torch.arange(0, SIZE, 2) / SIZE + 0.4) / 1.4) ** power[:, None]
        scale = torch.cat((scale, scale), dim=-1)
        return halves(q, cos, sin) * scale, halves(k, cos, sin) / scale


@layer("alibi-in-forward")
class AlibiInForward(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.size(2))
        bias = -(n[:, None] - n[None, :]).abs() * slopes()[:, None, None]
        mask = torch.full((q.size(2), q.size(2)), float("-inf")).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias + mask)


@layer("alibi-buffer")
class AlibiBuffer(Attention):
    """Bias and mask in one buffer [H,N,N], cut to the length."""

    def __init__(self) -> None:
        super().__init__()
        n = torch.arange(POSITIONS)
        bias = (n[None, :] - n[:, None]).float() * slopes()[:, None, None]
        self.register_buffer("bias", bias.masked_fill(n[None, :] > n[:, None], float("-inf")))

    def weights(self, scores: Tensor) -> Tensor:
        T = scores.size(-1)
        return torch.softmax(scores + self.bias[:, :T, :T], dim=-1)


@layer("alibi-of-keys")
class AlibiOfKeys(Attention):
    """A bias of the key's position alone, by a cumulative sum and baddbmm."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        there = torch.ones(B, T)
        bias = slopes()[:, None] * ((there.cumsum(dim=-1) - 1) * there)[:, None, :]
        q, k, v = (t.reshape(B * H, T, D) for t in (q, k, v))
        scores = bias.reshape(B * H, 1, T).baddbmm(q, k.mT, beta=1.0, alpha=1 / math.sqrt(D))
        later = torch.ones(T, T, dtype=torch.bool).triu(diagonal=1)
        scores = scores.view(B, H, T, T).masked_fill(later, torch.finfo(scores.dtype).min)
        return (F.softmax(scores, dim=-1).view(B * H, T, T) @ v).view(B, H, T, D)


@layer("alibi-beside-chunks")
class AlibiBesideChunks(Attention):
    """A bias by distance for two heads, chunks for the others, changed by a network of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2 * HEADS, HEADS)

    def weights(self, scores: Tensor) -> Tensor:
        n = torch.arange(scores.size(-1))
        chunks = torch.where(n[:, None] // 6 == n // 6, 0.0, -4.0).expand(2, -1, -1)
        bias = torch.cat(((n - n[:, None]) * slopes()[:2, None, None], chunks))
        both = torch.cat((scores, bias.expand_as(scores)), dim=1).permute(0, 2, 3, 1)
        return super().weights(scores + bias + F.silu(self.mlp(both)).permute(0, 3, 1, 2))


@layer("alibi-from-last-key")
class AlibiFromLastKey(Attention):
    """The bias counts from the last key: it depends on the length, the weights do not."""

    def weights(self, scores: Tensor) -> Tensor:
        T = scores.size(-1)
        return super().weights(scores + torch.arange(1 - T, 1) * slopes()[:, None, None])


@layer("t5-buckets")
class T5Buckets(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.relative_attention_bias = nn.Embedding(16, HEADS)

    def weights(self, scores: Tensor) -> Tensor:
        n = torch.arange(scores.size(-1))
        relative = -torch.min(n[None, :] - n[:, None], torch.zeros(1, dtype=torch.long))
        far = 8 + (torch.log(relative.float() / 8) / math.log(32 / 8) * 8).to(torch.long)
        buckets = torch.where(relative < 8, relative, torch.min(far, torch.full_like(far, 15)))
        bias = self.relative_attention_bias(buckets).permute(2, 0, 1).unsqueeze(0)
        return super().weights(scores * SIZE**0.5 + bias)


@layer("relative-table")
class RelativeTable(Attention):
    """A learned bias for each distance from -(N - 1) to N - 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * POSITIONS - 1, HEADS))
        n = torch.arange(POSITIONS)
        self.register_buffer("index", n[None, :] - n[:, None] + POSITIONS - 1)

    def weights(self, scores: Tensor) -> Tensor:
        T = scores.size(-1)
        bias = self.table[self.index[:T, :T].reshape(-1)].view(T, T, -1)
        return super().weights(scores + bias.permute(2, 0, 1).contiguous().unsqueeze(0))


@layer("bias-of-logarithm")
class BiasOfLogarithm(Attention):
    """A small network of the logarithm of the distance, divided by that of the query's position."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.threshold = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(4.0))
        self.mlp = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, HEADS))

    def weights(self, scores: Tensor) -> Tensor:
        n = torch.arange(scores.size(-1), dtype=torch.float)
        away = (n[:, None] - n[None, :]).clamp(min=0)
        top = torch.log(self.c.abs() * torch.maximum(n[:, None], self.threshold) + 1)
        bias = self.mlp((torch.log(self.c.abs() * away + 1) / top).unsqueeze(-1))
        return super().weights(scores + bias.permute(2, 0, 1)[None])


@layer("relative-keys-and-values")
class RelativeVectors(Attention):
    """Vectors by clipped distance in the scores and in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.of_keys, self.of_values = nn.Embedding(9, SIZE), nn.Embedding(9, SIZE)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.size(2))
        away = torch.clamp(n[None, :] - n[:, None], -4, 4) + 4
        scores = q @ k.mT + torch.einsum("bhid,ijd->bhij", q, self.of_keys(away))
        chances = self.weights(scores / math.sqrt(SIZE))
        return chances @ v + torch.einsum("bhij,ijd->bhid", chances, self.of_values(away))


@layer("disentangled")
class Disentangled(Attention):
    """Vectors by clipped distance beside queries and beside keys, with heads in rows (DeBERTa)."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(2, HEADS, 8, SIZE) * 0.5)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, n = q.size(0), torch.arange(q.size(2))
        away = (n[:, None] - n[None, :] + 4).clamp(0, 7).expand(rows * HEADS, -1, -1)
        q, k, of_keys, of_queries = (
            t.flatten(0, 1) for t in (q, k, *self.vectors[:, None].expand(-1, rows, -1, -1, -1))
        )
        scores = q @ k.mT + torch.bmm(q, of_keys.mT).gather(-1, away)
        scores = scores + torch.bmm(k, of_queries.mT).gather(-1, away.mT).transpose(-1, -2)
        return self.weights(scores.unflatten(0, (rows, HEADS)) / (3 * SIZE) ** 0.5) @ v


@layer("skewed")
class Skewed(Attention):
    """Scores by distance, shifted into place by a column of padding and a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Parameter(torch.randn(POSITIONS, SIZE))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, _ = q.shape
        by_distance = q @ self.distances[POSITIONS - T :].transpose(0, 1)
        shifted = F.pad(by_distance, (1, 0)).reshape(B, H, T + 1, T)[:, :, 1:]
        return self.weights((q @ k.mT + shifted) / math.sqrt(SIZE)) @ v


@layer("sinusoids-skewed")
class SinusoidsSkewed(Attention):
    """Sinusoids of the distance as keys, with two biases of the queries; tokens first."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(WIDTH, WIDTH, bias=False)
        self.u, self.v = (nn.Parameter(torch.randn(HEADS, SIZE) * 0.3) for _ in range(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (t.permute(2, 0, 1, 3) for t in (q, k))
        T, B, H, D = q.shape
        turns = torch.outer(torch.arange(T - 1, -1, -1.0), angles(2, WIDTH)[1])
        r = self.r(torch.cat((turns.sin(), turns.cos()), dim=-1)).view(T, H, D)
        content = torch.einsum("ibhd,jbhd->ijbh", q + self.u, k)
        position = torch.einsum("ibhd,jhd->ijbh", q + self.v, r)
        zeros = position.new_zeros(T, 1, B, H)
        position = torch.cat((zeros, position), dim=1).view(T + 1, T, B, H)[1:]
        scores = content + position.view_as(content)
        return self.weights(scores.permute(2, 3, 0, 1) / math.sqrt(D)) @ v


@layer("flex-score")
class FlexScore(Attention):
    """flex_attention with a bias by distance and a block mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = slopes()

        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return s + steps[h] * (j - i)

        def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return i >= j

        mask = create_block_mask(seen, None, None, q.size(2), q.size(2), device="cpu")
        return flex_attention(q, k, v, score_mod=score, block_mask=mask)


@layer("sizes-as-plain-numbers")
class SizesAsPlainNumbers(Attention):
    """The code makes plain numbers of the sizes, which a trace fixes."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, _ = (int(size) for size in q.shape)
        away = torch.arange(T).reshape(T, 1) - torch.arange(T).reshape(1, T)
        scores = (q @ k.mT / SIZE**0.5).reshape(B * H, T * T)
        scores = scores.reshape(B, H, T, T) - away * torch.tensor(0.1)
        return scores.masked_fill(away < 0, -torch.inf).softmax(-1) @ v


@layer("numbers-of-positions", hidden=True)
class NumbersOfPositions(Rotated):
    """The longest position, as a number, decides whether a table of angles must grow."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", angles(16), persistent=False)

    def rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(q.size(2))
        longest = int(places.max().item()) + 1
        if longest > len(self.table):
            self.table = angles(longest)
        turns = self.table[places]
        return halves(q, turns.cos(), turns.sin()), halves(k, turns.cos(), turns.sin())
