"""Texts of the package, and the text on which the loss of few bits is measured."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Optional, Tuple, Union

import numpy as np

from posenc_export.export.describe import Model, eager, text_of
from posenc_export.export.quantization import samples
from posenc_export.export.quantization.samples import Sample
from posenc_export.runtime.artefact.tokenizer import BYTES

TEXT = Path(__file__).with_name("text.txt")
# For models with a tokenizer, if there is no other calibration data.
CALIBRATION = Path(__file__).with_name("calibration.txt")
WINDOWS = 8  # of calibration data that are held out, or of the text of the package
# Tokens of the text of the package that are measured, and those in an export with the quick check.
TOKENS, FEW = 2048, 512
MOST = 64  # windows that are measured of a file given for this purpose
SHARE = 8  # of calibration data, at most one window of SHARE is held out
HELD_OUT, PACKAGE, FILE = "held-out calibration text", "text of the package", "text"


@dataclasses.dataclass(frozen=True)
class MeasuredText:
    """The text that a loss is measured on."""

    name: str  # what it is: FILE, HELD_OUT or PACKAGE
    sample: Sample  # its windows


def with_text(
    sample: Optional[Sample], given: Union[str, Path, None], model: Model, tokens: int = TOKENS
) -> Tuple[Optional[Sample], Optional[MeasuredText]]:
    """Return the calibration data that weights are rounded with, and the text that the loss is
    measured on.

    The text is the file `given`; otherwise windows that are held out of the calibration data, if
    there are at least SHARE; otherwise `tokens` of the text of the package. It is None for a model
    that reads no text: one without token ids, without a tokenizer and with other token ids than
    bytes, or one that reads an encoder. ValueError: a text is given for a model that reads none, or
    is too short.
    """
    if given is not None:
        if not reads_text(model):
            raise ValueError(
                "export: expected a decoder with a tokenizer or of bytes, which reads no "
                "encoder, for a text to measure it on, got another; omit the text"
            )
        text = samples.read(given, model, "text")
        return sample, MeasuredText(FILE, _spread(text, MOST))
    if not reads_text(model):
        return sample, None
    if sample is not None and len(sample.windows) >= SHARE:
        count = min(WINDOWS, len(sample.windows) // SHARE)
        parts = (sample.windows[:-count], sample.windows[-count:])
        kept, held_out = (dataclasses.replace(sample, windows=part) for part in parts)
        return kept, MeasuredText(HELD_OUT, held_out)
    text = samples.of_text(TEXT.read_bytes(), model)
    if not len(text.windows):
        return sample, None  # its tokenizer reads the text as too few tokens
    return sample, MeasuredText(PACKAGE, _spread(text, -(-tokens // text.windows.shape[1])))


def default_sample(model: Model) -> Optional[Sample]:
    """Return the package's calibration data for decoders with a tokenizer, or None."""
    if not text_of(model).tokenizer or not reads_text(model):
        return None
    sample = samples.of_text(CALIBRATION.read_bytes(), model)
    return sample if len(sample.windows) else None


def is_default(digest: str) -> bool:
    """Whether a digest is that of the calibration data of the package."""
    return digest == hashlib.sha256(CALIBRATION.read_bytes()).hexdigest()


def reads_text(model: Model) -> bool:
    """Whether a model predicts the next token of a text."""
    manifest = eager(model)[1]
    known = bool(text_of(model).tokenizer) or manifest.vocabulary == BYTES
    return manifest.decodes and bool(manifest.states) and not manifest.encoder and known


def _spread(text: Sample, most: int) -> Sample:
    """Return at most `most` windows, evenly spread over a text, so that all of its parts count."""
    chosen = np.linspace(0, len(text.windows) - 1, min(most, len(text.windows))).astype(int)
    return dataclasses.replace(text, windows=text.windows[chosen])
