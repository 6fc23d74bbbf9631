"""Settings of generation_config.json: forbidden and forced tokens give the greedy tokens of
transformers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export.commands.model_argument import checkpoint
from posenc_export.export.expected import eager_session
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session
from posenc_export.runtime.session.generation import Sampling

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.pairs import encoded, inputs, made  # noqa: E402

MOST = 8
T5 = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
MANY = {"suppress_tokens": list(range(5, 40, 2)), "begin_suppress_tokens": list(range(4, 60, 3))}
NAME = "mt5 both parts"
# For each case, generation_config.json; tests/models/test_pairs.py has none.
CASES: dict[str, dict[str, Any]] = {
    "suppressed": {**T5, "suppress_tokens": MANY["suppress_tokens"]},
    "suppressed first": {**T5, "begin_suppress_tokens": MANY["begin_suppress_tokens"]},
    "forced first": {**T5, "forced_bos_token_id": 33},
    "forced first and suppressed": {**T5, **MANY, "forced_bos_token_id": 44},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("generation")
    made(NAME).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    return transformers.MT5ForConditionalGeneration.from_pretrained(folder)


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Any:
    """The decoder, which is read once: its settings are those of `text`."""
    return as_model(from_pretrained(folder, part="decoder"))


def _session(decoder: Any, folder: Path, **settings: Any) -> Session:
    """Return a session of the decoder with a generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    decoder.text = from_pretrained(folder, part="decoder").text
    return eager_session(decoder)


def _same(found: list[int], wanted: list[int]) -> bool:
    """Whether two rows have the same tokens up to the end of the text, after which both pad."""
    text = found[: found.index(-1)] if -1 in found else found
    return wanted[: len(text)] == text and set(wanted[len(text) :]) <= {0}


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(
    case: str, folder: Path, peer: Any, decoder: Any
) -> None:
    session = _session(decoder, folder, **CASES[case])
    peer.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    read, mask = map(torch.from_numpy, inputs())
    source = {"input_ids": read, "attention_mask": mask}
    wanted = peer.generate(**source, max_new_tokens=MOST, do_sample=False, num_beams=1).numpy()
    result = np.stack(list(session.generate(None, MOST, encoder=encoded(folder))), axis=1)
    assert all(_same(*pair) for pair in zip(result.tolist(), wanted[:, 1:].tolist(), strict=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no start": (
        {"eos_token_id": 2, "decoder_start_token_id": 99},
        "expected a decoder that reads an encoder and has start_ids",
    ),
    "ids that are text": (
        {**T5, "suppress_tokens": ["a"]},
        "expected suppress_tokens to be null, an integer of 0 or more, or a list of these",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, folder: Path, decoder: Any) -> None:
    settings, rule = REFUSED[case]
    with pytest.raises(ValueError, match=rule):
        session = _session(decoder, folder, **settings)
        next(session.generate(None, MOST, encoder=np.zeros((1, 5, 128), np.float32)))


def test_settings_that_are_not_applied_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        **T5,
        "num_beams": 4,
        "repetition_penalty": 1.0,
        "bad_words_ids": None,
        "min_length": 3,
        "temperature": 0.6,
        "return_timestamps": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(given))
    checkpoint(str(folder), {"part": "decoder"})
    assert "does not apply num_beams=4, min_length=3 of" in capsys.readouterr().err


def test_forbidden_tokens_are_never_sampled() -> None:
    logits, sampling = np.array([3.0, -np.inf, 2.0, -np.inf], np.float32), Sampling(50.0, 0, 1.0)
    randoms = [np.random.default_rng(seed).random for seed in range(60)]
    assert {sampling.choose(logits, random) for random in randoms} == {0, 2}


def test_drafts_follow_the_same_rules(folder: Path, decoder: Any) -> None:
    rows, settings = encoded(folder)[:2], {**T5, **MANY, "forced_bos_token_id": 44}
    plain, drafted = (
        list(
            _session(decoder, folder, **settings).generate(
                None, 20, encoder=rows, stop=(), speculate=how
            )
        )
        for how in (None, "lookup")
    )
    assert (
        np.array_equal(plain, drafted)
        and set(plain[0]) == {44}
        and not {5, 7, 9}.intersection(np.unique(plain))
    )
