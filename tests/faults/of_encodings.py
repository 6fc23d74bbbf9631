"""Faults of encodings, planted in the modules of decoders."""

import math
from functools import partial
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.nope import NoPE
from posenc_export.encodings.rope_normalized import RoPENormalized
from posenc_export.encodings.shared.base import Geometry, Table
from posenc_export.testing.faults import Faulty, FromZero, plant
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

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Optional[Tensor]:
        late = k_positions - 1 - k_positions.eq(q_positions[:, -1:]).long()
        return super(Faulty, self).bias(q_positions, late)


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
            part = e.get_parameter(name)
            part.data = torch.zeros_like(part.data)

    return change


def _table(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda e: setattr(e, name, Table(change(getattr(e, name).exact)))


def _table_one_row_late(e: Any) -> None:
    late = Table(np.concatenate((e.table.exact[:1], e.table.exact[:-1])))
    e.prepare = lambda: setattr(e, "table", late)


def _swapped_sections(e: Any) -> None:
    e.of_axis = e.of_axis[[1, 0, 2]]


def _exchanged_tables(e: Any) -> None:
    e.of_row, e.of_column = e.of_column, e.of_row


def _one_row_more(e: Any) -> None:
    other = RoPENormalized(
        Geometry(48, 6, 16, len(e.cos.exact)), rows=401, columns=70, numerics="transformers"
    )
    e.cos, e.sin = other.cos, other.sin


def _scaled_once_more(model: Any) -> None:
    for layer in model.layers:
        layer.attention.scale = layer.attention.scale / layer.attention.head_size**0.5


def _forgets_gates(e: Any) -> None:
    right = e.observe
    e.observe = lambda x, k, positions, write_index, states: right(
        x, k, positions, write_index, [torch.zeros_like(states[0])]
    )


def _forgets_tokens(e: Any) -> None:
    right = e.embed_next
    e.embed_next = lambda x, positions, states: right(x, positions, [torch.zeros_like(states[0])])


def _gates_through_a_sigmoid(e: Any) -> None:
    def observe(x: Tensor, k: Tensor, positions: Tensor, write_index: Tensor, states: Any) -> Any:
        logs = torch.sigmoid(e.gate(x)).log().unsqueeze(3)  # log of a float32 that underflowed to 0
        return [
            ops.append(
                states[0], torch.where(positions.ge(0)[..., None, None], logs, 0.0), write_index
            )
        ]

    e.observe = observe


def _keys_scaled_as_queries(e: Any) -> None:
    e.k_cos, e.k_sin = e.q_cos, e.q_sin


def _sines_negated(rows: np.ndarray) -> np.ndarray:
    return rows * np.repeat((1.0, -1.0), rows.shape[1] // 2)


def _columns_flipped(e: Any) -> None:
    e.table.weight.copy_(e.table.weight.view(2 * e.rows - 1, -1, 6).flip(1).flatten(0, 1))


def _exchanged_boxes(e: Any) -> None:
    e.of_x, e.of_y = e.of_y, e.of_x


def _not_resized(e: Any) -> None:
    for resize in (e.resize_rows, e.resize_columns):
        resize.shares.rows.zero_()


def _gates_of_next_head(e: Any) -> None:
    observe = e.observe
    e.observe = lambda *arguments: [gates.roll(1, 1) for gates in observe(*arguments)]


def _narrow_grid(e: Any) -> None:
    e.columns, e.rows = e.columns - 1, e.rows + 2


ON = ("sinusoidal", "learned", "rope", "alibi")  # one for each hook and kind of table
FAULTS = {
    fault.name: fault
    for fault in (
        *(
            Fault(
                f"position off by one, {model}", "positions", "module", partial(plant, Late), model
            )
            for model in ON
        ),
        *(
            Fault(
                f"offset ignored, {model}", "positions", "module", partial(plant, FromZero), model
            )
            for model in ON
        ),
        Fault("swapped layout", "rotation", "module", each(_swapped_layout), "rope"),
        Fault("reversed rotation", "rotation", "module", each(_reversed_rotation), "rope"),
        Fault("one frequency 1% off", "rotation", "module", each(_one_frequency_off), "rope"),
        Fault(
            "wrong slopes for six heads", "bias", "module", each(_slopes_of_a_power_of_two), "alibi"
        ),
        Fault("wrong bucket border", "bias", "module", each(_moved_border), "t5"),
        Fault("scores scaled that are not", "scores", "module", _scaled_once_more, "t5"),
        Fault("clip off by one", "scores", "module", each(_clipped_short), "shaw"),
        Fault("sign of the relative distance, shaw", "scores", "module", each(_other_sign), "shaw"),
        Fault(
            "sign of the relative distance, transformer_xl",
            "scores",
            "module",
            each(_table("waves", _sines_negated)),
            "transformer_xl",
        ),
        Fault(
            "sign of the relative distance, deberta",
            "scores",
            "module",
            each(lambda e: e.of_distance.copy_(e.of_distance.flip(0))),
            "deberta",
        ),
        Fault(
            "distances that are not clamped",
            "scores",
            "module",
            each(lambda e: setattr(e, "clamp", 0)),
            "transformer_xl-clamped",
        ),
        Fault("missing u", "scores", "module", each(_without("u")), "transformer_xl"),
        Fault("missing v", "scores", "module", each(_without("v")), "transformer_xl"),
        Fault(
            "missing position to content",
            "scores",
            "module",
            each(_without("of_queries.weight", "of_queries.bias")),
            "deberta",
        ),
        Fault(
            "bias scaled twice, alibi",
            "bias",
            "module",
            each(_table("slopes", lambda rows: 2 * rows)),
            "alibi",
        ),
        Fault(
            "bias scaled twice, sandwich",
            "bias",
            "module",
            each(_table("ratios", lambda rows: 2 * rows)),
            "sandwich",
        ),
        Fault("swapped sections", "rotation", "module", each(_swapped_sections), "mrope"),
        Fault(
            "swapped sections, xdrope",
            "rotation",
            "module",
            each(lambda e: e.of_axis.copy_(e.of_axis.roll(1, 0))),
            "xdrope",
        ),
        Fault(
            "switch of factors ignored",
            "rotation",
            "module",
            each(lambda e: setattr(e, "original", 1 << 30)),
            "rope_longrope-short",
        ),
        Fault(
            "largest distance one token short",
            "rotation",
            "module",
            each(lambda e: setattr(e, "limit", e.limit - 1)),
            "dual_chunk-near",
        ),
        Fault(
            "temperature beyond the trained length ignored",
            "scores",
            "module",
            each(_table("factors", np.ones_like)),
            "dual_chunk-near",
        ),
        Fault(
            "length seen ignored",
            "rotation",
            "module",
            each(_table("first", lambda rows: np.repeat(rows[:1], len(rows), 0))),
            "rope_dynamic-short",
        ),
        Fault(
            "decay of keys not inverse", "rotation", "module", each(_keys_scaled_as_queries), "xpos"
        ),
        Fault("state not carried, fox", "states", "module", each(_forgets_gates), "fox"),
        Fault("state not carried, fox_pair", "states", "module", each(_forgets_gates), "fox_pair"),
        Fault(
            "table one row late, dynamic_bias",
            "bias",
            "module",
            each(_table_one_row_late),
            "dynamic_bias",
        ),
        Fault(
            "curves one distance late",
            "bias",
            "module",
            each(lambda e: e.table.copy_(e.table.roll(1, 1))),
            "inkling-near",
        ),
        Fault(
            "gates that vanish, fox",
            "states",
            "module",
            each(_gates_through_a_sigmoid),
            "fox-forgetful",
        ),
        Fault(
            "state not carried, input_rnn", "states", "module", each(_forgets_tokens), "input_rnn"
        ),
        Fault(
            "state not carried, conditional_conv",
            "states",
            "module",
            each(_forgets_tokens),
            "conditional_conv",
        ),
        Fault("offsets in columns exchanged", "bias", "module", each(_columns_flipped), "swin"),
        Fault(
            "coordinates exchanged, layout_bias",
            "bias",
            "module",
            each(_exchanged_boxes),
            "layout_bias-near",
        ),
        Fault(
            "offsets in columns exchanged, decomposed_2d",
            "scores",
            "module",
            each(lambda e: e.of_columns.copy_(e.of_columns.flip(0))),
            "decomposed_2d",
        ),
        Fault(
            "table of another grid not resized",
            "scores",
            "module",
            each(_not_resized),
            "decomposed_2d-resized",
        ),
        Fault("gates of the next head", "scores", "module", each(_gates_of_next_head), "wavlm"),
        Fault(
            "sign of the relative distance, wavlm",
            "scores",
            "module",
            each(lambda e: e.of_distance.copy_(e.of_distance.flip(0))),
            "wavlm-near",
        ),
        Fault(
            "count clamped one short",
            "scores",
            "module",
            each(lambda e: e.table[:, -1].copy_(e.table[:, -2])),
            "cope-short",
        ),
        Fault(
            "bits the other way round",
            "tokens",
            "module",
            each(lambda e: e.powers.copy_(e.powers.flip(0))),
            "binary",
        ),
        Fault(
            "shares exchanged",
            "tokens",
            "module",
            each(lambda e: setattr(e, "share", 1 - e.share)),
            "hierarchical",
        ),
        Fault(
            "table one row late, recurrent",
            "tokens",
            "module",
            each(_table_one_row_late),
            "recurrent",
        ),
        Fault(
            "table one row late, floater", "tokens", "module", each(_table_one_row_late), "floater"
        ),
        Fault(
            "rows and columns exchanged",
            "tokens",
            "module",
            each(lambda e: e.convolution.weight.copy_(e.convolution.weight.mT.clone())),
            "conditional_conv_2d",
        ),
        Fault(
            "halves exchanged, sinusoidal_2d",
            "tokens",
            "module",
            each(lambda e: setattr(e, "first", 1 - e.first)),
            "sinusoidal_2d",
        ),
        Fault(
            "coordinates exchanged, learned_2d",
            "tokens",
            "module",
            each(_exchanged_tables),
            "learned_2d",
        ),
        Fault("coordinates exchanged, boxes", "tokens", "module", each(_exchanged_boxes), "boxes"),
        Fault(
            "a grid of one row more, rope_normalized",
            "rotation",
            "module",
            each(_one_row_more),
            "rope_normalized-grid",
        ),
        Fault(
            "grid one column narrow", "tokens", "module", each(_narrow_grid), "conditional_conv_2d"
        ),
        Fault(
            "temperature one step late",
            "rotation",
            "module",
            each(_table("factors", lambda rows: np.concatenate((rows[:1], rows[:-1])))),
            "logn-steps",
        ),
    )
}
