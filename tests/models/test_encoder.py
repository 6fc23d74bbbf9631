"""Refusals of encoders."""

import numpy as np
import pytest

from posenc_export.export.describe import eager
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, encoder_config
from posenc_export.models.stack import Stack
from posenc_export.runtime import Model
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from tests.tiny import encoder


def test_methods_that_need_a_cache_or_a_vocabulary_are_refused() -> None:
    module, manifest = eager(seeded(encoder("alibi")))
    session, ids = Model(TorchGraph(module, manifest)).session(), np.arange(12)[None]
    session.prefill(ids)
    for call, message in (
        (lambda: session.step(ids[:, 0]), "expected a model with a cache for step"),
        (lambda: session.rewind(1), "expected a model with a cache for rewind"),
        (
            lambda: list(session.generate(ids, 2)),
            "expected a decoder, .* for generate, got kind encoder",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("variant", ["input_rnn", "fire", "cope", "fox_pair"])
def test_causal_encodings_are_refused_in_encoders_by_name(variant: str) -> None:
    with pytest.raises(ValueError, match="expected causal attention for .*, got bidirectional"):
        Stack(encoder(variant))


def test_a_causal_block_is_refused_in_an_encoder() -> None:
    with pytest.raises(ValueError, match="expected bidirectional attention in an encoder"):
        encoder_config(61, 2, 40, block_config(48, 4, 64))
