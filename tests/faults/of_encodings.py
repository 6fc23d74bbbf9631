"""Faults of encodings, planted in the modules of decoders."""

from functools import partial
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.nope import NoPE
from posenc_export.encodings.rope_normalized import RoPENormalized
from posenc_export.encodings.shared.base import Geometry, Table
from tests.faults.faulty import Faulty, FromZero, plant
from tests.faults.planting import Fault

Change = Callable[[Any], None]  # changes an encoding or a model in place


def each(change: Change) -> Change:
    """Return a function that changes every encoding of a model once, except nope."""

    def plant(model: Any) -> None:
        encodings = [
            model.token_encoding,
            *(attention.encoding for attention in model.attentions()),
        ]
        for encoding in {id(one): one for one in encodings if not isinstance(one, NoPE)}.values():
            change(encoding)

    return plant


class Late(Faulty):
    """Keys or tokens are one position late."""

    def changed_key_positions(self, positions: Tensor, called: Tensor) -> Tensor:
        return positions - 1

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        late = k_positions - 1 - k_positions.eq(q_positions[:, -1:]).long()
        return super(Faulty, self).bias(q_positions, late)


def _one_frequency_off(e: Any) -> None:
    positions, size = np.arange(len(e.cos.rows)), e.size
    angle = 1.01 * positions * e.theta ** (-2 * (size // 4) / size)
    cos, sin = e.cos.rows.numpy().copy(), e.sin.rows.numpy().copy()
    cos[:, size // 4], sin[:, size // 4] = np.cos(angle), np.sin(angle)
    e.cos, e.sin = Table(cos), Table(sin)


def _slopes_of_a_power_of_two(slopes: np.ndarray) -> np.ndarray:
    return np.exp2(-8 * (np.arange(len(slopes)) + 1) / len(slopes))


def _moved_border(e: Any) -> None:
    border = int(torch.nonzero(e.of_distance[17:] != e.of_distance[16:-1])[0]) + 17
    e.of_distance[border] = e.of_distance[border - 1]


def _clipped_short(e: Any) -> None:
    e.left, e.keys.data, e.values.data = e.left - 1, e.keys.data[1:], e.values.data[1:]


def _other_sign(e: Any) -> None:
    e.keys.data, e.values.data = e.keys.data.flip(0), e.values.data.flip(0)


def _without(*names: str) -> Change:
    def change(e: Any) -> None:
        for name in names:
            e.get_parameter(name).data.zero_()

    return change


def _put(name: str, change: Callable[[Any], Any]) -> Change:
    """Change an attribute."""
    return lambda e: setattr(e, name, change(getattr(e, name)))


def _table(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return _put(name, lambda table: Table(change(table.rows.numpy())))


def _copied(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change the numbers of a buffer or parameter."""
    return lambda e: getattr(e, name).copy_(change(getattr(e, name)).clone())


def _exchanged(one: str, other: str) -> Change:
    def change(e: Any) -> None:
        first, second = getattr(e, one), getattr(e, other)
        setattr(e, one, second)
        setattr(e, other, first)

    return change


def _late(rows: np.ndarray) -> np.ndarray:
    return np.concatenate((rows[:1], rows[:-1]))


def _table_one_row_late(e: Any) -> None:
    late = Table(_late(e.table.rows.numpy()))
    e.prepare = lambda: setattr(e, "table", late)


def _one_row_more(e: Any) -> None:
    sizes = {"rows": 401, "columns": 70}
    geometry = Geometry(48, 6, 16, len(e.cos.rows))
    other = RoPENormalized(geometry, **sizes)
    e.cos, e.sin = other.cos, other.sin


def _scaled_once_more(model: Any) -> None:
    for layer in model.layers:
        layer.attention.scale = layer.attention.scale / layer.attention.head_size**0.5


def _forgets(hook: str) -> Change:
    """Give a hook an empty state in place of that of the last call."""

    def change(e: Any) -> None:
        right = getattr(e, hook)
        setattr(e, hook, lambda *given: right(*given[:-1], [torch.zeros_like(given[-1][0])]))

    return change


def _gates_through_a_sigmoid(e: Any) -> None:
    def observe(x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: Any) -> Any:
        logs = torch.sigmoid(e.gate(x)).log().unsqueeze(3)  # log of a float32 that underflowed to 0
        logs = torch.where(positions.ge(0)[..., None, None], logs, 0.0)
        return [ops.append(states[0], logs, write_index)]

    e.observe = observe


def _sines_negated(rows: np.ndarray) -> np.ndarray:
    return rows * np.repeat((1.0, -1.0), rows.shape[1] // 2)


def _columns_flipped(e: Any) -> None:
    e.table.weight.copy_(e.table.weight.view(2 * e.rows - 1, -1, 6).flip(1).flatten(0, 1))


def _gates_of_next_head(e: Any) -> None:
    observe = e.observe
    e.observe = lambda *arguments: [gates.roll(1, 1) for gates in observe(*arguments)]


def _narrow_grid(e: Any) -> None:
    e.columns, e.rows = e.columns - 1, e.rows + 2


def _keys_scaled_as_queries(e: Any) -> None:
    e.k_cos, e.k_sin = e.q_cos, e.q_sin


def _flipped(x: Tensor) -> Tensor:
    return x.flip(0)


ON = ("sinusoidal", "learned", "rope", "alibi")  # one for each hook and kind of table
# What is wrong, the decoder, and the change of each of its encodings.
CHANGES: tuple[tuple[str, str, Change], ...] = (
    ("swapped layout", "rope", _put("interleaved", lambda _: True)),
    ("reversed rotation", "rope", _table("sin", np.negative)),
    ("one frequency 1% off", "rope", _one_frequency_off),
    ("wrong slopes for six heads", "alibi", _table("slopes", _slopes_of_a_power_of_two)),
    ("wrong bucket border", "t5", _moved_border),
    ("clip off by one", "shaw", _clipped_short),
    ("sign of the relative distance, shaw", "shaw", _other_sign),
    ("sign of the relative distance, transformer_xl", "transformer_xl",
        _table("waves", _sines_negated)),
    ("sign of the relative distance, deberta", "deberta", _copied("of_distance", _flipped)),
    ("distances that are not clamped", "transformer_xl-clamped", _put("clamp", lambda _: 0)),
    ("missing u", "transformer_xl", _without("u")),
    ("missing v", "transformer_xl", _without("v")),
    ("missing position to content", "deberta", _without("of_queries.weight", "of_queries.bias")),
    ("bias scaled twice, alibi", "alibi", _table("slopes", lambda rows: 2 * rows)),
    ("bias scaled twice, sandwich", "sandwich", _table("ratios", lambda rows: 2 * rows)),
    ("swapped sections", "mrope", _put("of_axis", lambda axes: axes[[1, 0, 2]])),
    ("swapped sections, xdrope", "xdrope", _copied("of_axis", lambda axes: axes.roll(1, 0))),
    ("switch of factors ignored", "rope_longrope-short", _put("original", lambda _: 1 << 30)),
    ("largest distance one token short", "dual_chunk-near", _put("limit", lambda n: n - 1)),
    ("temperature beyond the trained length ignored", "dual_chunk-near",
        _table("factors", np.ones_like)),
    ("length seen ignored", "rope_dynamic-short",
        _table("first", lambda rows: np.repeat(rows[:1], len(rows), 0))),
    ("decay of keys not inverse", "xpos", _keys_scaled_as_queries),
    ("state not carried, fox", "fox", _forgets("observe")),
    ("state not carried, fox_pair", "fox_pair", _forgets("observe")),
    ("table one row late, dynamic_bias", "dynamic_bias", _table_one_row_late),
    ("curves one distance late", "inkling-near", _copied("table", lambda x: x.roll(1, 1))),
    ("gates that vanish, fox", "fox-forgetful", _gates_through_a_sigmoid),
    ("state not carried, input_rnn", "input_rnn", _forgets("embed_next")),
    ("state not carried, conditional_conv", "conditional_conv", _forgets("embed_next")),
    ("offsets in columns exchanged", "swin", _columns_flipped),
    ("coordinates exchanged, layout_bias", "layout_bias-near", _exchanged("of_x", "of_y")),
    ("offsets in columns exchanged, decomposed_2d", "decomposed_2d",
        _copied("of_columns", _flipped)),
    ("gates of the next head", "wavlm", _gates_of_next_head),
    ("sign of the relative distance, wavlm", "wavlm-near", _copied("of_distance", _flipped)),
    ("count clamped one short", "cope-short", lambda e: e.table[:, -1].copy_(e.table[:, -2])),
    ("bits the other way round", "binary", _copied("powers", _flipped)),
    ("shares exchanged", "hierarchical", _put("share", lambda share: 1 - share)),
    ("table one row late, recurrent", "recurrent", _table_one_row_late),
    ("table one row late, floater", "floater", _table_one_row_late),
    ("rows and columns exchanged", "conditional_conv_2d",
        lambda e: e.convolution.weight.copy_(e.convolution.weight.mT.clone())),
    ("halves exchanged, sinusoidal_2d", "sinusoidal_2d", _put("first", lambda first: 1 - first)),
    ("coordinates exchanged, learned_2d", "learned_2d", _exchanged("of_row", "of_column")),
    ("coordinates exchanged, boxes", "boxes", _exchanged("of_x", "of_y")),
    ("a grid of one row more, rope_normalized", "rope_normalized-grid", _one_row_more),
    ("grid one column narrow", "conditional_conv_2d", _narrow_grid),
    ("temperature one step late", "logn-steps", _table("factors", _late)),
)  # fmt: skip
FAULTS = {
    fault.name: fault
    for fault in (
        *(
            Fault(f"position off by one, {model}", "module", partial(plant, Late), model)
            for model in ON
        ),
        *(
            Fault(f"offset ignored, {model}", "module", partial(plant, FromZero), model)
            for model in ON
        ),
        *(Fault(name, "module", each(change), model) for name, model, change in CHANGES),
        Fault("scores scaled that are not", "module", _scaled_once_more, "t5"),
    )
}
