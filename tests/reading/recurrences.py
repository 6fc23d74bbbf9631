"""Modules with recurrences, as people write them, and some that are nearly recurrences."""

from typing import Any, Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS, SIZE, WIDTH, VOCABULARY, CHUNK = 4, 8, 32, 50, 8


def gated_delta_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """A gated delta rule, token by token. Heads [B,S,H,D], g and rate [B,S,H]."""
    state, found = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), []
    for t in range(k.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        error = v[:, t] - torch.einsum("bhd,bhdv->bhv", k[:, t], state)
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, t], error * rate[:, t, :, None])
        found.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    return torch.stack(found, 1)


def linear_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """Linear attention that forgets nothing, and writes into a tensor of outputs."""
    state, y = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), torch.zeros_like(v)
    for t in range(k.shape[1]):
        state = state + k[:, t, :, :, None] * v[:, t, :, None]
        y[:, t] = (q[:, t, :, :, None] * state).sum(2) * SIZE**-0.5
    return y


def linear_unit(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """h = a h + u of each entry, with factors a between 0 and 1."""
    h, found, factor = torch.zeros_like(v[:, 0]), [], q.sigmoid()
    for t in range(k.shape[1]):
        h = factor[:, t] * h + v[:, t]
        found.append(h)
    return torch.stack(found, 1)


def average(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """h = a h + (1 - a) v with constant factors of each entry, and a part of the keys."""
    h, found, factor = torch.zeros_like(v[:, 0]), [], torch.linspace(0.5, 0.9, SIZE)
    for t in range(k.shape[1]):
        h = factor * h + (1 - factor) * v[:, t]
        found.append(h + 2.0 * k[:, t])
    return torch.stack(found, 1)


def retention(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """S = a S + k v^T with a constant factor of each head, which are joined in the loop."""
    state, found = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), []
    kept = 1 - 2.0 ** (-1 - torch.arange(HEADS)[:, None, None])
    for t in range(k.shape[1]):
        state = kept * state + k[:, t, :, :, None] * v[:, t, :, None]
        found.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state).flatten(1))
    return torch.stack(found, 1).unflatten(2, (HEADS, SIZE))


def selective_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """h = e^(r a) h + r k x of each channel x, with a state of its own, and y = q h."""
    x, decays = v.flatten(2), torch.arange(1.0, SIZE + 1)
    steps = rate.repeat_interleave(SIZE, 2)[..., None]
    factor, new = torch.exp(-steps * decays), steps * k[:, :, :1] * x[..., None]
    h, found, read = torch.zeros_like(new[:, 0]), [], q[:, :, 0]
    for t in range(x.shape[1]):
        h = factor[:, t] * h + new[:, t]
        found.append((h @ read[:, t, :, None]).squeeze(-1))
    return torch.stack(found, 1).unflatten(2, (HEADS, SIZE))


def closed_form(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """S = e^g S + k (r v)^T in chunks, the last one padded, plus a part of the values."""
    rows, length = v.shape[:2]
    more = -length % CHUNK
    wide = [functional.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v * rate[..., None], v)]
    q, k, x, skipped = (part.unflatten(1, (-1, CHUNK)).transpose(2, 3) for part in wide)
    sums = functional.pad(g, (0, 0, 0, more)).unflatten(1, (-1, CHUNK)).transpose(2, 3).cumsum(3)
    inside = (sums[..., None] - sums[..., None, :]).masked_fill(
        torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1), float("-inf")
    )
    y = ((q @ k.transpose(3, 4)) * inside.exp()) @ x
    left = (sums[..., -1:] - sums).exp()[..., None]
    written = (k * left).transpose(3, 4) @ x  # [B,N,H,D,V]
    state, before = written.new_zeros(rows, HEADS, SIZE, SIZE), []
    for chunk in range(written.shape[1]):
        before.append(state)
        state = state * sums[:, chunk, :, -1].exp()[..., None, None] + written[:, chunk]
    y = y + (q * sums.exp()[..., None]) @ torch.stack(before, 1) + skipped * 0.5
    return y.transpose(2, 3).flatten(1, 2)[:, :length]


def of_next_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """A decay that depends on the next token."""
    return gated_delta_loop(q, k, v, g.roll(-1, 1), rate)


def normalized(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """A state that is divided by its largest entry after each token."""
    state, found = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), []
    for t in range(k.shape[1]):
        state = state * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None]
        state = state / (state.abs().amax((2, 3), keepdim=True) + 1)
        found.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(found, 1)


def over_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """Outputs that are divided by the length of all outputs of a sequence."""
    y = gated_delta_loop(q, k, v, g, rate)
    return y / y.pow(2).sum(1, keepdim=True).add(1).sqrt()


def mixed_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """Decays of the other rows."""
    return gated_delta_loop(q, k, v, g.mean(0, keepdim=True).expand_as(g), rate)


def bounded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """A state within bounds that few tokens reach."""
    state, found = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), []
    for t in range(k.shape[1]):
        state = state * g[:, t].exp()[..., None, None] + k[:, t, :, :, None] * v[:, t, :, None]
        state = state.clamp(-50, 50)
        found.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(found, 1)


def turned(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """A state whose rows change places from token to token."""
    state, found = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), []
    for t in range(k.shape[1]):
        state = state.flip(2) + k[:, t, :, :, None] * v[:, t, :, None]
        found.append((q[:, t, :, :, None] * state).sum(2))
    return torch.stack(found, 1)


Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Projections around a function of queries, keys, values, decays and rates."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix, self.norm = mix, nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * HEADS * SIZE + 2 * HEADS)
        self.back = nn.Linear(HEADS * SIZE, WIDTH)

    def parts(self, x: Tensor) -> Any:
        """Queries, keys of length 1 and values [B,S,H,D]; decays and rates [B,S,H]."""
        sizes = [HEADS * SIZE] * 3 + [HEADS] * 2
        q, k, v, g, rate = self.project(self.norm(x)).split(sizes, -1)
        q, k, v = (part.unflatten(2, (HEADS, SIZE)) for part in (q, k, v))
        return q, functional.normalize(k, dim=-1), v, functional.logsigmoid(g), rate.sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(self.mix(*self.parts(x)).flatten(2))


class InlineLayer(Layer):
    """The loop stands in forward."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, g, rate = self.parts(x)
        k = k * rate[..., None]
        state, found = x.new_zeros(x.shape[0], HEADS, SIZE, SIZE), []
        for t in range(x.shape[1]):
            state = state * g[:, t].exp()[..., None, None]
            state = state + k[:, t, :, :, None] * v[:, t, :, None]
            found.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
        return x + self.back(torch.stack(found, 1).flatten(2))


class Model(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, mix: Mix, layer: Any = Layer, count: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([layer(mix) for _ in range(count)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


EXACT: dict[str, Callable[[], Model]] = {
    mix.__name__: lambda mix=mix: Model(mix)  # type: ignore[misc]
    for mix in (gated_delta_loop, linear_loop, linear_unit, selective_scan, closed_form)
}
EXACT |= {"average": lambda: Model(average), "retention": lambda: Model(retention)}
EXACT["inline"] = lambda: Model(linear_loop, InlineLayer)
NEARLY: dict[Mix, str] = {  # with words of the refusal
    of_next_token: "is not causal",
    normalized: "loops over tokens",
    over_tokens: "sum mixes tokens",
    mixed_rows: "rows act on each other",
    bounded: "loops over tokens",
    turned: "loops over tokens",
}
