"""Whole models: answers, masks, positions and tables in the ways of their authors."""

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.reading.zoo.base import (
    HEADS,
    POSITIONS,
    SIZE,
    VOCABULARY,
    WIDTH,
    Attention,
    angles,
    halves,
    specimen,
)


class NanoAttention(nn.Module):
    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.flash = nn.Dropout(0.1), flash
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        if self.flash:
            dropout = 0.1 if self.training else 0
            y = F.scaled_dot_product_attention(q, k, v, None, dropout_p=dropout, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


@specimen("nanogpt-flash", True)
@specimen("nanogpt-manual", False)
class NanoGPT(nn.Module):
    """Learned positions, tied weights, logits of the last token unless there are targets."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.attentions = nn.ModuleList(NanoAttention(flash) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        b, t = idx.size()
        assert t <= POSITIONS, f"{t} tokens, but only {POSITIONS} positions"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for norm, attention in zip(self.norms, self.attentions, strict=False):
            x = x + attention(norm(x))
        x = self.norms[2](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class NanochatAttention(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.c_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.c_k, self.c_v = (nn.Linear(WIDTH, 2 * SIZE, bias=False) for _ in range(2))
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], kv_cache: Any) -> Tensor:
        B, T, C = x.size()
        q = self.c_q(x).view(B, T, HEADS, SIZE)
        k, v = self.c_k(x).view(B, T, 2, SIZE), self.c_v(x).view(B, T, 2, SIZE)
        q, k = (F.rms_norm(halves(t, *cos_sin), (SIZE,)) for t in (q, k))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if kv_cache is not None:
            k, v = kv_cache.insert_kv(self.index, k, v)
        if kv_cache is None or q.size(2) == k.size(2):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


@specimen("nanochat")
class Nanochat(nn.Module):
    """bfloat16 tables as buffers cut to the length, norms without weights, an own cache unused."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attentions = nn.ModuleList(NanochatAttention(i) for i in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH, bias=False) for _ in range(2))
        for name, table in ("cos", angles(640).cos()), ("sin", angles(640).sin()):
            self.register_buffer(name, table.bfloat16()[None, :, None, :], persistent=False)

    def forward(self, idx: Tensor, targets: Any = None, kv_cache: Any = None) -> Tensor:
        B, T = idx.size()
        assert self.cos.size(1) >= T, f"too long: {T} > {self.cos.size(1)}"
        assert self.cos.dtype == torch.bfloat16, "rotary embeddings must be in bfloat16"
        start = 0 if kv_cache is None else kv_cache.get_pos()
        cos_sin = self.cos[:, start : start + T], self.sin[:, start : start + T]
        x = F.rms_norm(self.wte(idx), (WIDTH,))
        for attention, up, down in zip(self.attentions, self.up, self.down, strict=True):
            x = x + attention(F.rms_norm(x, (WIDTH,)), cos_sin, kv_cache)
            x = x + down(F.relu(up(F.rms_norm(x, (WIDTH,)))).square())
        logits = self.lm_head(F.rms_norm(x, (WIDTH,))).float()
        return 15 * torch.tanh(logits / 15)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(mean + 1e-5)).type_as(x) * self.weight


@specimen("llama-complex")
class LlamaComplex(nn.Module):
    """Complex rotation by a buffer, keys repeated by expand, a mask from full and triu, start_pos
    at 0, two layers that are alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(VOCABULARY, WIDTH), RMSNorm()
        self.layers = nn.ModuleList(ComplexLayer() for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        turns = angles(2 * POSITIONS)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(turns), turns))

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis.to(h.device)[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h)).float()


class ComplexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.wqkv = nn.Linear(WIDTH, 8 * SIZE, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = h.shape
        heads = self.wqkv(self.norm(h)).view(bsz, seqlen, 8, SIZE)
        xq, xk, xv = heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:]
        xq, xk = (self.rotary(t, freqs_cis) for t in (xq, xk))
        keys, values = (
            t[:, :, :, None, :].expand(bsz, seqlen, 2, 2, SIZE).reshape(bsz, seqlen, 4, SIZE)
            for t in (xk, xv)
        )
        scores = torch.matmul(xq.transpose(1, 2), keys.permute(0, 2, 3, 1)) / math.sqrt(SIZE)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        y = torch.matmul(scores, values.transpose(1, 2)).transpose(1, 2).contiguous()
        return h + self.wo(y.view(bsz, seqlen, -1))

    @staticmethod
    def rotary(x: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs_of_x = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs_of_x * freqs_cis.view(1, x.shape[1], 1, SIZE // 2)
        return torch.view_as_real(turned).flatten(3).type_as(x)


@specimen("bigram-heads")
class HeadsApart(nn.Module):
    """Each head is a module of its own, of rank 3; the buffer of the mask is cut to the length."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query, self.value = (
                nn.Linear(WIDTH, SIZE, bias=False) for _ in range(3)
            )
            self.register_buffer("tril", torch.tril(torch.ones(POSITIONS, POSITIONS)))

        def forward(self, x: Tensor) -> Tensor:
            B, T, C = x.shape
            wei = self.query(x) @ self.key(x).transpose(-2, -1) * SIZE**-0.5
            wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
            return F.softmax(wei, dim=-1) @ self.value(x)

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.heads = nn.ModuleList(HeadsApart.Head() for _ in range(4))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor, targets: Any = None) -> tuple[Tensor, None]:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        x = x + torch.cat([head(x) for head in self.heads], dim=-1)
        return self.lm_head(x), None


@specimen("encoder-is-causal", True)
@specimen("encoder-mask", False)
class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with the usual square mask and sinusoids added; or tokens first."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.is_causal = nn.Embedding(VOCABULARY, WIDTH), is_causal
        one = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=is_causal)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        table = torch.zeros(POSITIONS, WIDTH)
        table[:, 0::2], table[:, 1::2] = angles(64, WIDTH).sin(), angles(64, WIDTH).cos()
        self.register_buffer("pe", table)

    def forward(self, src: Tensor) -> Tensor:
        pe = self.pe[: src.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(src.size(1))
        if self.is_causal:
            x = self.embed(src) * math.sqrt(WIDTH) + pe
            return self.head(self.encoder(x, mask=mask, is_causal=True))
        x = self.embed(src.t()) * math.sqrt(WIDTH) + pe[:, None]
        return self.head(self.encoder(x, mask)).transpose(0, 1)


@specimen("multihead-bool", False)
@specimen("multihead-float-weights", True)
class Multihead(nn.Module):
    """nn.MultiheadAttention: a bool mask, or a float mask with the weights computed."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.embed, self.need_weights = nn.Embedding(VOCABULARY, WIDTH), need_weights
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=not need_weights)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        later = torch.triu(torch.ones(ids.size(1), ids.size(1)), diagonal=1)
        if not self.need_weights:
            y, _ = self.attention(x, x, x, attn_mask=later.bool(), need_weights=False)
            return self.head(x + y)
        x, mask = x.transpose(0, 1), later.masked_fill(later == 1, float("-inf"))
        y, _ = self.attention(x, x, x, attn_mask=mask)
        return self.head((x + y).transpose(0, 1))


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


@specimen("gives-dict", dict)
@specimen("gives-dataclass", Output)
@specimen("gives-named", dict, True, output="logits")
class Answers(nn.Module):
    """Parallel blocks with one head of keys; outputs by name, of which another may come first."""

    def __init__(self, kind: Any, first: bool = False) -> None:
        super().__init__()
        self.embed, self.kind, self.first = nn.Embedding(VOCABULARY, WIDTH), kind, first
        self.fused = nn.Linear(WIDTH, WIDTH + 2 * SIZE + 64)
        self.down, self.head = nn.Linear(WIDTH + 64, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        h = self.embed(input_ids)
        q, k, v, mlp = self.fused(h).split([WIDTH, SIZE, SIZE, 64], dim=-1)
        q = q.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k.unsqueeze(1), v.unsqueeze(1), is_causal=True)
        h = h + self.down(torch.cat((y.transpose(1, 2).flatten(2), F.silu(mlp)), dim=-1))
        logits = self.head(h)
        return dict(hidden=h, logits=logits) if self.first else self.kind(logits=logits, hidden=h)


@specimen("positions-argument", positions="position_ids")
class PositionsArgument(nn.Module):
    """Positions come as an argument or from arange; angles and tables are made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        frequencies = 1.0 / 100.0 ** (torch.arange(0, SIZE, 2).float() / SIZE)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None, :]
        turns = position_ids[:, :, None].float() * self.inv_freq[None, None, :]
        cos, sin = (torch.cat((t, t), -1)[:, None] for t in (turns.cos(), turns.sin()))
        qkv = self.qkv(self.embed(input_ids)).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        q, k = (t * cos + self.rotate_half(t) * sin for t in (qkv[0], qkv[1]))
        y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=True)
        return self.head(y.transpose(1, 2).flatten(2))

    @staticmethod
    def rotate_half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., SIZE // 2 :], x[..., : SIZE // 2]), dim=-1)


@specimen("positions-by-ones", False)
@specimen("positions-of-tokens", True)
class CumulatedPositions(nn.Module):
    """Positions are a cumulative sum of ones, or of the tokens that are not padding (token 0)."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.embed, self.skip = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), skip
        self.positions, self.attention = nn.Embedding(POSITIONS + 1, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        if self.skip:
            mask = ids.ne(0).int()
            positions = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long()
        else:
            positions = torch.ones_like(ids).cumsum(dim=-1) - 1
        x = self.embed(ids) + self.positions(positions)
        return self.head(x + self.attention(x))


@specimen("kinds-of-positions")
class KindsOfPositions(nn.Module):
    """A buffer of one row holds the kind of each position, and is expanded to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.kinds = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("kind", torch.arange(POSITIONS + 1)[None] % 2)

    def forward(self, ids: Tensor) -> Tensor:
        positions = ids.ne(0).long().cumsum(dim=1)
        kinds = self.kind.expand(ids.shape[0], -1).gather(1, positions)
        x = self.embed(ids) + self.kinds(kinds)
        return self.head(x + self.attention(x))


@specimen("documents")
class Documents(nn.Module):
    """Token 0 begins a document, whose tokens see one another alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        document = (ids == 0).cumsum(1)
        seen = document[:, None, :, None].eq(document[:, None, None]).tril()
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.head(y.transpose(1, 2).flatten(2))


@specimen("keys-shared-by-layers")
class SharedKeys(nn.Module):
    """The second layer attends with keys and values of the first; both are checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.kv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 4 * SIZE)
        self.q = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        k, v = (t.unflatten(-1, (2, SIZE)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        for q in self.q:
            x = x + checkpoint(self.attend, q(x), k, v, use_reentrant=False)
        return self.head(x)

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


@specimen("wavenet", hidden=True)
class WaveNet(nn.Module):
    """Dilated convolutions, padded on the left, with gates: vectors to vectors, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv1d(WIDTH, 2 * WIDTH, kernel_size=2, dilation=2**i) for i in range(3)
        )
        self.out = nn.Conv1d(WIDTH, 3, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for convolution in self.convolutions:
            padded = F.pad(x, (convolution.dilation[0], 0))
            value, gate = convolution(padded).chunk(2, dim=1)
            x = x + torch.tanh(value) * torch.sigmoid(gate)
        return self.out(x).transpose(1, 2)


class OneHot(nn.Linear):
    """A table that ids choose rows of by a product."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(F.one_hot(ids, VOCABULARY).float())


@specimen("sequential")
class Chain(nn.Sequential):
    """nn.Sequential of a table, a layer and a head."""

    def __init__(self) -> None:
        super().__init__(OneHot(), Attention(), nn.Linear(WIDTH, VOCABULARY))


@specimen("ids-of-pictures")
class IdsOfPictures(NanoGPT):
    """The ids of pictures have no row of their own in the table of tokens."""

    def __init__(self) -> None:
        super().__init__(True)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        is_picture = idx == 7
        ids = idx.clone()
        ids[is_picture] = 3
        return super().forward(torch.where(idx == 8, 4, ids), targets)


class CastLinear(nn.Linear):
    """Weights in the dtype of what they multiply, as in nanochat."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype), self.bias)


@specimen("weights-that-are-cast")
class WeightsThatAreCast(NanoGPT):
    """Weights of the model beside those of its layers, and linear layers that cast theirs."""

    def __init__(self) -> None:
        super().__init__(True)
        self.scale, self.shift = (nn.Parameter(torch.randn(VOCABULARY)) for _ in range(2))
        self.lm_head = CastLinear(WIDTH, VOCABULARY)
        for attention in self.attentions:
            attention.c_proj = CastLinear(WIDTH, WIDTH)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, loss = super().forward(idx, targets)
        return logits * self.scale + self.shift, loss
