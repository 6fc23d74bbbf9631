"""The register of the zoo, and what its modules share."""

import math
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, SIZE, POSITIONS = 50, 32, 4, 8, 64
ZOO: dict[str, Callable[[], tuple[nn.Module, Tensor, int]]] = {}
OPTIONS: dict[str, dict[str, Any]] = {}  # what a reader must be told beside the example


def specimen(name: str, *given: Any, hidden: bool = False, **options: Any) -> Callable[[Any], Any]:
    """Register a class of modules, made with the arguments `given`. hidden: whether it takes hidden
    states. options: arguments of the reader.
    """

    def register(kind: Any) -> Any:
        def make() -> tuple[nn.Module, Tensor, int]:
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
