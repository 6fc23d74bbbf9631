"""The grid must detect every fault that is planted in an encoding, and pass correct modules."""

import math
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.rope_normalized import RoPENormalized
from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.export.describe import Model
from tests.export.planting import Plant, certificate_of, each
from tests.tiny import block, decoder


class Shifted(PositionEncoding):
    """Wraps an encoding; keys or tokens are one position late."""

    def __init__(self, inner: PositionEncoding) -> None:
        super().__init__()
        self.inner = inner

    def oracle(self) -> Oracle:
        return self.inner.oracle()

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner.embed(x, positions - 1)

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, positions)[0], self.inner.rotate(q, k, positions - 1)[1]

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return self.inner.bias(q_positions, k_positions - 1 - k_positions.eq(q_positions[:, -1:]).long())


class FromZero(Shifted):
    """Wraps an encoding; positions of every call start at 0."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner.embed(x, torch.arange(x.size(1)).expand(x.size(0), -1))

    def rotate(self, q: Tensor, k: Tensor, positions: Tensor) -> Tuple[Tensor, Tensor]:
        return self.inner.rotate(q, k, torch.arange(q.size(1)).expand(q.size(0), -1))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        return self.inner.bias(torch.arange(q_positions.size(1)).expand(q_positions.size(0), -1), k_positions)


def _wrap(cls: type) -> Plant:
    def plant(model: Model) -> None:
        wrapped: Dict[int, PositionEncoding] = {}
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, PositionEncoding):
                    setattr(module, name, wrapped.setdefault(id(child), cls(child)))

    return plant


def _swapped_layout(e: Any) -> None:
    e.interleaved = True


def _reversed_rotation(e: Any) -> None:
    e.sin = Table(-e.sin.exact)


def _one_frequency_off(e: Any) -> None:
    positions, size = np.arange(len(e.cos.exact)), e.size
    angle = 1.01 * positions * e.theta ** (-2 * (size // 4) / size)
    cos, sin = e.cos.exact.copy(), e.sin.exact.copy()
    cos[:, size // 4], sin[:, size // 4] = np.cos(angle), np.sin(angle)
    e.cos, e.sin = Table(cos), Table(sin)


def _slopes_of_a_power_of_two(e: Any) -> None:
    heads = len(e.slopes.exact)
    e.slopes = Table(np.array([math.exp2(-8 * (h + 1) / heads) for h in range(heads)]))


PLANTS: Dict[str, Tuple[str, Plant]] = {
    "position off by one, sinusoidal": ("sinusoidal", _wrap(Shifted)),
    "position off by one, learned": ("learned", _wrap(Shifted)),
    "position off by one, rope": ("rope", _wrap(Shifted)),
    "position off by one, alibi": ("alibi", _wrap(Shifted)),
    "offset ignored, sinusoidal": ("sinusoidal", _wrap(FromZero)),
    "offset ignored, learned": ("learned", _wrap(FromZero)),
    "offset ignored, rope": ("rope", _wrap(FromZero)),
    "offset ignored, alibi": ("alibi", _wrap(FromZero)),
    "swapped layout": ("rope", each(_swapped_layout)),
    "reversed rotation": ("rope", each(_reversed_rotation)),
    "one frequency 1% off": ("rope", each(_one_frequency_off)),
    "wrong slopes for six heads": ("alibi", each(_slopes_of_a_power_of_two)),
}


def _moved_border(e: Any) -> None:
    border = int(torch.nonzero(e.of_distance[17:] != e.of_distance[16:-1])[0]) + 17
    e.of_distance[border] = e.of_distance[border - 1]


def _clipped_short(e: Any) -> None:
    e.left, e.keys.data, e.values.data = e.left - 1, e.keys.data[1:], e.values.data[1:]


def _other_sign(e: Any) -> None:
    e.keys.data, e.values.data = e.keys.data.flip(0), e.values.data.flip(0)


def _without(*names: str) -> Callable[[Any], None]:
    def change(e: Any) -> None:
        for name in names:
            part = e.get_parameter(name)
            part.data = torch.zeros_like(part.data)

    return change


def _table(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    return lambda e: setattr(e, name, Table(change(getattr(e, name).exact)))


def _table_one_row_late(e: Any) -> None:
    late = Table(np.concatenate((e.table.exact[:1], e.table.exact[:-1])))
    e.prepare = lambda: setattr(e, "table", late)


def _swapped_sections(e: Any) -> None:
    e.of_axis = e.of_axis[[1, 0, 2]]


def _exchanged_tables(e: Any) -> None:
    e.of_row, e.of_column = e.of_column, e.of_row


def _one_row_more(e: Any) -> None:
    other = RoPENormalized(Geometry(48, 6, 16, len(e.cos.exact)), rows=401, columns=70, numerics="transformers")
    e.cos, e.sin = other.cos, other.sin


def _scaled_once_more(model: Any) -> None:
    for layer in model.layers:
        layer.attention.scale = layer.attention.scale / layer.attention.head_size**0.5


def _forgets_gates(e: Any) -> None:
    right = e.observe
    e.observe = lambda x, k, positions, write_index, states: right(x, k, positions, write_index, [torch.zeros_like(states[0])])


def _forgets_tokens(e: Any) -> None:
    right = e.embed_next
    e.embed_next = lambda x, positions, states: right(x, positions, [torch.zeros_like(states[0])])


def _gates_through_a_sigmoid(e: Any) -> None:
    def observe(x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: Any) -> Any:
        logs = torch.sigmoid(e.gate(x)).log().unsqueeze(3)  # log of a float32 that underflowed to 0
        return [ops.append(states[0], torch.where(positions.ge(0)[..., None, None], logs, 0.0), write_index)]

    e.observe = observe


def _keys_scaled_as_queries(e: Any) -> None:
    e.k_cos, e.k_sin = e.q_cos, e.q_sin


PLANTS |= {
    "wrong bucket border": ("t5", each(_moved_border)),
    "scores scaled that are not": ("t5", _scaled_once_more),
    "clip off by one": ("shaw", each(_clipped_short)),
    "sign of the relative distance, shaw": ("shaw", each(_other_sign)),
    "sign of the relative distance, transformer_xl": ("transformer_xl", each(_table("waves", lambda rows: rows * np.repeat((1.0, -1.0), rows.shape[1] // 2)))),
    "sign of the relative distance, deberta": ("deberta", each(lambda e: e.of_distance.copy_(e.of_distance.flip(0)))),
    "distances that are not clamped": ("transformer_xl-clamped", each(lambda e: setattr(e, "clamp", 0))),
    "missing u": ("transformer_xl", each(_without("u"))),
    "missing v": ("transformer_xl", each(_without("v"))),
    "missing position to content": ("deberta", each(_without("of_queries.weight", "of_queries.bias"))),
    "bias scaled twice, alibi": ("alibi", each(_table("slopes", lambda rows: 2 * rows))),
    "bias scaled twice, sandwich": ("sandwich", each(_table("ratios", lambda rows: 2 * rows))),
    "swapped sections": ("mrope", each(_swapped_sections)),
    "switch of factors ignored": ("rope_longrope-short", each(lambda e: setattr(e, "original", 1 << 30))),
    "length seen ignored": ("rope_dynamic-short", each(_table("first", lambda rows: np.repeat(rows[:1], len(rows), 0)))),
    "decay of keys not inverse": ("xpos", each(_keys_scaled_as_queries)),
    "state not carried, fox": ("fox", each(_forgets_gates)),
    "state not carried, fox_pair": ("fox_pair", each(_forgets_gates)),
    "table one row late, dynamic_bias": ("dynamic_bias", each(_table_one_row_late)),
    "curves one distance late": ("inkling-near", each(lambda e: e.table.copy_(e.table.roll(1, 1)))),
    "gates that vanish, fox": ("fox-forgetful", each(_gates_through_a_sigmoid)),
    "state not carried, input_rnn": ("input_rnn", each(_forgets_tokens)),
    "state not carried, conditional_conv": ("conditional_conv", each(_forgets_tokens)),
    "offsets in columns exchanged": ("swin", each(lambda e: e.table.weight.copy_(e.table.weight.view(2 * e.rows - 1, -1, 6).flip(1).flatten(0, 1)))),
    "count clamped one short": ("cope-short", each(lambda e: e.table[:, -1].copy_(e.table[:, -2]))),
    "bits the other way round": ("binary", each(lambda e: e.powers.copy_(e.powers.flip(0)))),
    "shares exchanged": ("hierarchical", each(lambda e: setattr(e, "share", 1 - e.share))),
    "table one row late, recurrent": ("recurrent", each(_table_one_row_late)),
    "table one row late, floater": ("floater", each(_table_one_row_late)),
    "rows and columns exchanged": ("conditional_conv_2d", each(lambda e: e.convolution.weight.copy_(e.convolution.weight.mT.clone()))),
    "halves exchanged, sinusoidal_2d": ("sinusoidal_2d", each(lambda e: setattr(e, "first", 1 - e.first))),
    "coordinates exchanged, learned_2d": ("learned_2d", each(_exchanged_tables)),
    "a grid of one row more, rope_normalized": ("rope_normalized-grid", each(_one_row_more)),
    "grid one column narrow": ("conditional_conv_2d", each(lambda e: setattr(e, "columns", e.columns - 1) or setattr(e, "rows", e.rows + 2))),
    "temperature one step late": ("logn-steps", each(_table("factors", lambda rows: np.concatenate((rows[:1], rows[:-1]))))),
}


@pytest.mark.parametrize("variant", ["rope", "fox"])  # the parity tests check the others
def test_a_correct_module_passes(variant: str) -> None:
    assert certificate_of(decoder(variant))["passed"]


@pytest.mark.parametrize("variant", ["fox", "fox_pair", "inkling-near"])
def test_a_correct_module_with_content_scores_and_a_window_passes(variant: str) -> None:
    config = block(variant)
    assert certificate_of(replace(config, attention=replace(config.attention, sees={"name": "window", "size": 5})))["passed"]


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=pytest.mark.xdist_group(PLANTS[fault][0])) for fault in PLANTS])
def test_a_planted_fault_is_detected(fault: str) -> None:
    variant, plant = PLANTS[fault]
    assert not certificate_of(decoder(variant), plant)["passed"]
