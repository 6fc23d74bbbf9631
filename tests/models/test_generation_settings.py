"""Settings of generation_config.json: forbidden and forced tokens, language and task give the
greedy tokens of transformers.
"""

import json
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
import torch

from posenc_export.export.expected import eager_session
from posenc_export.models import generation_settings
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.session.generation import choose

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.pairs import inputs, made, ours_of  # noqa: E402

MOST = 8
LANGUAGES = {
    "lang_to_id": {"<|en|>": 40, "<|de|>": 41, "<|zh|>": 42},
    "task_to_id": {"translate": 43, "transcribe": 44},
    "is_multilingual": True,
}
TIMES = {
    "no_timestamps_token_id": 60
}  # transformers cuts texts at larger ids, which stand for times
START = {"decoder_start_token_id": 3, "eos_token_id": 2, "pad_token_id": 0}
T5 = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
MANY = {"suppress_tokens": list(range(5, 40, 2)), "begin_suppress_tokens": list(range(4, 60, 3))}
# For each case, the model, its generation_config.json, and arguments of generate.
CASES: Dict[str, Tuple[str, Dict[str, Any], Dict[str, Any]]] = {
    "whisper, nothing": ("whisper", START, {}),
    "whisper, suppressed": ("whisper", {**START, "suppress_tokens": MANY["suppress_tokens"]}, {}),
    "whisper, suppressed first": ("whisper",
        {**START, "begin_suppress_tokens": MANY["begin_suppress_tokens"]}, {}),
    "whisper, both": ("whisper", {**START, **MANY}, {}),
    "whisper of one language": ("whisper", {**START, **MANY, **TIMES, "is_multilingual": False},
        {}),
    "whisper, old forced ids": ("whisper",
        {**START, **MANY, "forced_decoder_ids": [[1, 60]], **TIMES}, {}),
    "whisper, old forced language": ("whisper",
        {**START, **LANGUAGES, **TIMES, "forced_decoder_ids": [[1, 41], [2, 43]]}, {}),
    "whisper, old forced ids without language": ("whisper",
        {**START, **LANGUAGES, **TIMES, "forced_decoder_ids": [[1, None], [2, 44]]}, {}),
    "whisper, detected": ("whisper", {**START, **LANGUAGES, **TIMES, **MANY}, {}),
    "whisper, language of the checkpoint": ("whisper",
        {**START, **LANGUAGES, **TIMES, "language": "<|de|>"}, {}),
    "whisper, task of the checkpoint": ("whisper",
        {**START, **LANGUAGES, **TIMES, "task": "translate"}, {}),
    "whisper, both of the checkpoint": ("whisper",
        {**START, **LANGUAGES, **TIMES, "language": "zh", "task": "translate", **MANY}, {}),
    "whisper, language": ("whisper", {**START, **LANGUAGES, **TIMES, **MANY}, {"language": "de"}),
    "whisper, task": ("whisper", {**START, **LANGUAGES, **TIMES}, {"task": "translate"}),
    "whisper, language and task over forced ids": (
        "whisper", {**START, **LANGUAGES, **TIMES, "forced_decoder_ids": [[1, 40], [2, 44]]},
        {"language": "<|zh|>", "task": "translate"},
    ),
    "whisper, no timestamps token": ("whisper", {**START, **LANGUAGES}, {"language": "en"}),
    "mt5, nothing": ("mt5 both parts", T5, {}),
    "mt5, suppressed": ("mt5 both parts", {**T5, **MANY}, {}),
    "mt5, forced first": ("mt5 both parts", {**T5, "forced_bos_token_id": 33}, {}),
    "mt5, forced first and suppressed": ("mt5 both parts",
        {**T5, **MANY, "forced_bos_token_id": 44}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("generation")
    for name in ("whisper", "mt5 both parts"):
        made(name).save_pretrained(place / name)
    return place


def _same(found: List[int], wanted: List[int]) -> bool:
    """Whether two rows have the same tokens up to the end of the text. Whisper of transformers
    leaves out the stop token, and both pad ended rows.
    """
    text = found[: found.index(-1) - 1] if -1 in found else found
    return wanted[: len(text)] == text and (
        len(text) >= len(wanted) - 1 or set(wanted[len(text) + 1 :]) <= {0}
    )


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, folders: Path) -> None:
    name, settings, given = CASES[case]
    (folders / name / "generation_config.json").write_text(json.dumps(settings))
    peer = getattr(
        transformers, f"{ {'w': 'Whisper', 'm': 'MT5'}[name[0]] }ForConditionalGeneration"
    ).from_pretrained(folders / name)
    read, mask = inputs(name == "whisper")
    source = (
        {"input_features": torch.from_numpy(read)}
        if name == "whisper"
        else {"input_ids": torch.from_numpy(read), "attention_mask": torch.from_numpy(mask)}
    )
    wanted = peer.generate(
        **source, **given, max_new_tokens=MOST, do_sample=False, num_beams=1
    ).numpy()[:, -MOST:]
    encoded = eager_session(from_pretrained(folders / name, part="encoder")).prefill(
        ours_of(read), attention_mask=mask
    )
    rows = [row[seen == 1] for row, seen in zip(encoded, mask, strict=True)]
    session = eager_session(from_pretrained(folders / name, part="decoder"))
    result = np.stack(list(session.generate(None, MOST, encoder=rows, **given)), axis=1)
    assert all(_same(*pair) for pair in zip(result.tolist(), wanted.tolist(), strict=True)), (
        result,
        wanted,
    )


REFUSED: Dict[str, Tuple[Dict[str, Any], Dict[str, Any], str]] = {
    "unknown language": (
        {**START, **LANGUAGES},
        {"language": "dee"},
        "expected language to be one of en, de, zh, got 'dee'; did you mean de",
    ),
    "unknown task": (
        {**START, **LANGUAGES},
        {"task": "translation"},
        "expected task to be one of translate, transcribe, got 'translation'",
    ),
    "no languages": (
        START,
        {"language": "en"},
        "expected no language for a model whose generation_config.json lists none, got 'en'",
    ),
    "a prompt too": (
        {**START, **LANGUAGES},
        {"prompt": [[3]], "language": "en"},
        "expected no prompt with language or task",
    ),
    "no start": (
        {"eos_token_id": 2, "decoder_start_token_id": 99},
        {},
        "expected a decoder that reads an encoder and has start_ids",
    ),
    "ids that are text": (
        {**START, "suppress_tokens": ["a"]},
        {},
        "expected suppress_tokens to be null, an integer of 0 or more, or a list of these",
    ),
    "languages that are a list": (
        {**START, "lang_to_id": ["en"]},
        {},
        "expected lang_to_id to map names to token ids",
    ),
    "a gap in forced ids": (
        {**START, "forced_decoder_ids": [[2, 5]]},
        {},
        "expected forced_decoder_ids to be pairs of a place, from 1 on",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, folders: Path) -> None:
    settings, given, rule = REFUSED[case]
    (folders / "whisper" / "generation_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rule):
        session = eager_session(from_pretrained(folders / "whisper", part="decoder"))
        next(
            session.generate(
                given.pop("prompt", None),
                MOST,
                encoder=np.zeros((1, 5, 6 * 48), np.float32),
                **given,
            )
        )


def test_settings_that_are_not_applied_are_named() -> None:
    given = {
        "num_beams": 4,
        "repetition_penalty": 1.0,
        "bad_words_ids": None,
        "min_length": 3,
        "temperature": 0.6,
        "return_timestamps": False,
    }
    assert generation_settings.unapplied(
        {"generation_config.json": json.dumps(given).encode()}
    ) == ["num_beams=4", "min_length=3"]


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = np.array([[3.0, -np.inf, 2.0, -np.inf]], np.float32)
    assert {
        int(choose(logits, 50.0, 0, 1.0, np.random.default_rng(seed))[0]) for seed in range(60)
    } == {0, 2}


def test_drafts_follow_the_same_rules(folders: Path) -> None:
    (folders / "mt5 both parts" / "generation_config.json").write_text(
        json.dumps({**T5, **MANY, "forced_bos_token_id": 44})
    )
    model, encoded = (
        from_pretrained(folders / "mt5 both parts", part="decoder"),
        np.random.default_rng(0).standard_normal((2, 5, 128)).astype(np.float32),
    )
    plain, drafted = (
        list(eager_session(model).generate(None, 20, encoder=encoded, stop=(), speculate=how))
        for how in (None, "lookup")
    )
    assert (
        np.array_equal(plain, drafted)
        and set(plain[0]) == {44}
        and not {5, 7, 9}.intersection(np.unique(plain))
    )
