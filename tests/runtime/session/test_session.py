"""The session: refusals, capacity, sampling, independence; parity of every cut is in
tests/export.
"""

import copy
import gc
import math
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.export.expected import eager_session
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.session.generation import Sampling
from tests.tiny import block, decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("rope")  # one worker, which exports for them once
TARGETS = ["onnx", "onnx-static", "ort", "torchscript"]  # pt2 has the caches of torchscript


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    folders = {target: artefact(decoder("rope"), target) for target in TARGETS}
    mask = artefact(decoder("rope"), "onnx", signature="mask")
    return {**folders, "block": artefact(block("alibi"), "ort"), "mask": mask}


@pytest.fixture(scope="module", params=TARGETS)
def model(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Model:
    return load(folders[request.param], threads=1, provider="cpu")


@pytest.fixture
def session(model: Model) -> Session:
    return model.session()


TOKENS = np.arange(12, dtype=np.int64)[None]


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint64"])
def test_prefill_and_step_take_ids_of_any_integer_type(dtype: str, model: Model) -> None:
    expected, session = model.session(), model.session()
    for other in (TOKENS, TOKENS[:, :3]):  # as first tokens, and as a pass after a step
        assert np.array_equal(session.prefill(other.astype(dtype)), expected.prefill(other))
        assert np.array_equal(session.step(other[:, 0].astype(dtype)), expected.step(other[:, 0]))


def test_positions_past_the_range_are_refused_and_the_cache_stays_as_it_was(
    session: Session,
) -> None:
    session.prefill(TOKENS, start=1100 - 13)
    session.step(TOKENS[:, 0])
    with pytest.raises(ValueError, match="expected positions 0 .. 1099, got 1100"):
        session.step(TOKENS[:, 0])
    with pytest.raises(ValueError, match="got 1101"):
        session.prefill(TOKENS[:, :2])
    assert session.position.tolist() == [1100]
    session.rewind(1)
    session.step(TOKENS[:, 0])


@pytest.mark.parametrize(("call", "message"), [
    (lambda s: s.step(TOKENS[:, 0]), "expected a prefill before"),
    (lambda s: s.prefill(TOKENS + 60), "expected token ids 0 .. 60"),
    (lambda s: s.prefill(TOKENS, start=-1), "expected start to be a whole number 0 .. .*got -1"),
    (lambda s: s.prefill(TOKENS.astype(np.float32)),
        "expected input_ids of dtype int64, got float32; pass token ids"),
    (lambda s: s.prefill(["text"]), "got a row of <U4; pass token ids"),
    (lambda s: list(s.generate([7, 8], 1)), "got the number 7; pass a list of rows"),
    (lambda s: s.prefill(TOKENS[0]), r"got \[12\]; add an axis of rows, as in inputs\[None\]"),
    (lambda s: s.prefill(np.zeros((1, 1101), np.int64)),
        "expected positions 0 .. 1099, got 1100; give shorter rows, or export with larger"),
    (lambda s: (s.prefill(TOKENS), s.prefill(np.zeros((1, 1090), np.int64))),
        "got 1101; rewind, or export with larger max_positions"),
    (lambda s: s.prefill([TOKENS[0, :0], TOKENS[0, :0]]), "at least one token in at least one row"),
    (lambda s: s.prefill(TOKENS, logits_to_keep=-1),
        "expected logits_to_keep to be a whole number of at least 0, got -1"),
    (lambda s: s.prefill(TOKENS, logits_to_keep=[1]),
        "expected logits_to_keep to be a whole number of at least 0, got .1."),
    (lambda s: s.prefill(TOKENS, attention_mask=np.ones((1, 3))),
        "expected attention_mask of shape"),
    (lambda s: s.prefill(None), "expected input_ids as an array or a list of rows, got None; give"),
    (lambda s: s.rewind(1), "expected a prefill before rewind, got an empty session"),
    (lambda s: (s.prefill(TOKENS), s.rewind(13)), "expected n of rewind to be at most the lengths"),
    (lambda s: (s.prefill(TOKENS), s.prefill(TOKENS, start=3)),
        "expected start .12., where rows of .12. cached tokens continue, got 3; leave"),
    (lambda s: (s.prefill(TOKENS, start=7), s.prefill(TOKENS, start=0)),
        "expected start .19., where rows of .12. cached tokens continue, got 0"),
    (lambda s: (s.prefill(TOKENS), s.prefill(np.repeat(TOKENS, 2, 0))),
        "expected 1 row as in the cache"),
    (lambda s: (s.prefill(TOKENS), s.step(np.array([61]))), "expected token ids"),
    (lambda s: (s.prefill(TOKENS), s.step(np.array([1, 2]))),
        "expected one token per row in a step"),
    (lambda s: list(s.generate(TOKENS, 1, stop=[1.5])), "expected stop to be token ids, got .1.5."),
])  # fmt: skip
def test_wrong_use_is_refused_by_rule_and_value(session: Session, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(session)


def test_a_start_at_the_next_position_of_every_row_that_reads_tokens_continues(
    folders: dict[str, Path],
) -> None:
    session = load(folders["ort"], threads=1, provider="cpu").session()
    session.prefill([TOKENS[0, :4], TOKENS[0, :2]], start=[5, 100])
    twin = session.fork()
    # The number of a row without tokens has no meaning.
    outputs = session.prefill([TOKENS[0, 4:6], []], start=9)
    assert np.array_equal(outputs, twin.prefill([TOKENS[0, 4:6], []]))
    outputs = session.prefill([[4], [5]], start=session.position)
    assert np.array_equal(outputs, twin.prefill([[4], [5]]))
    with pytest.raises(ValueError, match=r"expected start \[12, 103\]"):
        session.prefill([[4], [5]], start=[12, 12])
    session.rewind([0, 3])  # a row that a rewind empties keeps its start beside rows with tokens
    said = r"start \[12, 100\], where rows of \[7, 0\] cached tokens continue, got \[12, 0\]"
    with pytest.raises(ValueError, match=said):
        session.prefill([[4], [5]], start=[12, 0])


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_session_is_refused_and_fork_is_named(
    call: Any, folders: dict[str, Path]
) -> None:
    with pytest.raises(TypeError, match=r"expected fork\(\) to copy a session"):
        call(load(folders["ort"], provider="cpu").session())


def test_a_prompt_longer_than_capacity_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="expected at most 8 tokens of a row in the cache, got 12"):
        load(folders["ort"], provider="cpu").session(capacity=8).prefill(TOKENS)


def test_a_mask_artefact_refuses_a_start_offset(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="export with signature positions"):
        load(folders["mask"], provider="cpu").session().prefill(TOKENS, start=5)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in {
        "max_tokens": [0, 1.5, math.nan, True],
        "temperature": [-1.0, math.nan, math.inf, "1", None],
        "top_k": [-1, 1.5, math.nan],
        "top_p": [0, 1.1, math.nan, None],
        "seed": [-1, 0.5, math.nan, None],
    }.items() for value in values],
)  # fmt: skip
def test_a_number_that_means_nothing_to_sampling_is_refused_before_tokens_are_read(
    name: str, value: Any, folders: dict[str, Path]
) -> None:
    session = load(folders["ort"], threads=1, provider="cpu").session()
    with pytest.raises(ValueError, match=f"expected {name} to be a .*number .*, got {value!r}"):
        next(session.generate(TOKENS, **{"max_tokens": 1, name: value}))
    assert session.batch == 0


def test_a_temperature_near_0_chooses_the_most_probable_token() -> None:
    logits = np.array([10.0, 300.0, -50.0])
    assert Sampling(5e-324, 0, 1.0).choose(logits, np.random.default_rng(0).random) == 1


@pytest.mark.parametrize("threads", [0, -1, 10**9, 1.5, math.nan, True, "all"])
def test_a_number_of_threads_that_no_machine_has_is_refused(
    threads: Any, folders: dict[str, Path]
) -> None:
    said = "expected threads to be a whole number 1 .. 1024, got .*; leave it out for the default"
    with pytest.raises(ValueError, match=said):
        load(folders["ort"], threads=threads, provider="cpu")


def test_an_unknown_provider_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="provider to be one of"):
        load(folders["ort"], provider="tpu")


def test_static_caches_grow_by_buckets_without_losing_what_they_hold(
    folders: dict[str, Path],
) -> None:
    tokens = np.random.default_rng(0).integers(61, size=(2, 300))
    static, fused = (
        load(folders[target], threads=1, provider="cpu").session()
        for target in ("onnx-static", "ort")
    )
    a, b = static.prefill(tokens[:, :250]), fused.prefill(tokens[:, :250])
    steps = [(static.step(tokens[:, i]), fused.step(tokens[:, i])) for i in range(250, 300)]
    assert static._state.caches.extent == 512
    assert np.allclose(a, b, atol=1e-4) and all(np.allclose(x, y, atol=1e-4) for x, y in steps)


def test_static_caches_have_their_first_capacity_again_after_a_reset(
    folders: dict[str, Path],
) -> None:
    tokens = np.random.default_rng(0).integers(61, size=(2, 300))
    model = load(folders["onnx-static"], threads=1, provider="cpu")
    used, new = model.session(batch=2), model.session(batch=2)
    used.prefill(tokens)
    used.reset()
    assert np.array_equal(used.prefill(tokens[:, :20]), new.prefill(tokens[:, :20]))
    caches = used._state.caches
    assert caches.extent == new._state.caches.extent == 256


def test_caches_of_a_session_are_freed_with_it_at_once(session: Session) -> None:
    session.prefill(TOKENS)
    # Objects that only the garbage collector frees may stay in memory for thousands of calls.
    gc.disable()
    try:
        other = session.fork()
        other.step(TOKENS[:, 0])
        caches, step = weakref.ref(other._state.caches), weakref.ref(other._state.bound[1])
        del other
        assert caches() is None and step() is None
    finally:
        gc.enable()


def test_generate_is_the_same_for_the_same_seed_and_another_for_another(session: Session) -> None:
    def text(seed: int) -> list:
        session.reset()
        return [int(t[0]) for t in session.generate(TOKENS, 12, temperature=1.0, seed=seed)]

    assert text(1) == text(1) != text(2)


def test_greedy_ties_go_to_the_lower_id_and_top_k_1_is_greedy() -> None:
    for logits, token in (([1.0, 3.0, 3.0], 1), ([2.0, 0.0, 1.0], 0)):
        for sampling in (Sampling(0, 0, 1.0), Sampling(1.0, 1, 1.0)):
            assert sampling.choose(np.array(logits), np.random.default_rng(0).random) == token


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits, sampling = np.log(np.array([0.5, 0.3, 0.2])), Sampling(1.0, 0, 0.6)
    drawn = {sampling.choose(logits, np.random.default_rng(seed).random) for seed in range(200)}
    assert drawn == {0, 1}


def test_draws_follow_the_shares() -> None:
    random, sampling = np.random.default_rng(0).random, Sampling(1.0, 0, 1.0)
    drawn = [sampling.choose(np.log([0.7, 0.2, 0.1]), random) for _ in range(4000)]
    drawn = np.bincount(drawn, minlength=3) / 4000
    assert np.abs(drawn - [0.7, 0.2, 0.1]).max() < 4 * np.sqrt(0.25 / 4000)


def test_rows_beyond_the_range_of_a_model_without_a_cache_are_not_told_to_rewind() -> None:
    session = eager_session(
        seeded(block_config(16, 2, 14, encoding={"name": "rope_2d"}, causal=False))
    )
    said = "got 195; give shorter rows, .* larger max_positions, which bounds the tokens of a row"
    with pytest.raises(ValueError, match=said):
        session.prefill(np.zeros((1, 196, 16), np.float32))


def test_the_last_token_is_chosen_where_rounding_leaves_the_sum_below_the_random_number() -> None:
    sampling = Sampling(1.0, top_k=0, top_p=1.0, seed=0, max_tokens=1, stop=None)
    logits, number = np.zeros(10), float(np.nextafter(1.0, 0.0))
    assert np.cumsum(np.full(10, 0.1))[-1] <= number
    assert sampling.choose(logits, lambda: number) == 9


@pytest.mark.parametrize("model", TARGETS, indirect=True)
def test_arrays_that_a_caller_passes_are_read_and_not_written(session: Session) -> None:
    tokens = np.arange(2, 14)[None]
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 9), (9, 12)):
        session.prefill(tokens[:, begin:end], logits_to_keep=1)
    session.step(np.array([20]))
    assert np.array_equal(tokens, np.arange(2, 14)[None])
    tokens.flags.writeable = False
    session.prefill(tokens[:, ::2])
