"""Modules of users in the styles that are found most, each with its own code for attention."""

import math
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posenc_export.ops.experts import RUN

VOCABULARY, WIDTH, HEADS, SIZE = 50, 32, 4, 8
POSITIONS = 40


class Attends(nn.Module):
    """A layer of attention of queries, keys and values [B,H,S,D], which a subclass defines."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, kv_heads * SIZE)
        self.v, self.o = nn.Linear(WIDTH, kv_heads * SIZE), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            one(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        return self.o(self.attend(*parts).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Experts(nn.Module):
    """A layer in which each token takes some of several experts, whose gates and ups have no
    multiple of 32 inputs and outputs. unit: alpha, beta and limit of ops.weighted_experts.
    """

    def __init__(
        self,
        count: int = 5,
        sizes: tuple[int, int] = (40, 24),
        biased: bool = False,
        unit: tuple[float, float, float] = (1.0, 0.0, math.inf),
    ) -> None:
        super().__init__()
        width, hidden = sizes
        self.inner, self.outer = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.router, self.unit = nn.Linear(width, count), unit
        shapes = {"gates": (width, hidden), "ups": (width, hidden), "downs": (hidden, width)}
        for name, (inputs, outputs) in shapes.items():
            weights = torch.randn(count, inputs, outputs) / math.sqrt(inputs)
            self.register_parameter(name, nn.Parameter(weights))
            bias = nn.Parameter(torch.randn(count, outputs)) if biased else None
            self.register_parameter(f"{name}_bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.inner(x).flatten(0, 1)
        chances, chosen = self.router(flat).topk(2)
        weights = flat.new_zeros(flat.size(0), self.gates.size(0))
        weights = weights.scatter(1, chosen, chances.softmax(-1))
        biases = (self.gates_bias, self.ups_bias, self.downs_bias)
        y = RUN(flat, weights, self.gates, self.ups, self.downs, 2, *biases, *self.unit)
        return self.outer(y.view(x.size(0), x.size(1), -1))


def _behind(length: int) -> Tensor:
    """Query minus key position [S,S]."""
    places = torch.arange(length)
    return places[:, None] - places


class Rotated(Attends):
    """Rotations from tables that are cut to the length, and two heads for each key."""

    def __init__(self) -> None:
        super().__init__(HEADS // 2)
        angles = torch.outer(torch.arange(POSITIONS).float(), 100.0 ** -torch.arange(0, 1, 0.25))
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), 1), persistent=False)
        self.register_buffer("sin", torch.cat((angles.sin(), angles.sin()), 1), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        cos, sin = self.cos[: x.size(2)], self.sin[: x.size(2)]
        return x * cos + torch.cat((-second, first), -1) * sin

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (self.turned(k), v))
        return F.scaled_dot_product_attention(self.turned(q), k, v, is_causal=True)


class Sloped(Attends):
    """ALiBi, computed in forward."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        behind = _behind(q.size(2))
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)
        scores = q @ k.mT / math.sqrt(SIZE) - slopes[:, None, None] * behind
        return scores.masked_fill(behind < 0, -math.inf).softmax(-1) @ v


class Bucketed(Attends):
    """A trained bias of each head by buckets of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        behind = _behind(q.size(2)).clamp(min=0)
        far = 3 + (torch.log(behind.clamp(min=1).float() / 3) / math.log(4) * 2).long()
        bias = self.table(torch.where(behind < 3, behind, far.clamp(max=5))).permute(2, 0, 1)
        hidden = torch.full((q.size(2), q.size(2)), -math.inf).triu(1)
        return (q @ k.mT / math.sqrt(SIZE) + bias + hidden).softmax(-1) @ v


class Retained(Attends):
    """Scores that decay by distance, without a softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        behind = _behind(q.size(2))
        decays = torch.where(behind >= 0, 0.9 ** behind.clamp(min=0), 0.0)
        return (q @ k.mT * decays) @ v


class Windowed(Attends):
    """Queries that see six tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        behind = _behind(q.size(2))
        mask = (behind >= 0) & (behind < 6)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Decoder(nn.Module):
    """Token ids to logits, as nanoGPT is written: trained positions, and a tied head."""

    def __init__(self, layers: tuple[nn.Module, ...], trained: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(POSITIONS, WIDTH) if trained else None
        self.layers = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in layers)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.places is not None:
            x = x + self.places(torch.arange(ids.size(1)))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return self.head(x + self.down(F.gelu(self.up(x))))


class ReadsEncoder(nn.Module):
    """A decoder whose two layers read keys and values of an encoder [B,M,4*WIDTH]."""

    memory = 4 * WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Rotated(), Bucketed()])
        self.queries = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        x, seen = self.tokens(ids), mask[:, None, None].bool()
        parts = memory.unflatten(2, (-1, HEADS, SIZE)).permute(2, 0, 3, 1, 4)  # [4,B,H,M,D]
        for index, (layer, queries) in enumerate(zip(self.layers, self.queries, strict=True)):
            x = x + layer(self.norm(x))
            q = queries(self.norm(x)).unflatten(2, (HEADS, SIZE)).transpose(1, 2)
            k, v = parts[2 * index], parts[2 * index + 1]
            read = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            x = x + read.transpose(1, 2).flatten(2)
        return self.head(x)


class Tagger(nn.Module):
    """Hidden states to five numbers for each token."""

    def __init__(self, layer: Attends) -> None:
        super().__init__()
        self.norm, self.layer, self.tags = nn.LayerNorm(WIDTH), layer, nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.tags(x + self.layer(self.norm(x)))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "trained positions": lambda: Decoder((Attends(), Attends()), trained=True),
    "rotations": lambda: Decoder((Rotated(),)),
    "slopes": lambda: Decoder((Sloped(),)),
    "buckets": lambda: Decoder((Bucketed(),)),
    "a window": lambda: Decoder((Windowed(),)),
    "experts": lambda: Decoder((Rotated(), Experts())),
    "retention": lambda: Tagger(Retained()),
}
READING = "an encoder"


def seeded(name: str) -> nn.Module:
    """Return a module of MODULES, or one that reads an encoder, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return (ReadsEncoder if name == READING else MODULES[name])().eval()


def inputs(module: nn.Module, rows: int, length: int, seed: int = 2) -> Tensor:
    """Return token ids [B,S] of a decoder, or hidden states [B,S,E]."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(module, (Decoder, ReadsEncoder)):
        return torch.randint(VOCABULARY, (rows, length), generator=generator)
    return torch.randn(rows, length, WIDTH, generator=generator)
