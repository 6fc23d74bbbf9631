"""Calibration data, inputs of a model that are read from a file; texts of the package, and the text
on which the loss of few bits is measured.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posenc_export.export.describe import Model, eager, text_of
from posenc_export.runtime.artefact.manifest import Calibration
from posenc_export.runtime.artefact.tokenizer import BYTES, read_tokenizer
from posenc_export.shared.refusal import refusal

LENGTH = 256  # tokens per window
WINDOWS = 512  # largest number of windows
TEXT = Path(__file__).with_name("text.txt")
# For models with a tokenizer, if there is no other calibration data.
CALIBRATION = Path(__file__).with_name("calibration.txt")
HELD_WINDOWS = 8  # of calibration data that are held out, or of the text of the package
# Tokens of the text of the package that are measured, and those in an export with the quick check.
TOKENS, FEW = 2048, 512
MOST = 64  # windows that are measured of a file given for this purpose
SHARE = 8  # of calibration data, at most one window of SHARE is held out
HELD_OUT, PACKAGE, FILE = "held-out calibration text", "text of the package", "text"


@dataclass(frozen=True)
class Sample:
    """Inputs of a model, split into windows that are independent rows."""

    # [n,L] int64 token ids, each with the tokens in front that begin a text, or [n,L,E] float32
    # hidden states
    windows: np.ndarray
    sha256: str  # digest of the content
    first: int = 0  # number of tokens that begin a text, such as 1 for a beginning-of-text token
    bytes_of_token: float = 1.0  # mean length of a token of the text in bytes
    name: str = ""  # of a text that a loss is measured on: FILE, HELD_OUT or PACKAGE

    @property
    def described(self) -> Calibration:
        """The entry in the manifest."""
        return Calibration(self.sha256, int(np.prod(self.windows.shape[:2])))

    def kept(self, tokens: int) -> "Sample":
        """Return the sample with its first windows, of `tokens` tokens together."""
        return dataclasses.replace(self, windows=self.windows[: tokens // self.windows.shape[1]])


def read(path: str | Path, model: Model, what: str = "calibration data") -> Sample:
    """Read a sample from a file.

    Args:
        path: UTF-8 text for models that read tokens, which is tokenized or read as bytes; .npy with
            float32 [tokens,E] for models that read hidden states.
        what: what the sample is, for messages.

    Raises:
        ValueError: a model with cross-attention, or without a tokenizer and with a vocabulary other
            than bytes; a file of another format, or shorter than a window.
        OSError: the file cannot be read.
    """
    manifest = eager(model)[1]
    if manifest.encoder:
        rule = f"a model that reads no encoder for {what}"
        raise refusal("export", rule, "one that does", f"omit the {what}")
    content, source = Path(path).read_bytes(), manifest.inputs[0]
    if source.dtype == "int64":
        sample = of_text(content, model, what)
    else:
        rows = _numbers(Path(path), int(source.axes[-1]))
        windows = _windows(rows, min(LENGTH, manifest.max_positions))
        sample = Sample(windows, hashlib.sha256(content).hexdigest())
    if not len(sample.windows):
        rule = f"at least {min(LENGTH, manifest.max_positions)} tokens of {what}"
        raise refusal("export", rule, f"fewer in {path}", "pass a longer file")
    return dataclasses.replace(sample, windows=sample.windows[:WINDOWS])


def of_text(content: bytes, model: Model, what: str = "text") -> Sample:
    """Return all windows of a text, UTF-8, tokenized or read as bytes. ValueError: a model without
    a tokenizer and with a vocabulary other than bytes; a tokenizer with token ids that the model
    does not have.
    """
    manifest = eager(model)[1]
    tokenizer = text_of(model).tokenizer
    digest = hashlib.sha256(content).hexdigest()
    length = min(LENGTH, manifest.max_positions)
    if not tokenizer and manifest.vocabulary != BYTES:
        known = f"a tokenizer or of bytes (vocabulary {BYTES})"
        rule = f"export: expected a model with {known} for {what} from a file"
        raise ValueError(f"{rule}, got vocabulary {manifest.vocabulary}; omit it")
    if not tokenizer:
        return Sample(_windows(np.frombuffer(content, np.uint8).astype(np.int64), length), digest)
    reader = read_tokenizer(tokenizer)
    encoded = reader.encode(content.decode("utf-8", "replace"), add_special_tokens=False)
    ids = np.array(encoded.ids, np.int64)
    if ids.size and ids.max() >= manifest.vocabulary:
        got = f"{ids.max()} from the tokenizer"
        remedy = "save the tokenizer of the model"
        raise refusal("export", f"token ids below {manifest.vocabulary} for {what}", got, remedy)
    begin = _begin(reader)
    rows = _windows(ids, length - len(begin)) if len(begin) < length else ids[:0].reshape(0, length)
    fronts = np.broadcast_to(np.array(begin, np.int64), (len(rows), len(begin)))
    size = len(content) / max(len(ids), 1)
    return Sample(np.concatenate([fronts, rows], axis=1), digest, len(begin), size)


def _begin(reader: Any) -> list[int]:
    """Return the token ids that a tokenizer puts in front of a text."""
    plain, whole = (reader.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def _windows(rows: np.ndarray, length: int) -> np.ndarray:
    """Split rows [n,...] into windows [n/length,length,...] and leave out an incomplete one."""
    count = len(rows) // length
    return rows[: count * length].reshape(count, length, *rows.shape[1:])


def _numbers(path: Path, width: int) -> np.ndarray:
    rule = f"export: expected hidden states float32 [tokens,{width}] in a .npy file for calibration"
    try:
        rows = np.load(path, allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{rule}, got {path.name} ({error}); write it with numpy.save") from None
    if (
        not isinstance(rows, np.ndarray)
        or rows.dtype != np.float32
        or rows.ndim != 2
        or rows.shape[1] != width
        or not np.isfinite(rows).all()
    ):
        alone = isinstance(rows, np.ndarray)
        shape = f"{rows.dtype} {list(rows.shape)}" if alone else "several arrays"
        raise ValueError(f"{rule}, all finite, got {shape}; write it with numpy.save")
    return rows


def with_text(
    sample: Sample | None, given: str | Path | None, model: Model, tokens: int = TOKENS
) -> tuple[Sample | None, Sample | None]:
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
        text = read(given, model, "text")
        return sample, _spread(text, MOST, FILE)
    if not reads_text(model):
        return sample, None
    if sample is not None and len(sample.windows) >= SHARE:
        count = min(HELD_WINDOWS, len(sample.windows) // SHARE)
        held_out = dataclasses.replace(sample, windows=sample.windows[-count:], name=HELD_OUT)
        return dataclasses.replace(sample, windows=sample.windows[:-count]), held_out
    text = of_text(TEXT.read_bytes(), model)
    if not len(text.windows):
        return sample, None  # its tokenizer reads the text as too few tokens
    return sample, _spread(text, -(-tokens // text.windows.shape[1]), PACKAGE)


def default_sample(model: Model) -> Sample | None:
    """Return the package's calibration data for decoders with a tokenizer, or None."""
    if not text_of(model).tokenizer or not reads_text(model):
        return None
    sample = of_text(CALIBRATION.read_bytes(), model)
    return sample if len(sample.windows) else None


def reads_text(model: Model) -> bool:
    """Whether a model predicts the next token of a text."""
    manifest = eager(model)[1]
    known = bool(text_of(model).tokenizer) or manifest.vocabulary == BYTES
    return manifest.decodes and bool(manifest.states) and not manifest.encoder and known


def _spread(text: Sample, most: int, name: str) -> Sample:
    """Return at most `most` windows, evenly spread over a text, so that all of its parts count."""
    chosen = np.linspace(0, len(text.windows) - 1, min(most, len(text.windows))).astype(int)
    return dataclasses.replace(text, windows=text.windows[chosen], name=name)
