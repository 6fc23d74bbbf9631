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


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return as_model(from_pretrained(folder))


def _differs(model: Any, peer: Any, tokens: np.ndarray) -> bool:
    return share([(eager_session(model).prefill(tokens), theirs(peer, tokens))]) > 1


def test_prompts_beyond_the_trained_length_equal_those_of_transformers_by_default(
    model: Any,
) -> None:
    assert not _differs(model, _peer(), LONG)
    how = {"max_new_tokens": 12, "do_sample": False}
    wanted = _peer().generate(torch.from_numpy(LONG[:1]), **how)[0, LONG.shape[1] :].tolist()
    results = [int(token[0]) for token in eager_session(model).generate(LONG[:1], 12, stop=())]
    assert results[: len(wanted)] == wanted


def test_short_prompts_of_a_long_range_have_long_factors(model: Any) -> None:
    assert _differs(model, _peer(), SHORT) and not _differs(model, _peer(8), SHORT)


def test_prompts_up_to_the_trained_length_equal_those_of_transformers_with_short_factors(
    folder: Path,
) -> None:
    model = as_model(from_pretrained(folder, max_positions=TRAINED))
    assert not _differs(model, _peer(), SHORT)
