"""Modules as people publish them are traced on whole sequences, and stay as they were."""

import dataclasses
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from posenc_export.reading import capture as capturing
from posenc_export.reading import tracing
from posenc_export.reading.axes import same
from posenc_export.reading.capture import capture
from posenc_export.reading.causality import findings
from posenc_export.reading.refused import Refused
from posenc_export.reading.whole import Capture
from tests.reading.refused_modules import HEADS, MOST, WIDTH, WORDS, Words

aten = torch.ops.aten


def ids(rows: int = 3, length: int = 11) -> Tensor:
    return torch.randint(0, WORDS, (rows, length))


def equal(captured: Capture, module: Callable[..., Any], length: int = 29) -> bool:
    """Whether the graph gives what the module gives, for rows and a length of its own."""
    x = ids(2, length)
    with torch.no_grad():
        return same(captured.traced(x), module(x))


def targets(captured: Capture) -> list[str]:
    return [str(node.target) for node in captured.graph.nodes if node.op == "call_function"]


# --- what forward returns ---
@dataclasses.dataclass
class Result:
    loss: Tensor | None
    logits: Tensor


class Pair(Words):
    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets)


class Mapped(Words):
    def forward(self, ids: Tensor) -> dict[str, Any]:
        return {"loss": None, "logits": super().forward(ids)}


class Record(Words):
    def forward(self, ids: Tensor) -> Result:
        return Result(None, super().forward(ids))


class Both(Words):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.embed(ids), "logits": super().forward(ids)}


class Nested(Words):
    def forward(self, ids: Tensor) -> Any:
        logits = super().forward(ids)
        return [logits.mean(), {"out": (logits,)}]


@pytest.mark.parametrize("kind", [Words, Pair, Mapped, Record, Nested])
def test_the_first_output_with_an_axis_of_tokens_is_read(kind: type[Words]) -> None:
    module = kind().eval()
    assert equal(capture(module, ids(), MOST), lambda x: Words.forward(module, x))


@pytest.mark.parametrize("output, shape", [("logits", WORDS), ("hidden", WIDTH)])
def test_an_output_is_chosen_by_its_key(output: str, shape: int) -> None:
    captured = capture(Both(), ids(), MOST, output=output)
    assert captured.output.meta["val"].shape[2] == shape


def test_an_output_is_chosen_by_its_index() -> None:
    module = Pair().eval()
    assert equal(capture(module, ids(), MOST, output=0), lambda x: module(x)[0])


def test_an_output_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(Refused, match=r"no output 'scores' .* but hidden \[3, \d+, \d+\], logits"):
        capture(Both(), ids(), MOST, output="scores")


LAST: dict[str, Callable[[Words, Tensor], Tensor]] = {
    "x[:, [-1]]": lambda m, x: m.head(x[:, [-1], :]),
    "x[:, -1:]": lambda m, x: m.head(x[:, -1:]),
    "x[:, -1]": lambda m, x: m.head(x[:, -1]),
    "x[:, S - 1]": lambda m, x: m.head(x[:, x.shape[1] - 1]),
    "logits[:, -1]": lambda m, x: m.head(x)[:, -1, :],
    "x.transpose(0, 1)[-1]": lambda m, x: m.head(x.transpose(0, 1)[-1]),
}


class Last(Words):
    """The output of the last token alone, and that of all."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        return LAST[self.form](self, self.attend(self.embed(ids))), None


@pytest.mark.parametrize("form", LAST)
def test_a_module_that_gives_the_last_token_is_traced_for_all_tokens(form: str) -> None:
    module = Last(form).eval()
    captured = capture(module, ids(), MOST)
    assert captured.gives_last_token
    assert equal(captured, lambda x: Words.forward(module, x))


# --- what forward takes ---
class Placed(Words):
    """Learned positions, by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(MOST, WIDTH)

    def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        where = torch.arange(ids.shape[1]) if where is None else where
        return self.head(self.attend(self.embed(ids) + self.places(where)))


class PlacedFlat(Placed):
    def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        if where is not None and where.dim() != 1:
            raise ValueError("where: expected one axis")
        return super().forward(ids, where)


@pytest.mark.parametrize("kind, axes", [(Placed, 2), (PlacedFlat, 1)])
def test_positions_are_an_input_where_forward_takes_them(kind: type[Placed], axes: int) -> None:
    module = kind().eval()
    captured = capture(module, ids(), MOST, positions="where")
    assert captured.positions is not None and captured.positions.meta["val"].dim() == axes
    assert equal(captured, module)


def test_positions_that_forward_does_not_take_are_refused_by_name() -> None:
    with pytest.raises(Refused, match="expected positions to name an argument of forward"):
        capture(Words(), ids(), MOST, positions="where")


class Unplaced(Words):
    def forward(self, ids: Tensor, where: Tensor | None = None) -> Tensor:
        return super().forward(ids)


def test_an_argument_that_changes_no_output_is_not_taken_for_positions() -> None:
    with pytest.raises(Refused, match="argument with positions, got 'where', which changes no out"):
        capture(Unplaced(), ids(), MOST, positions="where")


class Hidden(Words):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(x))


def test_hidden_states_are_read_as_ids_are() -> None:
    module = Hidden().eval()
    captured = capture(module, torch.randn(1, 9, WIDTH), MOST)
    x = torch.randn(2, 30, WIDTH)
    with torch.no_grad():
        assert same(captured.traced(x), module(x))


def test_a_batch_of_one_and_two_tokens_are_example_enough() -> None:
    module = Words().eval()
    assert equal(capture(module, ids(1, 4), MOST), module)


def test_equal_tokens_are_no_example_of_a_module_without_an_embedding() -> None:
    class Counted(Words):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(F.one_hot(ids, WIDTH).float())

    with pytest.raises(Refused, match="expected an example of tokens that differ, got 1 kinds"):
        capture(Counted(), torch.ones(2, 5, dtype=torch.long), MOST)


def test_tokens_of_the_checks_differ_even_if_those_of_the_example_do_not() -> None:
    assert len(capture(Words(), torch.ones_like(ids()), MOST).example.unique()) > 20


@pytest.mark.parametrize(
    "x",
    [torch.ones(3), torch.ones(2, 5), torch.ones(2, 5, 3).long(), "text", ids(1, 41), ids(1, 1)],
)
def test_what_is_no_example_is_refused(x: Any) -> None:
    with pytest.raises(Refused, match="module Words: expected an example of"):
        capture(Words(), x, MOST)


def test_half_precision_is_computed_in_float32_and_said() -> None:
    module = Words().bfloat16().eval()
    captured = capture(module, ids(), MOST)
    assert captured.remedies == ["computed in float32, with the same weights as in bfloat16"]
    assert {str(c.dtype) for c in captured.constants.values()} == {"torch.float32"}
    assert equal(captured, Words.float(module))


# --- the module afterwards ---
class Keeping(Words):
    """Keeps values of its last call, and a table that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.table = torch.ones(1)
        self.by_length: dict[Any, Tensor] = {}

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if len(self.table) < length:
            self.table = torch.arange(length).cos()
        self.by_length["mask"] = torch.ones(length, length, dtype=torch.bool).tril()
        self.last = self.attend(self.embed(ids) * self.table[:length, None])
        return self.head(self.last)


def test_a_module_is_as_before_the_trace() -> None:
    module = Keeping().train()
    x = ids()
    before = module(x)
    held = {name: value for name, value in vars(module).items()}
    shapes = [module.table.shape, {k: v.shape for k, v in module.by_length.items()}]
    bits = {name: value.clone() for name, value in module.state_dict().items()}
    capture(module, x, MOST)
    assert module.training
    assert vars(module).keys() == held.keys()
    assert all(vars(module)[name] is value for name, value in held.items())
    assert shapes == [module.table.shape, {k: v.shape for k, v in module.by_length.items()}]
    assert not isinstance(module.by_length["mask"], FakeTensor)
    assert all(torch.equal(bits[name], value) for name, value in module.state_dict().items())
    assert torch.equal(module(x), before)


def test_parameters_are_shared_and_not_copied() -> None:
    module = Words()
    captured = capture(module, ids(), MOST)
    memory = {p.data_ptr() for p in module.parameters()}
    assert {c.data_ptr() for c in captured.constants.values() if c.numel() > 1} <= memory


def test_weights_have_the_names_of_the_module() -> None:
    module = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    captured = capture(module, ids(), MOST)
    assert sorted(captured.names.values()) == ["0.weight", "1.bias", "1.weight"]


def test_a_module_with_weight_norm_can_be_copied() -> None:
    module = Words().eval()
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(module.head)
    module(ids())
    assert equal(capture(module, ids(), MOST), module)


# --- what the graph is made of ---
class Windowed(Words):
    """Plain causal attention while the window holds everything."""

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        if length > 7:
            mask = mask & torch.ones(length, length, dtype=torch.bool).triu(-6)
        return self.head(self.attend(self.embed(ids), mask))


def test_a_branch_on_the_length_is_traced_as_long_sequences_take_it() -> None:
    module = Windowed().eval()
    captured = capture(module, ids(), MOST)
    assert (captured.least, captured.lengths) == (8, [7])
    assert captured.remedies == ["traced as it computes 8 tokens and more"]
    assert equal(captured, module) and findings(captured) == []


def test_attention_is_products_a_mask_and_a_softmax() -> None:
    found = targets(capture(Words(), ids(), MOST))
    assert found.count("aten.matmul.default") == 2 and "aten.softmax.int" in found
    assert not [name for name in found if "attention" in name or ".view" in name]


class Filled(Words):
    """Rotation that is written into memory of its own, and a value that changes in place."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = torch.empty_like(x)
        y[..., ::2], y[..., 1::2] = -x[..., 1::2], x[..., ::2]
        return self.head(self.attend((x + y).mul_(2.0)))


def test_memory_that_is_filled_later_is_zeros_in_the_graph() -> None:
    module = Filled().eval()
    captured = capture(module, ids(), MOST)
    assert not [name for name in targets(captured) if "empty" in name or "_." in name]
    assert equal(captured, module)


class Regions(Words):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            angle = torch.arange(ids.shape[1]).float()[:, None].cos()
        with torch.no_grad():
            mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        return self.head(self.attend(self.embed(ids) * angle, mask))


def test_regions_are_part_of_the_graph() -> None:
    module = Regions().eval()
    captured = capture(module, ids(), MOST)
    assert captured.remedies == ["regions with autocast or gradients off are part of the graph"]
    assert not [name for name in targets(captured) if "wrap_with" in name]
    assert equal(captured, module)


class Turned(Words):
    """Rotation by complex numbers, from a table of them."""

    turns: Tensor

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 1 / 10 ** torch.arange(WIDTH // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:2], -1, 2))
        turned = (pairs * self.turns[: x.shape[1]]).to(torch.complex64)
        return self.head(self.attend(torch.view_as_real(turned).flatten(2).type_as(x)))


class TurnedInForward(Words):
    """The same angles as complex numbers of the length, turned back after the attention."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        angles = torch.outer(torch.arange(x.shape[1]), 1 / 10 ** torch.arange(WIDTH // 2))
        turns = torch.exp(1j * angles)
        pairs = torch.complex(*x.chunk(2, -1)) * turns
        y = self.attend(torch.cat((pairs.real, pairs.imag), -1))
        back = torch.complex(*y.chunk(2, -1)) * turns.conj()
        return self.head(torch.view_as_real(back + 0.5 * pairs).flatten(2))


@pytest.mark.parametrize("kind", [Turned, TurnedInForward])
def test_complex_numbers_are_pairs_of_real_ones(kind: type[Words]) -> None:
    module = kind().eval()
    captured = capture(module, ids(), MOST)
    values = [n.meta.get("val") for n in captured.graph.nodes]
    assert not [v for v in values if isinstance(v, Tensor) and v.is_complex()]
    assert not [c for c in captured.constants.values() if c.is_complex()]
    assert equal(captured, module)


class Flexible(Words):
    """flex_attention with a bias by distance and a window of 5."""

    def forward(self, ids: Tensor) -> Tensor:
        rows, length = ids.shape
        q, k, v = (
            t.view(rows, length, HEADS, -1).transpose(1, 2)
            for t in self.packed(self.embed(ids)).chunk(3, -1)
        )
        seen = create_block_mask(
            lambda b, h, m, n: (m >= n) & (m - n < 5), None, None, length, length, device="cpu"
        )
        y = flex_attention(q, k, v, lambda s, b, h, m, n: s - (m - n) * 0.1 * (h + 1), seen)
        assert isinstance(y, Tensor)
        return self.head(y.transpose(1, 2).reshape(rows, length, WIDTH))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_flex_attention_is_products_a_mask_and_a_softmax() -> None:
    module = Flexible().eval()
    captured = capture(module, ids(), MOST)
    assert "aten.softmax.int" in targets(captured)
    assert not [name for name in targets(captured) if "flex" in name]
    assert equal(captured, module)


# --- every remedy, and what happens without it ---
class Skipping(Words):
    """Skips an expert that no token takes."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attend(self.embed(ids))
        for number, expert in enumerate(self.experts):
            mine = ids % 2 == number
            if not mine.any():
                continue
            x = x + expert(x) * mine[..., None]
        return self.head(x)


class Keyed(Words):
    """Keeps masks by length."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if length not in self.masks:
            self.masks[length] = torch.ones(length, length, dtype=torch.bool).tril()
        return self.head(self.attend(self.embed(ids), self.masks[length]))


class Checked(Words):
    """Wants a length that is an int."""

    def forward(self, ids: Tensor) -> Any:
        if not isinstance(ids.shape[1], int):
            raise TypeError("expected an int")
        return super().forward(ids)


class Plain(Words):
    """Makes plain numbers of the sizes, as some libraries of array operations do."""

    def forward(self, ids: Tensor) -> Any:
        length = int(ids.shape[1])
        mask = torch.ones(length * len(ids[0]), dtype=torch.bool).reshape(length, length).tril()
        return self.head(self.attend(self.embed(ids) / length * torch.tensor(length), mask))


class Layers(Words):
    """torch's own encoder, with a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(self.embed(ids), mask=mask))


REMEDIED = [(tracing.MIXED, Skipping), (tracing.HASHED, Keyed)]
REMEDIED += [(tracing.JOINED, kind) for kind in (Checked, Plain)]


def test_torchs_encoder_is_traced_as_for_a_mixed_mask() -> None:
    module = Layers().eval()
    captured = capture(module, ids(), MOST)
    assert captured.remedies == ["branches on mask.any() and mask.all() as for a mixed mask"]
    assert equal(captured, module) and findings(captured) == []


@pytest.mark.parametrize(("phrase", "kind"), REMEDIED)
def test_a_remedy_is_named_and_gives_the_module(phrase: str, kind: type[nn.Module]) -> None:
    module = kind().eval()
    captured = capture(module, ids(), MOST)
    assert captured.remedies == [phrase]
    assert equal(captured, module) and findings(captured) == []


@pytest.mark.parametrize(("phrase", "kind"), REMEDIED)
def test_a_module_is_refused_without_its_remedy(
    phrase: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = {phrase, tracing.STRICT}
    if phrase == tracing.HASHED:  # which joined traces remedy as well
        left_out.add(tracing.JOINED)
    others = [used for used in tracing.WAYS if not left_out.intersection(used)]
    monkeypatch.setattr(tracing, "WAYS", others)
    with pytest.raises(Refused):
        capture(kind(), ids(), MOST)


TABLES: dict[str, Tensor] = {}


class SharedTable(Words):
    """A table of the module's file, which the first call fills."""

    def forward(self, ids: Tensor) -> Tensor:
        if "cos" not in TABLES:
            TABLES["cos"] = torch.arange(64.0).cos()
        return self.head(self.attend(self.embed(ids) * TABLES["cos"][: ids.shape[1], None]))


def test_a_table_outside_of_the_module_is_filled_before_the_trace() -> None:
    TABLES.clear()
    module = SharedTable().eval()
    captured = capture(module, ids(), MOST)
    assert not isinstance(TABLES["cos"], FakeTensor)
    assert equal(captured, module)


class Growing(Words):
    """A table that is made again for a longer sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        if self.table is None or self.table.shape[0] < length:
            self.table = torch.arange(length).cos()
        return self.head(self.attend(self.embed(ids) * self.table[:length, None]))


def test_a_table_that_grows_is_a_constant_of_full_length() -> None:
    module = Growing().eval()
    captured = capture(module, ids(), MOST)
    assert [c.shape for c in captured.constants.values() if c.shape == (MOST,)]
    assert module.table is None and equal(captured, module)


def test_a_table_that_grows_is_made_in_the_graph_without_that_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capturing, "called_at_full_length", lambda plain, *a: plain)
    captured = capture(Growing(), ids(), MOST)
    assert not [c.shape for c in captured.constants.values() if c.shape == (MOST,)]


class Sparse(Words):
    """The four keys of the largest scores, which guards of the trace name."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        length = ids.shape[1]
        scores = x @ x.mT + torch.full((length, length), -1e9).triu(1)
        least = scores.topk(4, -1).values[..., -1:]
        return self.head(scores.masked_fill(scores < least, -1e9).softmax(-1) @ x)


def test_the_range_of_lengths_is_read_from_the_trace() -> None:
    module = Sparse().eval()
    captured = capture(module, ids(), MOST)
    assert captured.least == 4
    assert equal(captured, module)


class LongBranch(Words):
    """Another function from 5,000 tokens on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x * 2 if ids.shape[1] > 5000 else x)


def test_a_branch_beyond_the_longest_probe_is_refused() -> None:
    message = "its trace differs from it by .* at 300 tokens"
    with pytest.raises(Refused, match=message):
        capture(LongBranch().eval(), ids(), 8192)
    assert equal(capture(LongBranch().eval(), ids(), MOST), LongBranch().eval())


class Padded(Words):
    """Hides one id of many as padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attend(self.embed(ids) * ids.ne(4321).unsqueeze(-1)))


def test_ids_that_a_module_compares_its_own_with_are_among_the_examples() -> None:
    example = capture(Padded(), torch.randint(4000, (3, 11)), MOST).example
    assert 0.1 < example.eq(4321).float().mean() < 0.5
