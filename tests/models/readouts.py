"""Encoders with a readout, tiny and with random weights."""

from typing import Any

from msgspec.structs import replace

from posenc_export.models.config import ReadoutConfig, StackConfig
from tests.tiny import encoder

DENSE, NORMALIZE = {"name": "dense", "size": 7, "activation": "tanh"}, {"name": "normalize"}


def sentences(variant: str, *pooling: str, layers: Any = (DENSE, NORMALIZE)) -> StackConfig:
    """Return an encoder that pools its hidden states."""
    return replace(
        encoder(variant),
        readout=ReadoutConfig(output="sentence_embedding", pooling=pooling, layers=tuple(layers)),
    )


def labels(variant: str) -> StackConfig:
    """Return an encoder with an output for each token."""
    return replace(
        encoder(variant),
        readout=ReadoutConfig(
            output="logits", layers=({"name": "norm"}, {"name": "dense", "size": 3})
        ),
    )
