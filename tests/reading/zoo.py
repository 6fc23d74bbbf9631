"""Causal modules in the styles that people write them in: none knows a cache, each is right alone.

ZOO[name]() gives a module in eval mode, an example (ids [2,11] int64 or hidden states [2,11,32])
and the number of its positions. Its weights are wide, since small ones hide errors.
"""

import dataclasses
import math
from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS, SIZE, POSITIONS = 50, 32, 4, 8, 64
ZOO: Dict[str, Callable[[], Tuple[nn.Module, Tensor, int]]] = {}
OPTIONS: Dict[str, Dict[str, Any]] = {}  # what a reader must be told beside the example


def specimen(name: str, *given: Any, hidden: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Register a class of modules, made with the arguments `given`. hidden: whether it takes hidden
    states. options: arguments of the reader.
    """

    def register(kind: Any) -> Any:
        def make() -> Tuple[nn.Module, Tensor, int]:
            torch.manual_seed(0)
            module = kind(*given).eval().requires_grad_(False)
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(1.5)
            shape = (2, 11)
            x = torch.randn(*shape, WIDTH) if hidden else torch.randint(VOCABULARY, shape)
            return module, x, POSITIONS

        ZOO[name], OPTIONS[name] = make, options
        return kind

    return register


def layer(name: str, *given: Any, hidden: bool = False) -> Callable[[Any], Any]:
    """Register a class of layers [B,S,32] to [B,S,32], two of which make a Stack."""

    def register(kind: Any) -> Any:
        specimen(name, lambda: kind(*given), hidden, hidden=hidden)(Stack)
        return kind

    return register


class Stack(nn.Module):
    """Two residual layers of one kind and an MLP, from ids to logits or from vectors to vectors."""

    def __init__(self, make: Callable[[], nn.Module], hidden: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH) if hidden else nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 3 if hidden else VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, mixing in zip(self.norms, self.layers, strict=True):
            x = x + mixing(norm(x))
        return self.head(x + self.mlp(x))


class Attention(nn.Module):
    """Multi-head attention whose method `attend` [B,H,S,D] is the style."""

    groups = HEADS  # heads of keys and values

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * self.groups * SIZE, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q = self.q(x).view(B, T, HEADS, SIZE).transpose(1, 2)
        k, v = (t.view(B, T, self.groups, SIZE).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        return self.out(self.attend(q, k, v).transpose(1, 2).contiguous().view(B, T, C))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weights(q @ k.transpose(-2, -1) / math.sqrt(SIZE)) @ v

    def weights(self, scores: Tensor) -> Tensor:
        T = scores.size(-1)
        later = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
        return F.softmax(scores.masked_fill(later, float("-inf")), dim=-1)


class Rotated(Attention):
    """Attention whose method `rotate` turns queries and keys [B,H,S,D]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.rotate(q, k), v, is_causal=True)


def angles(length: int, size: int = SIZE, base: float = 100.0) -> Tensor:
    """Return the angles [length,size/2] of a rotation."""
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    return torch.outer(torch.arange(length).float(), frequencies)


def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..,D] by tables [..,D/2], entry i with entry i + D/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..,D] by tables [..,D/2], entry 2i with entry 2i + 1."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


def slopes() -> Tensor:
    return torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(HEADS)])


# Whole models


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

    def forward(
        self, idx: Tensor, targets: Optional[Tensor] = None
    ) -> Tuple[Tensor, Optional[Tensor]]:
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

    def forward(self, x: Tensor, cos_sin: Tuple[Tensor, Tensor], kv_cache: Any) -> Tensor:
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
        assert T <= self.cos.size(1), f"too long: {T} > {self.cos.size(1)}"
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
    """Complex rotation, keys repeated by expand, a mask from full and triu, start_pos at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(RMSNorm() for _ in range(3))
        self.wqkv = nn.ModuleList(nn.Linear(WIDTH, 8 * SIZE, bias=False) for _ in range(2))
        self.wo = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        turns = angles(2 * POSITIONS)
        self.freqs_cis = torch.polar(torch.ones_like(turns), turns)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis.to(h.device)[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device)
            mask = torch.triu(mask, diagonal=1).type_as(h)
        for i in range(2):
            h = h + self.attention(i, self.norms[i](h), freqs_cis, mask)
        return self.output(self.norms[2](h)).float()

    def attention(self, i: int, x: Tensor, freqs_cis: Tensor, mask: Optional[Tensor]) -> Tensor:
        bsz, seqlen, _ = x.shape
        heads = self.wqkv[i](x).view(bsz, seqlen, 8, SIZE)
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
        return self.wo[i](y.view(bsz, seqlen, -1))

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

    def forward(self, idx: Tensor, targets: Any = None) -> Tuple[Tensor, None]:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        x = x + torch.cat([head(x) for head in self.heads], dim=-1)
        return self.lm_head(x), None


@specimen("encoder-is-causal", True)
@specimen("encoder-mask", False)
class TorchEncoder(nn.Module):
    """nn.TransformerEncoder with the usual square mask and sinusoids added."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.embed, self.is_causal = nn.Embedding(VOCABULARY, WIDTH), is_causal
        one = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        table = torch.zeros(POSITIONS, WIDTH)
        table[:, 0::2], table[:, 1::2] = angles(64, WIDTH).sin(), angles(64, WIDTH).cos()
        self.register_buffer("pe", table.unsqueeze(0))

    def forward(self, src: Tensor) -> Tensor:
        x = self.embed(src) * math.sqrt(WIDTH) + self.pe[:, : src.size(1)]
        mask = nn.Transformer.generate_square_subsequent_mask(src.size(1))
        return self.head(self.encoder(x, mask=mask, is_causal=self.is_causal))


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
    hidden: Optional[Tensor] = None


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

    def forward(self, input_ids: Tensor, attention_mask: Optional[Tensor] = None) -> Any:
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

    def forward(self, input_ids: Tensor, position_ids: Optional[Tensor] = None) -> Tensor:
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


@specimen("padding-eye")
class PaddingEye(nn.Module):
    """Token 0 is padding, hidden from all but itself by a bool mask made of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.size(1)
        q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / SIZE**0.5
        seen = torch.tril(torch.ones(T, T)).bool() & (ids != 0)[:, None, None, :]
        seen = seen | torch.eye(T, dtype=torch.bool)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return self.head((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


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


@specimen("sequential")
class Chain(nn.Sequential):
    """nn.Sequential of an embedding, a layer and a head."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(VOCABULARY, WIDTH), Attention(), nn.Linear(WIDTH, VOCABULARY))


# Layers: products of queries and keys


@layer("manual")
class Manual(Attention):
    """As Attention is."""


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


@layer("heads-in-rows")
class HeadsInRows(Attention):
    """Batch and heads in one axis, by bmm and an in-place mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        q, k, v = (t.reshape(B * H, T, D) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)).div_(math.sqrt(D))
        scores.masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
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
    """Scores as [keys, queries]."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.size(2)
        scores = (k @ q.mT / 8**0.5).masked_fill(torch.ones(T, T).tril(-1) > 0, float("-inf"))
        return scores.softmax(dim=-2).mT @ v


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


# Layers: from scores to weights


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


# Layers: who sees whom


@layer("window-band")
class WindowBand(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = torch.arange(q.size(2))
        away = n[:, None] - n[None, :]
        band = (away >= 0) & (away < 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=band)


@layer("window-branch", 5)
@layer("window-holds-all", POSITIONS)
class WindowBranch(Attention):
    """Plain causal attention while the window holds every token."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        T = q.size(-2)
        if T <= self.window:
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
        self.near, self.far, self.gate = WindowBranch(3), Manual(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * self.near(x) + (1 - gate) * self.far(x)


# Layers: positions


@layer("rope-cut")
class RopeCut(Rotated):
    """Tables [N,D/2] as buffers, cut to the length; norms of queries and keys with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.register_buffer("cos", angles(POSITIONS).cos())
        self.register_buffer("sin", angles(POSITIONS).sin())

    def rotate(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        cos, sin = self.cos[: q.size(2)], self.sin[: q.size(2)]
        return pairs(self.q_norm(q), cos, sin), pairs(self.k_norm(k), cos, sin)


@layer("rope-of-last-length")
class RopeOfLastLength(Rotated):
    """bfloat16 tables of the last length, kept as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.seq_len_cached: Optional[int] = None
        self.cos_cached = self.sin_cached = None

    def rotate(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
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

    def rotate(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
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
    def tables(self, length: int) -> Tuple[Tensor, Tensor]:
        return angles(length, 4).cos(), angles(length, 4).sin()

    def rotate(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
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

    def rotate(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
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
    """Sinusoids of the distance as keys, with two biases of the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(WIDTH, WIDTH, bias=False)
        self.u, self.v = (nn.Parameter(torch.randn(HEADS, SIZE) * 0.3) for _ in range(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, T, D = q.shape
        turns = angles(T, WIDTH).flip(0)
        r = self.r(torch.cat((turns.sin(), turns.cos()), dim=-1)).view(T, H, D)
        content = torch.einsum("bhid,bhjd->bhij", q + self.u[:, None], k)
        position = torch.einsum("bhid,jhd->bhij", q + self.v[:, None], r)
        zeros = position.new_zeros(B, H, T, 1)
        position = torch.cat((zeros, position), dim=-1).view(B, H, T + 1, T)[:, :, 1:, :]
        return self.weights((content + position.view_as(content)) / math.sqrt(D)) @ v


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


# Layers: no softmax, or no attention


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


@layer("mean-by-cumsum")
class MeanByCumsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.size(1) + 1, dtype=x.dtype).view(1, -1, 1)
        return self.out(x.cumsum(dim=1) / count)


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
