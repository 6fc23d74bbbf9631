"""Tokens removed from the middle of a row. In a block of one layer, whose cached keys and values
read no other tokens, outputs are those of a pass over the tokens that stay.
"""

import functools
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from posenc_export.export.cached_keys import cached_keys
from posenc_export.export.expected import eager_session
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session, load
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS
from posenc_export.runtime.session.caches import InPlace
from posenc_export.runtime.session.prefixes import Prefixes
from posenc_export.shared.numerics import cache_noise, rounding_tolerance, tolerance, worst_error
from tests import traces
from tests.kernels.calls import built
from tests.tiny import VARIANTS, block, decoder, works

pytestmark = pytest.mark.xdist_group("discard")  # one worker, which exports for them once
AFTER, STARTS = 3, [0, 7, 2]
LENGTHS, REMOVED = [20, 12, 17], [5, 0, 14]
NEW = [4, 1, 2]
RANGE = 64
MOVED = {
    *("nope", "rope", "rope_linear", "rope_ntk", "rope_yarn", "rope_llama3", "rope_proportional"),
    *("rope_trained", "logn", "alibi", "t5", "kerple", "fire", "sandwich", "dynamic_bias"),
    *("swin", "swin_v2", "decomposed_2d", "shaw", "transformer_xl", "wavlm", "inkling", "cope"),
}
# Variants of other encodings whose cached keys are rotated by the position times a frequency
ALSO = {
    *tuple(
        "dual_chunk rope_dynamic rope_dynamic-short rope_dynamic-single rope_longrope-long".split()
    ),
    "deberta-c2p",
}


@functools.lru_cache(maxsize=None)
def rows(width: int) -> List[np.ndarray]:
    random = np.random.default_rng(0)
    counts = [sum(pair) for pair in zip(LENGTHS, NEW, strict=True)]
    return [random.standard_normal((count, width), np.float32) for count in counts]


def check_removed(session: Session, reference: Session, bound: float = 0.0) -> None:
    """Remove tokens and compare the outputs of new ones with those of a pass without them. bound:
    of errors; 0 for that of float32.
    """
    width = session.manifest.config["width"]
    session.prefill([row[:count] for row, count in zip(rows(width), LENGTHS, strict=True)], STARTS)
    session.discard(REMOVED, AFTER)
    left = [length - count for length, count in zip(LENGTHS, REMOVED, strict=True)]
    assert session.length.tolist() == left
    assert session.position.tolist() == [sum(pair) for pair in zip(STARTS, left, strict=True)]
    new = [row[count:] for row, count in zip(rows(width), LENGTHS, strict=True)]
    outputs = session.prefill(new)
    kept = [
        np.concatenate((row[:AFTER], row[AFTER + count :]))
        for row, count in zip(rows(width), REMOVED, strict=True)
    ]
    full = reference.prefill(kept, STARTS)
    for row, (first, count) in enumerate(zip(left, NEW, strict=True)):
        error = worst_error(outputs[row, :count], full[row, first : first + count])
        assert error <= (bound or tolerance("float32", 1, width)), (row, error)
    session.rewind(NEW)
    assert np.array_equal(session.prefill(new), outputs)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if works(name, "causal")])
def test_tokens_that_stay_give_the_outputs_of_a_pass_over_them(variant: str) -> None:
    name = VARIANTS[variant]["name"]
    if name == "complex_order":
        pytest.skip("complex_order acts on token ids, which a block does not read")
    model = traces.sources(block(variant, RANGE)).model
    session = eager_session(model)
    assert (session.manifest.cached_keys is not None) == (name in MOVED or variant in ALSO)
    if session.manifest.cached_keys is not None:
        check_removed(session, eager_session(model))
        return
    session.prefill([row[:5] for row in rows(model.config.width)])
    with pytest.raises(ValueError, match=f"expected for discard, .* got encoding {name}"):
        session.discard(1)


def test_a_module_that_differs_from_its_oracle_at_one_position_states_no_rotation(
    monkeypatch: Any,
) -> None:
    model = seeded(block("rope", RANGE))
    assert cached_keys(model) is not None
    encoding = model.attention.encoding
    rotate = encoding.rotate

    def shifted(q: Any, k: Any, positions: Any) -> Any:
        return rotate(q, k, torch.where(positions == RANGE - 5, 0, positions))

    monkeypatch.setattr(encoding, "rotate", shifted)
    assert cached_keys(model) is None


@pytest.mark.parametrize("variant", ["rope-interleaved", "rope-single", "alibi", "shaw-bert"])
@pytest.mark.parametrize("target", ["onnx-static", "ort", "torchscript"])
def test_each_target_moves_tokens(variant: str, target: str) -> None:
    folder = traces.artefact(block(variant, RANGE), target)
    model = load(folder, provider="cpu", threads=1)
    check_removed(model.session(batch=3), model.session(batch=3))


@built
def test_keys_in_float16_are_rounded_again_and_stay_finite() -> None:
    folder = traces.artefact(block("rope", RANGE), "ort-native", cache="float16")
    model = load(folder, provider="cpu", threads=1)
    bound = rounding_tolerance(cache_noise(CACHE_FORMATS["float16"].unit, 0))
    session = model.session(batch=3)
    check_removed(session, model.session(batch=3), bound)
    for buffer in session._state.caches.buffers:
        buffer.array[:] = np.finfo(np.float16).max  # also of numbers that rotate beyond it
    session.discard(1, AFTER)
    assert all(np.isfinite(buffer.array).all() for buffer in session._state.caches.buffers)


def test_an_interrupted_move_is_completed_by_the_next_call(monkeypatch: Any) -> None:
    model = traces.sources(block("rope", RANGE)).model
    session = eager_session(model)
    right, stops = InPlace.write, [True, False]

    def interrupted(self: InPlace, *place: Any) -> None:
        """Let keys be written, and no values."""
        if stops and stops.pop():
            raise KeyboardInterrupt
        right(self, *place)

    width = session.manifest.config["width"]
    session.prefill([row[:20] for row in rows(width)[:1]])
    monkeypatch.setattr(InPlace, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.discard(5, AFTER)
    other = eager_session(model)
    row = rows(width)[0]
    expected = other.prefill([np.concatenate((row[:AFTER], row[AFTER + 5 :]))])
    assert session.length.tolist() == [15]
    error = worst_error(session.prefill([row[20:]]), expected[:, 15:])
    assert error <= tolerance("float32", 1, width)


@pytest.mark.parametrize("target", ["onnx", "ort"])
def test_caches_that_cannot_be_moved_are_refused_by_name(target: str, tmp_path: Path) -> None:
    options: Dict[str, Any] = {}
    config = one_layer("rope")
    if target == "ort":
        sample = tmp_path / "sample.txt"
        sample.write_bytes(bytes(range(256)) * 8)
        config = replace(config, tokens=replace(config.tokens, vocabulary=256))
        options = {"cache": "int8", "calibrate": sample}
    session = load(traces.artefact(config, target, **options), provider="cpu").session()
    session.prefill(np.arange(9)[None])
    got = {"onnx": "got target onnx with signature", "ort": "got cache int8"}[target]
    with pytest.raises(ValueError, match=got):
        session.discard(1)
    assert session.length.tolist() == [9]


def test_numbers_of_tokens_are_checked() -> None:
    session = eager_session(traces.sources(block("alibi", RANGE)).model)
    session.prefill([row[:8] for row in rows(session.manifest.config["width"])])
    session.discard(0)
    for n, after in ((6, 3), ([1, 6, 1], 3), (-1, 0)):
        with pytest.raises(ValueError, match="n of discard to be at least 0 and at most"):
            session.discard(n, after)
    with pytest.raises(ValueError, match="after to be a whole number of at least 0"):
        session.discard(1, -1)
    session.discard(5, 3)
    assert session.length.tolist() == [3, 3, 3]


def one_layer(variant: str) -> StackConfig:
    whole = decoder(variant, max_positions=RANGE)
    return replace(whole, order=whole.order[:1])


def test_only_tokens_before_discarded_ones_are_shared(tmp_path: Path) -> None:
    model = load(traces.artefact(decoder("rope"), "ort"), provider="cpu")
    session, fresh, tokens = model.session(), model.session(), [*range(40)]
    session.prefill([tokens, tokens])
    session.discard([8, 0], 20)
    session.save(tmp_path / "saved")
    prefixes = Prefixes(model.graph, 64, 4)
    for other in (session, session.fork(), model.restore(tmp_path / "saved")):
        with pytest.raises(ValueError, match="at most 20 tokens, since .* discarded, got 24; give"):
            other.share(0, [*tokens[:20], *tokens[28:32]], prefixes)
        other.share(0, tokens[:20], prefixes)
        other.share(1, tokens, prefixes, "whole")
        # What is read in place of tokens that were taken back has read no discarded token.
        other.rewind([12, 0])
        other.prefill([[1, 2, 3, 4], [5]])
        other.share(0, [*tokens[:20], 1, 2, 3, 4], prefixes, "again")
        other.retire(0)
        other.share(0, tokens, prefixes, "last")
    again = fresh.admit([[9]], prefix=prefixes.find([*tokens[:20], 1, 2, 3, 4, 9], "again"))
    exact = model.session().prefill([[*tokens[:20], 1, 2, 3, 4, 9]])[:, -1:]
    assert fresh.length == 25 and worst_error(again, exact) <= model.manifest.reference.tolerance


@pytest.mark.parametrize("variant", ["rope", "t5"])
def test_endless_texts_read_the_first_tokens_and_the_last(variant: str) -> None:
    """Each token is that of a pass over the first four tokens and those not discarded."""
    model = traces.sources(one_layer(variant)).model
    session = eager_session(model, capacity=24)
    prompts = [list(range(50)), list(range(9, 16))]
    ids = np.stack(list(session.generate(prompts, 70, endless=True, stop=[])), 1)
    assert ids.shape == (2, 70) and session.length.max() <= 24
    for prompt, tokens in zip(prompts, ids.tolist(), strict=True):
        kept: List[int] = []
        for index, token in enumerate([*prompt, *tokens[:-1]], 1 - len(prompt)):
            if len(kept) == 24:
                del kept[4:14]
            kept.append(token)
            if index >= 0:
                assert eager_session(model).prefill([kept])[0, -1].argmax() == tokens[index]


def test_what_endless_texts_need_is_said() -> None:
    model = traces.sources(one_layer("rope")).model
    session = eager_session(model, capacity=7)
    with pytest.raises(ValueError, match="for endless, room for at least 8 tokens of a row, got 7"):
        next(session.generate([[1]], 4, endless=True))
    session = eager_session(model)
    session.prefill([[1, 2, 3, 4, 5]], RANGE - 5)
    with pytest.raises(ValueError, match="for endless, room for at least 8 tokens of a row, got 5"):
        next(session.generate([[1]], 4, endless=True))
    session = eager_session(model)
    with pytest.raises(ValueError, match="expected endless or speculate, got both"):
        next(session.generate([[1]], 4, speculate="lookup", endless=True))
    session = eager_session(traces.sources(one_layer("learned")).model)
    with pytest.raises(ValueError, match="got encoding learned"):
        next(session.generate([[1]], 4, endless=True))


def test_a_prompt_that_is_refused_changes_nothing() -> None:
    session = eager_session(traces.sources(one_layer("rope")).model, capacity=16)
    session.prefill([list(range(16))])
    for prompt, rule in (([[1], [2]], "1 rows as in the cache"), ([[1] * 40 + [99]], "token ids")):
        with pytest.raises(ValueError, match=rule):
            next(session.generate(prompt, 4, endless=True))
        assert session.length.tolist() == [16]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_caches_of_windows_are_refused_and_those_of_float16_moved(dtype: str) -> None:
    layer = decoder("rope").kinds[0]
    sees = {"name": "window", "size": 24}
    near = replace(layer, attention=replace(layer.attention, sees=sees))
    whole = decoder("rope", max_positions=1024)
    config = replace(whole, layers={"near": near, "all": layer}, order=("near", "all"))
    session = load(traces.artefact(config, "ort", dtype=dtype), provider="cpu").session()
    session.prefill([list(range(40))])
    session.discard(9, 4)
    assert session.length.tolist() == [31]
