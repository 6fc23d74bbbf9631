"""Decoders with LongRoPE: which factors are chosen, as transformers chooses for which prompts."""

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch

from posenc_export.export.expected import eager_session
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import LONGROPE, SIZES  # noqa: E402
from tests.models.patterns import share, theirs, tokens_of  # noqa: E402

TRAINED = 24
SHORT, LONG = tokens_of(length=TRAINED), tokens_of(length=40)


def _peer(trained: int = TRAINED) -> Any:
    """Return a model whose weights and magnitude do not depend on the trained length."""
    torch.manual_seed(0)
    rotation = {**LONGROPE, "attention_factor": 1.25, "original_max_position_embeddings": trained}
    config = transformers.Phi3Config(
        **{**SIZES, "rope_parameters": rotation, "original_max_position_embeddings": trained}
    )
    return transformers.Phi3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lengths") / "phi3"
    _peer().save_pretrained(place)
    return place


def _differs(folder: Path, peer: Any, tokens: np.ndarray, **given: Any) -> bool:
    return (
        share(
            [
                (
                    eager_session(as_model(from_pretrained(folder, **given))).prefill(tokens),
                    theirs(peer, tokens),
                )
            ]
        )
        > 1
    )


def test_prompts_beyond_the_trained_length_equal_those_of_transformers_by_default(
    folder: Path,
) -> None:
    assert not _differs(folder, _peer(), LONG)


def test_greedy_tokens_after_a_prompt_beyond_the_trained_length_equal_those_of_transformers(
    folder: Path,
) -> None:
    wanted = (
        _peer()
        .generate(torch.from_numpy(LONG[:1]), max_new_tokens=12, do_sample=False)[
            0, LONG.shape[1] :
        ]
        .tolist()
    )
    session = eager_session(as_model(from_pretrained(folder)))
    results = [int(token[0]) for token in session.generate(LONG[:1], 12, stop=())]
    assert results[: len(wanted)] == wanted


def test_long_factors_of_short_prompts_are_those_of_a_model_with_a_shorter_trained_length(
    folder: Path,
) -> None:
    assert _differs(folder, _peer(), SHORT, lengths="long") and not _differs(
        folder, _peer(8), SHORT, lengths="long"
    )


@pytest.mark.parametrize(
    "given",
    [
        {"max_positions": TRAINED},
        {"max_positions": TRAINED, "lengths": "short"},
    ],
)
def test_prompts_up_to_the_trained_length_equal_those_of_transformers_with_short_factors(
    given: Dict[str, Any], folder: Path
) -> None:
    assert not _differs(folder, _peer(), SHORT, **given)


REFUSED = {
    "unknown": (
        {"lengths": "longest"},
        "expected lengths to be one of long, short, got 'longest'",
    ),
    "short beyond": (
        {"lengths": "short"},
        f"expected max_positions of at most {TRAINED}, the trained length, with lengths short, "
        "got 512",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_lengths_that_do_not_fit_are_refused(case: str, folder: Path) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder, **given)


def test_lengths_are_refused_for_a_model_without_longrope(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected lengths only for a model with LongRoPE"):
        from_pretrained(tmp_path, lengths="long")
