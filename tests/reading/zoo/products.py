"""Layers by how they multiply queries and keys, and by who sees whom."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.reading.zoo.base import (
    HEADS,
    POSITIONS,
    SIZE,
    VOCABULARY,
    WIDTH,
    Attention,
    angles,
    layer,
    pairs,
    specimen,
)

layer("manual")(Attention)


@layer("repeat-interleave", hidden=True)
class RepeatInterleave(Attention):
    groups = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // self.groups, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@layer("heads-broadcast")
class HeadsBroadcast(Attention):
    """Grouped queries [B,groups,copies,S,D] beside keys [B,groups,1,S,D]."""

    groups = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.unflatten(1, (2, 2)) * SIZE**-0.5, k.unsqueeze(2), v.unsqueeze(2)
        scores = q @ k.mT
        later = torch.full(scores.shape[-2:], -1e9).triu(diagonal=1)
        return ((scores + later).softmax(-1) @ v).flatten(1, 2)


@layer("heads-in-rows", float("-inf"))
@layer("heads-in-rows-least", torch.finfo(torch.float32).min)
class HeadsInRows(Attention):
    """Batch and heads in one axis, by bmm and an in-place mask."""

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.hidden = hidden

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        q, k, v = (t.reshape(B * H, T, D) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).div_(math.sqrt(D))
        scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), self.hidden)
        return torch.bmm(scores.softmax(dim=-1), v).view(B, H, T, D)


@layer("tokens-first", hidden=True)
class TokensFirst(nn.Module):
    """[S,B,E] inside, scores [i,j,B,H] by einsum, softmax over the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        q, k, v = self.qkv(x).view(x.size(0), x.size(1), HEADS, 3 * SIZE).chunk(3, dim=-1)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * (1 / SIZE**0.5)
        mask = torch.tril(torch.ones(x.size(0), x.size(0)))[:, :, None, None]
        attn = scores.masked_fill(mask == 0, float("-inf")).softmax(dim=1)
        y = torch.einsum("ijbh,jbhd->ibhd", attn, v)
        return self.out(y.reshape(x.size(0), x.size(1), -1)).transpose(0, 1)


@layer("rows-of-tokens-first")
class RowsOfTokensFirst(nn.Module):
    """[S,B*H,D] transposed for bmm, as in early sequence toolkits."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        T, B, C = x.shape
        q, k, v = (
            t.contiguous().view(T, B * HEADS, SIZE).transpose(0, 1)
            for t in (self.q(x) * SIZE**-0.5, self.k(x), self.v(x))
        )
        weights = torch.bmm(q, k.transpose(1, 2))
        weights += torch.triu(torch.zeros(T, T).float().fill_(float("-inf")), 1)[None]
        y = torch.bmm(F.softmax(weights.float(), dim=-1).type_as(weights), v)
        return self.out(y.transpose(0, 1).contiguous().view(T, B, C)).transpose(0, 1)


@layer("einsum-letters")
class EinsumLetters(nn.Module):
    """Weights as [H,E,D] parameters and einsum throughout, with axes in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (
            nn.Parameter(torch.randn(HEADS, WIDTH, SIZE) * 0.2) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bte,hed->hbtd", x, w) for w in (self.q, self.k, self.v))
        scores = torch.einsum("hbqd,hbkd->bqhk", q, k) / math.sqrt(SIZE)
        n = torch.arange(x.shape[1])
        scores = torch.where((n[:, None] >= n[None, :])[None, :, None], scores, -torch.inf)
        y = torch.einsum("bqhk,hbkd->qbhd", scores.softmax(-1), v)
        return torch.einsum("qbhd,hed->bqe", y, self.out)


@layer("keys-first")
class KeysFirst(Attention):
    """Scores as [keys, queries], which two operators read."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.size(2)
        scores = (k @ q.mT / 8**0.5).masked_fill(torch.ones(T, T).tril(-1) > 0, float("-inf"))
        return (scores.exp() / scores.exp().sum(-2, keepdim=True)).mT @ v


@layer("additive")
class Additive(Attention):
    """tanh of the sum of a query and a key, times a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(SIZE))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (
            self.weights((torch.tanh(q[:, :, :, None] + k[:, :, None]) * self.vector).sum(-1)) @ v
        )


@layer("latent", hidden=True)
class Latent(nn.Module):
    """Keys and values of low rank, and a rotated part of the key that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, HEADS * 12), nn.Linear(WIDTH, 12 + 4)
        self.norm, self.up = nn.LayerNorm(12), nn.Linear(12, HEADS * 2 * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        turns = angles(T, 4)
        latent, turned = self.down(x).split([12, 4], dim=-1)
        k, v = self.up(self.norm(latent)).view(B, T, HEADS, -1).transpose(1, 2).chunk(2, dim=-1)
        turned = pairs(turned.view(B, 1, T, 4), turns.cos(), turns.sin())
        q, q_turned = self.q(x).view(B, T, HEADS, 12).transpose(1, 2).split([SIZE, 4], dim=-1)
        q = torch.cat((q, pairs(q_turned, turns.cos(), turns.sin())), dim=-1)
        k = torch.cat((k, turned.expand(-1, HEADS, -1, -1)), dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
        return self.out(y.transpose(1, 2).reshape(B, T, WIDTH))


@layer("tokens-flattened")
class TokensFlattened(Attention):
    """Rows and tokens in one axis for experts, all of which are computed; two of three count."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(3, 32, 32) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + super().forward(x)
        flat = x.view(-1, WIDTH)
        chances, chosen = self.router(flat).softmax(dim=-1).topk(2, dim=-1)
        routed = torch.zeros(flat.shape[0], 3).scatter(1, chosen, chances)
        y = torch.einsum("ne,xef->nxf", flat, self.experts).relu()
        return (y * routed.unsqueeze(-1)).sum(dim=1).view(x.shape)


@layer("window-band")
class WindowBand(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.size(2))
        away = n[:, None] - n[None, :]
        band = (away >= 0) & (away < 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=band)


@layer("window-beside-first")
class WindowBesideFirst(Attention):
    """The first two tokens are seen from everywhere."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.size(2))
        seen = (n[:, None] >= n) & ((n[:, None] - n < 5) | (n < 2))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@layer("window-branch", 5)
@layer("window-holds-all", POSITIONS)
class WindowBranch(Attention):
    """Plain causal attention while the window holds every token."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.size(-2)
        if self.window >= T:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = torch.ones(T, T, dtype=torch.bool).tril().triu(1 - self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


@layer("window-unfold")
class WindowUnfold(Attention):
    """Each query beside the window of its last four keys, cut out by unfold."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (F.pad(t, (0, 0, 3, 0)).unfold(2, 4, 1) for t in (k, v))
        scores = torch.einsum("bhtd,bhtdw->bhtw", q, k) / SIZE**0.5
        there = torch.arange(q.size(2))[:, None] + torch.arange(-3, 1) >= 0
        chances = scores.masked_fill(~there, -torch.inf).softmax(dim=-1)
        return torch.einsum("bhtw,bhtdw->bhtd", chances, v)


@layer("chunks")
class Chunks(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.size(2))
        mask = (n[:, None] >= n) & (n[:, None] // 5 == n // 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@layer("two-ranges", hidden=True)
class TwoRanges(nn.Module):
    """Two attentions in one layer: the last three tokens, and all, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.near, self.far, self.gate = WindowBranch(3), Attention(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * self.near(x) + (1 - gate) * self.far(x)


@layer("memory-keys", hidden=True)
class MemoryKeys(Attention):
    """Two learned keys and values before those of the tokens, which every query sees."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(2, 1, HEADS, 2, SIZE))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        memory = self.memory.expand(-1, q.size(0), -1, -1, -1)
        k, v = (torch.cat((m, t), dim=2) for m, t in zip(memory, (k, v), strict=True))
        mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=F.pad(mask, (2, 0), value=True))


@specimen("memory-tokens")
class MemoryTokens(nn.Module):
    """Learned rows before the tokens, which all see, and after them, which see all."""

    before, after = 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.memory = nn.Parameter(torch.randn(self.before + self.after, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.places = nn.Embedding(POSITIONS, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        B, T = ids.shape
        x = self.embed(ids) + self.places(torch.arange(T))
        first, last = self.memory.expand(B, -1, -1).split((self.before, self.after), dim=1)
        x = torch.cat((first, x, last), dim=1)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask = F.pad(mask, (0, self.after, self.before, 0))
        mask = F.pad(mask, (self.before, 0, 0, self.after), value=True)
        for layer_of in self.layers:
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer_of(x).chunk(3, -1)
            )
            scores = (q @ k.mT / SIZE**0.5).masked_fill(~mask, -torch.finfo(x.dtype).max)
            x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.head(x[:, self.before : self.before + T])


@specimen("padding-token", False)
@specimen("padding-token-undefined", True)
class PaddingToken(nn.Module):
    """Token 0 is padding, which no query sees; what a query of no keys gives is 0, or NaN."""

    def __init__(self, undefined: bool) -> None:
        super().__init__()
        self.hidden = -torch.inf if undefined else torch.finfo(torch.float32).min
        self.rest = None if undefined else 0.0
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.size(1)
        hidden = ~((ids != 0)[:, None] & torch.ones(T, T, dtype=torch.bool).tril())[:, None]

        def weights(scores: Tensor) -> Tensor:
            chances = scores.masked_fill(hidden, self.hidden).softmax(dim=-1)
            return chances if self.rest is None else chances.masked_fill(hidden, self.rest)

        self.attention.weights = weights
        return self.head(self.attention(self.embed(ids)))


@layer("experts-by-mask", True, hidden=True)
@layer("experts-by-mask-of-rows", False, hidden=True)
class ExpertsByMask(TokensFlattened):
    """Each expert computes the tokens that chose it, cut out by a mask, and none without them."""

    def __init__(self, flattened: bool) -> None:
        super().__init__()
        self.flattened = flattened

    def forward(self, x: Tensor) -> Tensor:
        x = x + Attention.forward(self, x)
        tokens = x.view(-1, WIDTH) if self.flattened else x
        chances, chosen = self.router(tokens).softmax(dim=-1).topk(2, dim=-1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            mask = mine.any(dim=-1)
            if not mask.any():
                continue
            weight = (chances * mine).sum(dim=-1, keepdim=True)
            y[mask] += weight[mask] * (tokens[mask] @ expert).relu()
        return y.view(x.shape)


@layer("attention-in-float64")
class Wide(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q.double(), k.double(), v.double()).float()


@specimen("padding-as-bias")
class PaddingAsBias(nn.Module):
    """Token 0 and later ones are hidden by a bias of rows times heads, from a transposed mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        B, T = ids.shape
        seen = (torch.triu(torch.ones(T, T)) == 1).transpose(0, 1)
        bias = seen.float().masked_fill(seen == 0, -torch.inf).masked_fill(seen == 1, 0.0)
        padding = torch.zeros(B, T).masked_fill(ids == 0, -torch.inf).view(B, 1, 1, T)
        bias = bias.unsqueeze(0) + padding.expand(-1, HEADS, -1, -1).reshape(B * HEADS, 1, T)
        qkv = self.qkv(self.embed(ids)).view(B, T, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * HEADS, T, SIZE)
        y = torch.baddbmm(bias, q, k.mT).softmax(-1) @ v
        return self.head(y.view(B, HEADS, T, SIZE).transpose(1, 2).reshape(B, T, WIDTH))


@specimen("memory-tokens-in-streams")
class MemoryTokensInStreams(MemoryTokens):
    """The same in four residual streams, which are rows beside those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, WIDTH, 5))

    def forward(self, ids: Tensor) -> Tensor:
        B, T = ids.shape
        x = self.embed(ids) + self.places(torch.arange(T))
        first, last = self.memory.expand(B, -1, -1).split((self.before, self.after), dim=1)
        x = torch.cat((first, x, last), dim=1).repeat_interleave(4, dim=0)
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        mask = F.pad(mask, (0, self.after, self.before, 0))
        mask = F.pad(mask, (self.before, 0, 0, self.after), value=True)
        for layer_of, mix in zip(self.layers, self.mix, strict=True):
            streams = x.unflatten(0, (B, 4)).permute(0, 2, 1, 3)
            mixed = torch.einsum("bnsd,bnst->bntd", streams, (streams @ mix).softmax(2))
            own, rest = mixed[:, :, 0], mixed[:, :, 1:]
            q, k, v = (
                t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in layer_of(own).chunk(3, -1)
            )
            scores = (q @ k.mT / SIZE**0.5).masked_fill(~mask, -torch.finfo(x.dtype).max)
            y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = (rest + y.unsqueeze(2)).permute(0, 2, 1, 3).flatten(0, 1)
        return self.head(x.unflatten(0, (B, 4)).sum(1)[:, self.before : self.before + T])
