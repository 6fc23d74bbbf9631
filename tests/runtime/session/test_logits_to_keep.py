"""logits_to_keep: the outputs, and how many logits the graph computes."""

import functools
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from posenc_export import load
from posenc_export.export import describe, export, signatures
from posenc_export.models.presets import seeded
from posenc_export.runtime.session.runner import Runner
from posenc_export.runtime.verification import measuring
from posenc_export.runtime.verification.scenarios import Case
from posenc_export.shared.numerics import worst_error
from tests.tiny import block, decoder
from tests.traces import artefact, exported

pytestmark = pytest.mark.xdist_group("rope")  # one worker, which traces the model once
SLOW = [pytest.param(target, marks=pytest.mark.exhaustive) for target in ("onnx-static", "pt2")]
TARGETS = ["onnx", "ort", "torchscript", *SLOW]
PROMPTS = [list(range(3, 13)), [40, 41], [7] * 5]
Models = Callable[[str], Any]


@pytest.fixture(scope="module")
def models() -> Models:
    """Load the model of a target, or of signature mask."""

    def of(name: str) -> Any:
        target, signature = ("ort", "mask") if name == "mask" else (name, "positions")
        return load(artefact(decoder("rope"), target, signature=signature), "cpu", 1)

    return functools.cache(of)


def _computed(session: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> list[int]:
    """Prefill PROMPTS and return, for each run of the graph, the number of tokens per row whose
    logits it computes.
    """
    counts: list[int] = []

    def feed(self: Any, *arguments: Any) -> Any:
        widths.clear()
        state = feeds(self, *arguments)
        counts.append(max(widths))
        return state

    def bind(feeds: Any, states: Any, outputs: Any, **named: Any) -> Any:
        widths.append(outputs["logits"].shape[1])
        return right(feeds, states, outputs, **named)

    widths: list[int] = []
    feeds, right = Runner.run_chunk, session._runner.graph.bind
    monkeypatch.setattr(session._runner.graph, "bind", bind)
    monkeypatch.setattr(Runner, "run_chunk", feed)
    session.prefill(PROMPTS, **how)
    return counts


# Rows end in the third chunk of 4 tokens, the first, the second: each holds the last token of one.
@pytest.mark.parametrize(("chunk", "kept"), [(4, "111"), (1, "0100100001")])
@pytest.mark.parametrize("target", TARGETS)
def test_chunks_compute_the_logits_that_are_kept_and_no_others(
    target: str, chunk: int, kept: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = _computed(models(target).session(), monkeypatch, chunk=chunk, logits_to_keep=1)
    assert counts == [int(count) for count in kept]


@pytest.mark.exhaustive
def test_a_rewind_that_feeds_tokens_again_computes_no_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(tmp_path / "a", decoder("input_rnn"), "onnx")
    model, widths = load(tmp_path / "a", provider="cpu"), []
    session, right = model.session(), model.graph.bind
    session.prefill(PROMPTS[:1])

    def bind(feeds: Any, states: Any, outputs: Any, **named: Any) -> Any:
        widths.append(outputs["logits"].shape)
        return right(feeds, states, outputs, **named)

    monkeypatch.setattr(model.graph, "bind", bind)
    session.rewind(3)
    assert widths == [(1, 0, 61)]


@pytest.mark.parametrize("name", [*TARGETS, "mask"])
@pytest.mark.parametrize(("keep", "chunk"), [(1, None), (3, 4), (10**30, 10**30)])
def test_the_last_outputs_of_ragged_rows_stand_at_the_end(
    name: str, keep: int, chunk: Any, models: Models
) -> None:
    whole = models(name).session().prefill(PROMPTS)
    kept = models(name).session().prefill(PROMPTS, chunk=chunk, logits_to_keep=keep)
    assert kept.shape == (3, min(keep, 10), 61)
    for row, prompt in enumerate(PROMPTS):
        count = min(keep, len(prompt))
        assert (
            worst_error(
                kept[row, kept.shape[1] - count :], whole[row, len(prompt) - count : len(prompt)]
            )
            < 1e-5
        )
        assert not kept[row, : kept.shape[1] - count].any()


def test_certificates_compare_them_where_the_graph_chooses_and_all_logits_everywhere(
    models: Models,
) -> None:
    tokens = np.zeros((3, 36), np.int64)
    case = Case(tokens, tokens[..., None], [0] * 3, 18, tokens, tokens[..., None])
    chosen, whole = (
        {scenario.name for scenario in measuring.scenarios_of(models(name).manifest, case)}
        for name in ("onnx", "mask")
    )
    assert whole < chosen and chosen - whole == {"last of ragged rows", "last of left padding"}


def test_none_and_0_keep_all(models: Models) -> None:
    results = [models("ort").session().prefill(PROMPTS, logits_to_keep=keep) for keep in (None, 0)]
    assert results[0].shape == (3, 10, 61) and np.array_equal(*results)


def test_rows_without_tokens_keep_nothing(models: Models) -> None:
    session = models("ort").session()
    session.prefill(PROMPTS)
    kept = session.prefill([[], [5, 6], []], logits_to_keep=1)
    assert kept.shape == (3, 1, 61) and kept.any(axis=(1, 2)).tolist() == [False, True, False]


def test_admitted_rows_keep_their_last_logits(models: Models) -> None:
    session = models("ort").session()
    session.prefill(PROMPTS[:1])
    kept = session.admit(PROMPTS[1:], logits_to_keep=1)
    whole = models("ort").session().prefill(PROMPTS[1:])
    assert worst_error(kept[:, 0], np.stack([whole[0, 1], whole[1, 4]])) < 1e-5


def test_a_block_keeps_its_last_outputs_too(tmp_path: Path) -> None:
    exported(tmp_path / "a", block("rope"), "torchscript")
    model = load(tmp_path / "a", provider="cpu")
    x = np.random.default_rng(0).standard_normal((2, 9, 48)).astype(np.float32)
    assert np.array_equal(
        model.session().prefill(x, logits_to_keep=2), model.session().prefill(x)[:, -2:]
    )


@pytest.mark.parametrize(
    "target", ["torchscript", pytest.param("ort", marks=pytest.mark.exhaustive)]
)
def test_an_artefact_without_the_input_gives_the_same(
    target: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = models(target)
    assert later.manifest.input("logits_index") is not None
    for module in (signatures, describe):  # older artefacts have graphs without this input
        monkeypatch.setattr(module, "takes_logits_index", lambda model, signature: False)
    export(seeded(decoder("rope")), target, tmp_path / "a", verify=False)
    earlier = load(tmp_path / "a", provider="cpu", threads=1)
    assert earlier.manifest.input("logits_index") is None
    for keep in (None, 1, 3):
        kept = earlier.session().prefill(PROMPTS, chunk=4, logits_to_keep=keep)
        wanted = later.session().prefill(PROMPTS, chunk=4, logits_to_keep=keep)
        assert worst_error(kept, wanted) < 1e-5
