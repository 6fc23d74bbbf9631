"""The grid must detect every fault that is planted here, and pass correct modules."""

import math
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from posenc_export import ops
from posenc_export.encodings.base import Geometry, Oracle, PositionEncoding, Table
from posenc_export.encodings.nope import NoPE
from posenc_export.encodings.rope_normalized import RoPENormalized
from posenc_export.export import export
from posenc_export.export.describe import Model, bound_of, eager
from posenc_export.export.expected import of_module
from posenc_export.export.verify import certify
from posenc_export.models.parts.residuals import Post, Pre
from posenc_export.models.presets import seeded
from posenc_export.models.short import decoder_config
from posenc_export.numerics import worst_error
from posenc_export.runtime import Session, load
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.proof import Expected
from posenc_export.runtime.scenarios import last_of_ragged
from posenc_export.runtime.torch_graph import TorchGraph
from tests.tiny import block, decoder, encoder
from tests.traces import sources

Plant = Callable[[Model], None]


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


def _each(change: Callable[[Any], None]) -> Plant:
    """Change every encoding of a model once, except nope."""

    def plant(model: Any) -> None:
        found = [model.token_encoding, *(attention.encoding for attention in model.attentions())]
        for encoding in {id(one): one for one in found if not isinstance(one, NoPE)}.values():
            change(encoding)

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
    "swapped layout": ("rope", _each(_swapped_layout)),
    "reversed rotation": ("rope", _each(_reversed_rotation)),
    "one frequency 1% off": ("rope", _each(_one_frequency_off)),
    "wrong slopes for six heads": ("alibi", _each(_slopes_of_a_power_of_two)),
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
    "wrong bucket border": ("t5", _each(_moved_border)),
    "scores scaled that are not": ("t5", _scaled_once_more),
    "clip off by one": ("shaw", _each(_clipped_short)),
    "sign of the relative distance, shaw": ("shaw", _each(_other_sign)),
    "sign of the relative distance, transformer_xl": ("transformer_xl", _each(_table("waves", lambda rows: rows * np.repeat((1.0, -1.0), rows.shape[1] // 2)))),
    "sign of the relative distance, deberta": ("deberta", _each(lambda e: e.of_distance.copy_(e.of_distance.flip(0)))),
    "distances that are not clamped": ("transformer_xl-clamped", _each(lambda e: setattr(e, "clamp", 0))),
    "missing u": ("transformer_xl", _each(_without("u"))),
    "missing v": ("transformer_xl", _each(_without("v"))),
    "missing position to content": ("deberta", _each(_without("of_queries.weight", "of_queries.bias"))),
    "bias scaled twice, alibi": ("alibi", _each(_table("slopes", lambda rows: 2 * rows))),
    "bias scaled twice, sandwich": ("sandwich", _each(_table("ratios", lambda rows: 2 * rows))),
    "swapped sections": ("mrope", _each(_swapped_sections)),
    "switch of factors ignored": ("rope_longrope-short", _each(lambda e: setattr(e, "original", 1 << 30))),
    "length seen ignored": ("rope_dynamic-short", _each(_table("first", lambda rows: np.repeat(rows[:1], len(rows), 0)))),
    "decay of keys not inverse": ("xpos", _each(_keys_scaled_as_queries)),
    "state not carried, fox": ("fox", _each(_forgets_gates)),
    "state not carried, fox_pair": ("fox_pair", _each(_forgets_gates)),
    "table one row late, dynamic_bias": ("dynamic_bias", _each(_table_one_row_late)),
    "curves one distance late": ("inkling-near", _each(lambda e: e.table.copy_(e.table.roll(1, 1)))),
    "gates that vanish, fox": ("fox-forgetful", _each(_gates_through_a_sigmoid)),
    "state not carried, input_rnn": ("input_rnn", _each(_forgets_tokens)),
    "state not carried, conditional_conv": ("conditional_conv", _each(_forgets_tokens)),
    "offsets in columns exchanged": ("swin", _each(lambda e: e.table.weight.copy_(e.table.weight.view(2 * e.rows - 1, -1, 6).flip(1).flatten(0, 1)))),
    "count clamped one short": ("cope-short", _each(lambda e: e.table[:, -1].copy_(e.table[:, -2]))),
    "bits the other way round": ("binary", _each(lambda e: e.powers.copy_(e.powers.flip(0)))),
    "shares exchanged": ("hierarchical", _each(lambda e: setattr(e, "share", 1 - e.share))),
    "table one row late, recurrent": ("recurrent", _each(_table_one_row_late)),
    "table one row late, floater": ("floater", _each(_table_one_row_late)),
    "rows and columns exchanged": ("conditional_conv_2d", _each(lambda e: e.convolution.weight.copy_(e.convolution.weight.mT.clone()))),
    "halves exchanged, sinusoidal_2d": ("sinusoidal_2d", _each(lambda e: setattr(e, "first", 1 - e.first))),
    "coordinates exchanged, learned_2d": ("learned_2d", _each(_exchanged_tables)),
    "a grid of one row more, rope_normalized": ("rope_normalized-grid", _each(_one_row_more)),
    "grid one column narrow": ("conditional_conv_2d", _each(lambda e: setattr(e, "columns", e.columns - 1) or setattr(e, "rows", e.rows + 2))),
    "temperature one step late": ("logn-steps", _each(_table("factors", lambda rows: np.concatenate((rows[:1], rows[:-1]))))),
}


def _certificate(variant: str, plant: Optional[Plant] = None, session: type = Session) -> Dict[str, Any]:
    return _measured(decoder(variant), plant, session)


def _measured(config: Any, plant: Optional[Plant] = None, session: type = Session) -> Dict[str, Any]:
    right, planted = sources(config).model, seeded(config)
    if plant:
        with torch.no_grad():
            plant(planted)
    module, manifest = eager(planted)
    graph = TorchGraph(module, manifest)
    return certify(session(graph.open, manifest), right, _expected(config, manifest), lambda _: None)


_of_right: Dict[str, Expected] = {}


def _expected(config: Any, manifest: Manifest) -> Expected:
    """Return the outputs of the correct module, computed once for all its faults."""
    key = repr((config, manifest))
    if key not in _of_right:
        _of_right[key] = of_module(sources(config).model, manifest)
    return _of_right[key]


class KeepsWhatIsRewound(Session):
    """Rewinds its number of tokens, but clears no slots."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._memory.cut = lambda state, target: state.replace(held=target)  # type: ignore[method-assign]
        self._memory.tidy = lambda state: None  # type: ignore[method-assign]


class LeavesHiddenSlots(Session):
    """Truncates its rows, but clears no slots after them."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._memory.tidy = lambda state: None  # type: ignore[method-assign]


class MovesNoRow(Session):
    """Changes the index of the last row, but does not move its tokens."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._memory.apply_moves = lambda state: state.replace(moves=())  # type: ignore[method-assign]


class ForgetsCoordinates(Session):
    """Replays tokens after a rewind with the positions of text."""

    def rewind(self, n: Any) -> None:
        for history in self._now.histories:
            for snapshot in history.snapshots:
                snapshot.parts = [(tokens, {"grid": np.zeros_like(numbers["grid"])}) for tokens, numbers in snapshot.parts]
        super().rewind(n)


class ForgetsStates(Session):
    """Starts every call from the states of an empty session."""

    def prefill(self, *arguments: Any, **named: Any) -> Any:
        self._forget_states()
        return super().prefill(*arguments, **named)

    def step(self, *arguments: Any, **named: Any) -> Any:
        self._forget_states()
        return super().step(*arguments, **named)

    def _forget_states(self) -> None:
        now = self._now.without_stepper(False)
        if now.caches is not None:
            self._now = now.replace(caches=now.caches.restored({row: () for row in range(now.rows)}))


class ForksShareCaches(Session):
    """Forks without copying the caches."""

    def fork(self) -> Session:
        other = super().fork()
        other._now = other._now.replace(caches=self._now.caches)
        return other


def _on_target(config: Any, target: str, session: type, folder: Path) -> Dict[str, Any]:
    """Return the certificate of an artefact with another class of session."""
    made = sources(config)
    export(made, target, folder, verify=False)
    loaded = load(folder, provider="cpu", threads=1)
    return certify(session(loaded.graph.open, loaded.manifest), made.model, of_module(made.model, loaded.manifest), lambda _: None)


@pytest.mark.parametrize(
    ("variant", "target", "session"),
    [
        pytest.param(*case, marks=pytest.mark.xdist_group(case[0]))  # one worker per variant, which traces it once
        for case in (
            ("rope", "onnx", KeepsWhatIsRewound),
            ("fox", "onnx-static", KeepsWhatIsRewound),
            ("rope", "onnx-static", LeavesHiddenSlots),
            ("rope", "onnx-static", ForksShareCaches),
            ("alibi", "ort", ForksShareCaches),
            ("rope", "ort", MovesNoRow),
            ("fox", "onnx-static", MovesNoRow),
        )
    ],
)
def test_a_session_with_a_stale_cache_is_detected(variant: str, target: str, session: type, tmp_path: Path) -> None:
    assert not _on_target(decoder(variant), target, session, tmp_path / "wrong")["passed"]


@pytest.mark.xdist_group("mrope")
@pytest.mark.parametrize("target", ["ort", "onnx"])
def test_a_session_that_loses_coordinates_at_a_rewind_is_detected(target: str, tmp_path: Path) -> None:
    config = block("mrope", mechanism="linear", kv_heads=6)
    assert not _on_target(config, target, ForgetsCoordinates, tmp_path / "wrong")["passed"]


@pytest.mark.parametrize("variant", ["rope", "fox"])  # the parity tests check the others
def test_a_correct_module_passes(variant: str) -> None:
    assert _certificate(variant)["passed"]


@pytest.mark.parametrize("variant", ["fox", "fox_pair", "inkling-near"])
def test_a_correct_module_with_content_scores_and_a_window_passes(variant: str) -> None:
    config = block(variant)
    assert _measured(replace(config, attention=replace(config.attention, sees={"name": "window", "size": 5})))["passed"]


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=pytest.mark.xdist_group(PLANTS[fault][0])) for fault in PLANTS])
def test_a_planted_fault_is_detected(fault: str) -> None:
    variant, plant = PLANTS[fault]
    assert not _certificate(variant, plant)["passed"]


def _without_segments(model: Any) -> None:
    model.tokens.segments.weight.zero_()


def _pre_norm(model: Any) -> None:
    for layer in model.layers:
        layer.residual = Pre([layer.residual.attention_norm, layer.residual.mlp_norm])
        layer.residual.exact = Post([layer.residual.attention_norm, layer.residual.mlp_norm]).exact


@pytest.mark.parametrize("plant", [_without_segments, _pre_norm])
def test_a_planted_fault_of_the_encoder_is_detected(plant: Plant) -> None:
    assert _measured(encoder("learned"))["passed"] and not _measured(encoder("learned"), plant)["passed"]


def test_segments_that_are_lost_in_a_model_with_coordinates_are_detected() -> None:
    assert _measured(encoder("learned_2d"))["passed"] and not _measured(encoder("learned_2d"), _without_segments)["passed"]


def test_exchanged_segments_in_scores_are_detected() -> None:
    config = encoder("transformer_xl-segments")
    assert _measured(config)["passed"] and not _measured(config, _each(lambda e: e.segment.copy_(e.segment.flip(0))))["passed"]


def test_layer_encodings_in_another_order_are_detected() -> None:
    def exchange(model: Any) -> None:
        model.layers[0].attention.encoding, model.layers[1].attention.encoding = model.layers[1].attention.encoding, model.layers[0].attention.encoding

    config = decoder_config(61, 2, 40, block("nope"), layer_encodings=[{"name": "rope"}, {"name": "rope", "theta": 100.0}])
    assert _measured(config)["passed"] and not _measured(config, exchange)["passed"]


@pytest.mark.parametrize("variant", ["input_rnn", "conditional_conv"])
def test_a_session_that_does_not_carry_states_is_detected(variant: str) -> None:
    assert not _certificate(variant, session=ForgetsStates)["passed"]


@pytest.mark.xdist_group("rope")
def test_logits_of_the_last_column_instead_of_the_last_token_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = decoder("rope")
    module, manifest = eager(sources(config).model)
    session, case, bound = Session(TorchGraph(module, manifest).open, manifest), _expected(config, manifest).cases[0], bound_of(sources(config).model, manifest)
    assert all(worst_error(*pair) <= bound for pair in last_of_ragged(session, case))
    session.reset()
    monkeypatch.setattr(ops, "select_tokens", lambda x, index: x[:, x.size(1) - index.size(1) :])
    assert any(worst_error(*pair) > bound for pair in last_of_ragged(session, case))


def _mask_seeing(change: Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    right = ops.attention_mask

    def wrong(positions: Tensor, key_positions: Tensor, *rest: Any) -> Tensor:
        return right(*change(positions, key_positions), *rest)

    return wrong


MASKS = {
    "mask one short": lambda q, k: (q - 1, k),
    "mask one long": lambda q, k: (q + 1, k),
    "padding attended": lambda q, k: (q, k.clamp(min=0)),
}


@pytest.mark.parametrize("fault", MASKS)
def test_a_planted_fault_of_the_mask_is_detected_by_the_oracle_or_the_grid(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "attention_mask", _mask_seeing(MASKS[fault]))
    assert not _certificate("rope")["passed"]

