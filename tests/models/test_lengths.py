"""Decoders with LongRoPE: which factors are chosen, as transformers chooses for which prompts."""

from pathlib import Path
from typing import Any

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


def test_short_prompts_of_a_long_range_have_long_factors(folder: Path) -> None:
    assert _differs(folder, _peer(), SHORT) and not _differs(folder, _peer(8), SHORT)


def test_prompts_up_to_the_trained_length_equal_those_of_transformers_with_short_factors(
    folder: Path,
) -> None:
    assert not _differs(folder, _peer(), SHORT, max_positions=TRAINED)
