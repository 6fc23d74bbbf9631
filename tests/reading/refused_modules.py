"""Small modules that cannot be read, each with the words of the line that says why."""

import math
from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, WORDS = 16, 2, 50
MOST = 40  # max_positions of the tests


class Words(nn.Module):
    """Embedding, causal attention and a head: what the others change one line of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.packed = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            t.view(rows, length, HEADS, -1).transpose(1, 2) for t in self.packed(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return y.transpose(1, 2).reshape(rows, length, WIDTH)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.attend(self.embed(ids)))


class Reversed(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).flip(1))


class Unmasked(Words):
    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        return self.head(self.attend(self.embed(ids), torch.ones(length, length, dtype=torch.bool)))


class SelfMasked(Words):
    """Queries and keys are the embedded tokens, whose scores `hidden` are to be masked."""

    def hidden(self, ids: Tensor, later: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.embed(ids), torch.arange(ids.shape[1])
        scores = x @ x.mT + self.hidden(ids, n > n[:, None])
        return self.head(scores.softmax(-1) @ x)


class WeaklyMasked(SelfMasked):
    """Later keys have weights that no random tokens show."""

    def hidden(self, ids: Tensor, later: Tensor) -> Tensor:
        return later * -40.0


class SeenByPairs(SelfMasked):
    """One word sees a certain later word; the examples hold neither."""

    def hidden(self, ids: Tensor, later: Tensor) -> Tensor:
        seen = (ids[:, :, None] == WORDS) & (ids[:, None] == WORDS + 1)
        return torch.where(later & ~seen, -math.inf, 0.0)


class Reflected(Words):
    """A causal convolution whose padding shows later tokens to the first outputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = F.pad(self.embed(ids).mT, (2, 0), mode="reflect")
        return self.head(self.mix(x).mT)


class ReflectedAtTheEnd(Words):
    """Shifted from the right, so that the last token alone sees no later one."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + F.pad(x.mT, (0, 1), mode="reflect").mT[:, 1:])


class LastTokenSeen(Words):
    """The first output sees the last token, others do not."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(torch.cat((x[:, :1] + x[:, -1:], x[:, 1:]), 1))


class LateLeak(Words):
    """Blocks of 24 tokens see their whole block: the first 20 tokens show nothing."""

    def forward(self, ids: Tensor) -> Tensor:
        n = torch.arange(ids.shape[1])
        block = (n[:, None] // 24 == n // 24) & (n[:, None] >= 24)
        return self.head(self.attend(self.embed(ids), block | (n[:, None] >= n)))


class RowsCentred(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x - x.mean(0, keepdim=True))


class RowBefore(Words):
    """Each row sees the one before."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + x.roll(1, 0))


class ManyRows(Words):
    """Eight rows and more are scaled."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(2 * x if ids.shape[0] >= 8 else x)


class ScaledByLength(Words):
    """The base of the angles grows with the length, as in dynamic NTK."""

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        angle = torch.arange(length) * (1 + length / 10) ** torch.tensor(-1.0)
        return self.head(self.attend(self.embed(ids) * angle.cos()[:, None]))


class OtherTableWhenLong(Words):
    """Another scale above 33 tokens, which no power of two shows."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if ids.shape[1] > 34:
            x = x * 1.5
        return self.head(self.attend(x))


class OtherTableWhenShort(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if ids.shape[1] <= 6:
            x = x * 1.5
        return self.head(self.attend(x))


class Noisy(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + 0.1 * torch.randn_like(x))


class CallsCounted(Words):
    """A state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.embed(ids)) * self.calls


class BufferWritten(Words):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        self.seen += 0.0 * x.sum((0, 1))
        return self.head(x)


class Branching(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if ids.float().mean() > 20:
            x = x * 2
        return self.head(x)


class Experts(Words):
    """Tokens of one expert are chosen by their indices."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = torch.where(ids.flatten() % 2 == number)[0]
            if len(mine) == 0:
                continue
            out[mine] = expert(x[mine])
        return self.head(out.view(*ids.shape, WIDTH))


class Recurrent(Words):
    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.memory(self.embed(ids))[0])


class Looping(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x, state, out = self.embed(ids), torch.zeros(WIDTH), []
        for place in range(ids.shape[1]):
            state = torch.tanh(state + x[:, place])
            out.append(state)
        return self.head(torch.stack(out, 1))


class LogOfLength(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)) * math.log(ids.shape[1])


class OneLength(Words):
    """A learned table that is added whole."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(11, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.places)


class ShortTable(Words):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(23, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.places[: ids.shape[1]])


class Placed(Words):
    def __init__(self, rows: int = 23) -> None:
        super().__init__()
        self.places = nn.Embedding(rows, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attend(self.embed(ids) + self.places(torch.arange(ids.shape[1]))))


class NotFinite(Words):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x / (x - x))


class Raising(Words):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH - 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attend(self.embed(ids)))


class TwoInputs(Words):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attend(self.embed(ids), mask))


class TokensFirst(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).transpose(0, 1)


class Pooled(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(1))


class OneNumber(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).sum()


class NoTensor(Words):
    def forward(self, ids: Tensor) -> list[int]:
        return [1, 2]


class Conditional(Words):
    """A branch that stays in the graph."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.cond(ids.float().mean() > 20, lambda t: t * 2, lambda t: t * 3, (x,))
        return self.head(x)


class Blocks(Words):
    """Takes whole blocks of 8 tokens, and lets the last of a block speak for all."""

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        assert length % 8 == 0
        x = self.embed(ids).view(rows, length // 8, 8, WIDTH)
        return self.head(x[:, :, -1:].expand_as(x).reshape(rows, length, WIDTH))


class Seldom(Words):
    """Tokens act on each other where numbers are large, as those of the example never are."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.of(x, x.amax(-1, keepdim=True) > 9))


SELDOM: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "any": lambda x, large: large.any(1, keepdim=True).to(x.dtype),
    "sum": lambda x, large: (x * large).sum(1, keepdim=True),
    "flip": lambda x, large: (x * large).flip(1),
    "avg_pool1d": lambda x, large: F.relu(F.avg_pool1d(x.mT, 3, 1, 1).mT - 9),
}


class Counted(Words):
    """Further rows of the table by whole numbers of the tokens so far."""

    def __init__(self, of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.of = of

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.embed(self.of(ids) % WORDS))


SELDOM_LARGE = torch.zeros(WORDS, dtype=torch.int64).index_fill(0, torch.tensor(7), 2**25)
WHOLE_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda ids: (ids * 99_991).cumsum(1),
    "product": lambda ids: (ids * 99_991).cumprod(1),
    "window": lambda ids: F.pad(ids * 99_991 * WORDS, (1, 0))[:, :-1] // 7,
    "table": lambda ids: F.pad(SELDOM_LARGE[ids], (1, 0))[:, :-1] // 99_991,
}


class Case(NamedTuple):
    """words: all that the line must hold."""

    module: type[Words]
    words: list[str]
    length: int = 11  # of the example


HERE = "reading/refused_modules.py:"
BY_TRACE: list[Case] = [
    Case(BufferWritten, ["writes to the buffer seen", HERE, "self.seen +="]),
    Case(Branching, ["depends on the data", HERE, "if ids.float().mean() > 20"]),
    Case(Experts, ["depends on the data", "experts in a dense form", HERE, "if len(mine) == 0"]),
    Case(Recurrent, ["memory: loops over tokens", HERE, "self.memory(self.embed(ids))"]),
    Case(Looping, ["loops over tokens", HERE, "for place in range"]),
    Case(LogOfLength, ["fixes the length", HERE, "math.log(ids.shape[1])"]),
    Case(OneLength, ["takes sequences of 11 tokens only", HERE, "self.places"]),
    Case(ShortTable, ["takes at most 23 tokens, and max_positions is 40", HERE]),
    Case(Placed, ["takes at most 23 tokens, and max_positions is 40", "places", HERE]),
    Case(Raising, ["packed: raises RuntimeError", "mat1 and mat2 shapes", HERE]),
    Case(Blocks, ["torch.export: AssertionError (", "assert length % 8 == 0"], length=16),
    Case(Conditional, ["cond runs a part of the graph of its own", HERE, "torch.cond"]),
    Case(TwoInputs, ["needs mask beside its input"]),
    Case(TokensFirst, ["no output with an axis of tokens", "[11, 3, 50]"]),
    Case(Pooled, ["mean leaves no axis of tokens", HERE, ".mean(1)"]),
    Case(OneNumber, ["no output with an axis of tokens", "but []"]),
    Case(NoTensor, ["no output with an axis of tokens", "but a list"]),
]
BY_NUMBERS: list[Case] = [
    Case(Reversed, ["is not causal"]),
    Case(Unmasked, ["is not causal"]),
    Case(Reflected, ["is not causal"]),
    Case(ReflectedAtTheEnd, ["is not causal"]),
    Case(LastTokenSeen, ["is not causal"]),
    Case(LateLeak, ["is not causal"]),
    Case(RowsCentred, ["rows act on each other"]),
    Case(RowBefore, ["rows act on each other"]),
    Case(ManyRows, ["depends on the number of rows: of 8"]),
    Case(ScaledByLength, ["depends on the length"]),
    Case(OtherTableWhenLong, ["depends on the length", "branch"]),
    Case(OtherTableWhenShort, ["depends on the length", "branch at 7 tokens"]),
    Case(Noisy, ["other numbers in a second call", "randn_like", HERE, "torch.randn_like(x)"]),
    Case(CallsCounted, ["other numbers in a second call", "a state of its own"]),
    Case(NotFinite, ["not finite"]),
]
LATER: list[Case] = [  # of which the first is not causal for the tokens that are tried, either
    Case(Unmasked, ["attn_mask=mask", "is not causal"]),
    Case(WeaklyMasked, ["add", "self.hidden(ids, n > n[:, None])"]),
    Case(SeenByPairs, ["ids[:, None] == WORDS + 1"]),
]
ALL: dict[str, Case] = {case.module.__name__: case for case in BY_TRACE + BY_NUMBERS}
