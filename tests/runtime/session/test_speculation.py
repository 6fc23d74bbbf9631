"""Speculative decoding: the ids and the caches of plain decoding, whatever is drafted."""

import functools
import re
from typing import Any

import numpy as np
import pytest

from posenc_export import load
from posenc_export.runtime.artefact.records import Generation
from posenc_export.runtime.session import generation
from posenc_export.runtime.session.generation import MOST, Lookup, next_count
from posenc_export.runtime.session.session import Session
from tests.cases import choice
from tests.tiny import decoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group("alibi")  # one worker, which traces the model once

REPEATING = [[3, 4, 5, 6, 7] * 4, [40, 41], [7] * 9]
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


@pytest.fixture(scope="module")
def models() -> Any:
    """Load the model of an encoding on a target."""
    return functools.cache(
        lambda encoding, target: load(artefact(decoder(encoding), target), "cpu", 1)
    )


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft three tokens wherever possible, whether the last ones were right or not."""
    monkeypatch.setattr(generation, "next_count", lambda count, right: 3)


def _ids(session: Session, prompt: Any, count: int, **given: Any) -> list[list[int]]:
    return np.stack(list(session.generate(prompt, count, **given)), axis=1).tolist()  # type: ignore[no-any-return]


TARGETS = [("alibi", "ort"), ("alibi", "onnx"), ("input_rnn", "ort"), ("alibi", "torchscript")]


@pytest.mark.parametrize(("encoding", "target"), choice(TARGETS, TARGETS[:3]))
@pytest.mark.parametrize("given", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.usefixtures("drafting")
def test_speculation_gives_the_ids_and_the_caches_of_plain_decoding(
    encoding: str, target: str, given: dict[str, Any], models: Any
) -> None:
    model = models(encoding, target)
    for prompt in (REPEATING[:1], REPEATING):
        plain = model.session()
        wanted = _ids(plain, prompt, 24, **given)
        session = model.session()
        assert _ids(session, prompt, 24, speculate="lookup", **given) == wanted
        assert session.length.tolist() == plain.length.tolist()
        following = np.zeros(len(prompt), np.int64)
        assert np.allclose(session.step(following), plain.step(following), rtol=0, atol=1e-4)


def test_a_stop_id_in_a_draft_ends_the_row_there(models: Any) -> None:
    model = models("alibi", "ort")
    whole = _ids(model.session(), REPEATING, 24)
    stop = [whole[0][9], whole[2][4]]
    plain, session = model.session(), model.session()
    wanted = _ids(plain, REPEATING, 24, stop=stop)
    assert _ids(session, REPEATING, 24, stop=stop, speculate="lookup") == wanted
    assert session.length.tolist() == plain.length.tolist()


@pytest.mark.usefixtures("drafting")
def test_a_caller_who_stops_early_finds_the_cache_of_plain_decoding(models: Any) -> None:
    model = models("alibi", "ort")
    for taken in range(1, 9):
        session = model.session()
        ids = session.generate(REPEATING[:1], 24, speculate="lookup")
        for _ in range(taken):
            next(ids)
        ids.close()
        assert session.length.tolist() == [len(REPEATING[0]) + taken - 1]


@pytest.mark.usefixtures("drafting")
def test_generation_ends_where_positions_and_caches_end(models: Any) -> None:
    model = models("alibi", "ort")
    late = model.manifest.max_positions - 28
    for session, start in ((model.session(capacity=28), 0), (model.session(), late)):
        session.prefill(np.array(REPEATING[:1]), start=start)  # leaves room for 8 tokens
        assert session.room.tolist() == [8]
        plain = session.fork()
        ids = _ids(session, [REPEATING[0][:2]], 9, speculate="lookup")[0]  # the last id is not read
        assert len(ids) == 7 and session.room.tolist() == [0]
        assert _ids(plain, [REPEATING[0][:2]], 9) == [ids]


def _distribution(model: Any, prompt: list[int], temperature: float) -> np.ndarray:
    """Return the probabilities of the second id after a prompt, [V] float64."""

    def probabilities(logits: np.ndarray) -> np.ndarray:
        weights = np.exp((logits - logits.max(-1, keepdims=True)).astype(np.float64) / temperature)
        return np.asarray(weights / weights.sum(-1, keepdims=True))

    first = probabilities(model.session().prefill(np.array([prompt]))[0, -1])
    rows = [[*prompt, token] for token in range(len(first))]
    return first @ probabilities(model.session().prefill(rows)[:, -1])


@pytest.mark.parametrize("right", [True, False], ids=["exact", "a planted fault"])
@pytest.mark.usefixtures("drafting")
def test_sampled_ids_with_drafts_have_the_distribution_of_the_model(
    right: bool, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draws, prompt = models("alibi", "ort"), 250, [3, 4, 5, 3, 4, 5, 3]
    if not right:  # every drafted token is kept
        take, four = generation.Reader.take, np.arange(61) == 4
        wrong = lambda self, logits: take(self, np.where(four, np.float32(9), logits))  # noqa: E731
        monkeypatch.setattr(generation.Reader, "take", wrong)
    expected = draws * _distribution(model, prompt, 2.0)
    result, session = np.zeros(len(expected)), model.session()
    for seed in range(draws):
        session.reset()
        ids = _ids(session, [prompt], 2, temperature=2.0, seed=seed, speculate="lookup")
        result[ids[0][1]] += 1
    groups = np.array_split(np.argsort(expected), 12)
    found, wanted = (np.array([of[group].sum() for group in groups]) for of in (result, expected))
    assert wanted.min() >= 5
    squared, freedom = ((found - wanted) ** 2 / wanted).sum(), len(groups) - 1
    assert (squared <= freedom + 4 * np.sqrt(2 * freedom)) == right


@pytest.mark.usefixtures("drafting")
def test_ids_differ_only_where_two_logits_are_closer_than_the_rounding_of_a_pass(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the error of passes of several tokens is made large enough to change ids."""
    model, noise, prefill = models("alibi", "ort"), 0.02, Session.prefill
    plain = _ids(model.session(), REPEATING[:1], 60)[0]
    random = np.random.default_rng(0)

    def noisy(self: Session, inputs: Any, *arguments: Any, **named: Any) -> np.ndarray:
        output = prefill(self, inputs, *arguments, **named)
        if "logits_to_keep" not in named:
            output = output + random.uniform(-noise, noise, output.shape).astype(np.float32)
        return output

    monkeypatch.setattr(Session, "prefill", noisy)
    drafted = _ids(model.session(), REPEATING[:1], 60, speculate="lookup")[0]
    assert drafted != plain
    first = [one == other for one, other in zip(drafted, plain, strict=True)].index(False)
    logits = prefill(model.session(), np.array([REPEATING[0] + plain[:first]]))[0, -1]
    assert 0 <= logits[plain[first]] - logits[drafted[first]] <= 2 * noise


@pytest.mark.parametrize(
    ("encoding", "speculate", "message"),
    [
        ("alibi", "look", "to be \"lookup\", got 'look'; leave it out for plain decoding"),
        ("input_rnn", "lookup", "expected rewind of at least 60 for .* got 4; open .* rewind=60"),
    ],
)
def test_what_cannot_be_drafted_is_refused_by_name(
    encoding: str, speculate: str, message: str, models: Any
) -> None:
    session = models(encoding, "ort").session(rewind=4)
    with pytest.raises(ValueError, match=message):
        next(session.generate(REPEATING[:1], 4, speculate=speculate))


@pytest.mark.parametrize("before", [[], [[5], [6]], [5], [[0.5]], 5])
@pytest.mark.parametrize("speculate", [None, "lookup"])
def test_earlier_ids_of_other_rows_than_the_prompt_are_refused_before_it_is_read(
    speculate: Any, before: Any, models: Any
) -> None:
    session = models("alibi", "ort").session()
    rule = "expected before to be a list of token ids for each of 1 row, got "
    with pytest.raises(ValueError, match=re.escape(f"session: {rule}{before}; give")):
        next(session.generate(REPEATING[:1], 4, speculate=speculate, before=before))
    assert not session.length.any()


def test_a_lookup_continues_the_longest_match_and_repeats_what_has_a_period() -> None:
    text = [9, 8, 1, 2, 3, 4, 5, 7, 7, 3, 4, 6, 1, 2, 3, 4]
    for read, count, tokens in (
        (text, 3, [5, 7, 7]),  # after 1 2 3 4, and not 6, which follows the later 3 4
        ([5, 6] * 5, 5, [5, 6, 5, 6, 5]),
        (range(20), 5, []),
        ([5, 6] * 5, 0, [5]),
    ):
        drafts = Lookup(read)
        drafts.count = count
        assert drafts.propose() == tokens


def test_drafts_become_long_where_they_are_right_and_stop_where_they_are_wrong() -> None:
    counts = [1]
    for right in (*[True] * 4, *[False] * 5, True):
        counts.append(next_count(counts[-1], right))
    assert counts == [1, 3, 7, MOST, MOST, 7, 3, 1, 0, 0, 1]


@pytest.mark.parametrize(("target", "rows"), [("ort", 1), ("ort", 2), ("onnx", 2)])
def test_a_text_that_repeats_itself_takes_few_passes(
    target: str, rows: int, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are read together on onnx, and one by one on ort."""
    model, counts = models("alibi", target), []
    only = Generation(suppressed=tuple(token for token in range(61) if token != 5))
    monkeypatch.setattr(model.graph, "manifest", model.manifest.replace(generation=only))
    counted = lambda count, right: counts.append(count) or next_count(count, right)  # noqa: E731
    monkeypatch.setattr(generation, "next_count", counted)
    ids = _ids(model.session(), [[5, 5, 5]] * rows, 60, speculate="lookup")
    assert ids == [[5] * 60] * rows
    assert counts[::rows] == [1, 3, 7, 15, 15, 15, 15][: len(counts) // rows]
