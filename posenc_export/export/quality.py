"""Measure what an artefact in few bits loses against its float32 module; refuse a large loss."""

import math
from pathlib import Path
from typing import Any, Mapping, NamedTuple

import numpy as np

from posenc_export.export.describe import Model
from posenc_export.export.expected import eager_session, expected_outputs
from posenc_export.export.quantization.samples import Sample
from posenc_export.runtime import load
from posenc_export.runtime.artefact.certificate import FAILED, FORM
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Quality
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.proof import rounded_up
from posenc_export.shared.numerics import Errors
from posenc_export.shared.progress import Progress, Steps, silent
from posenc_export.shared.refusal import refusal

BY_SIZE = "int4-128, int4, int8, int8-32, float32"  # formats of weights, smallest first
READ = 64  # tokens of text that are read at a time; their logits take 13 MB with 50,000 token ids
TOKENS = 16  # whose logits are compared at a time, in float64


class Inputs(NamedTuple):
    """What the loss of a model is measured with."""

    model: Model  # the float32 module, with weights that are not rounded
    sample: Sample | None  # calibration data that weights were rounded with; None for none
    # None measures outputs on the inputs of the reference, random tokens or random numbers.
    text: Sample | None
    most: float  # largest perplexity over that of `model`
    formats: Mapping[str, str] | None = None  # of each rounded weight, if a size chose them


def measured(folder: Path, manifest: Manifest, inputs: Inputs, say: Progress) -> Quality:
    """Measure the loss of a certified artefact. say: reports progress. ValueError: on text, the
    perplexity is more than `inputs.most` times that of the float32 module.
    """
    assert manifest.certificate is not None
    cells, tolerance = manifest.certificate["cells"], manifest.certificate["tolerance"]
    loaded = load(folder, provider="cpu", threads=1)
    if inputs.text is None:
        loss = _of_reference(loaded.session(), inputs.model, manifest)
        name, digest = "random tokens" if manifest.vocabulary else "random numbers", ""
    else:
        length = inputs.text.windows.shape[1]
        session = loaded.session(capacity=length)
        loss = _of_text(session, eager_session(inputs.model, length), inputs.text, say)
        name, digest = inputs.text.name, inputs.text.sha256
        _check_loss(loss, manifest, inputs, inputs.text)
    exact = max(error for name, error in cells.items() if name.startswith(FORM))
    measured_on = {"inputs": name, "sha256": digest, "exact": exact, "exact_tolerance": tolerance}
    return Quality(**measured_on, **loss.figures(manifest))


class Loss:
    """Differences of two models on the same inputs, accumulated over rows of tokens.
    bytes_of_token: mean length of a token in bytes; 0 if the tokens are no text.
    """

    def __init__(self, bytes_of_token: float = 0.0) -> None:
        self.bytes_of_token, self.tokens, self.same = bytes_of_token, 0, 0
        self._errors = Errors()
        # Sums of cross-entropies in nats, of the measured and of the float32 model.
        self._entropy = np.zeros(2)

    @property
    def ratio(self) -> float:
        """Perplexity over that of float32; 1 without text."""
        measured, exact = self._entropy / self.tokens
        return _exponential(measured - exact)

    def add(
        self, actual: np.ndarray, expected: np.ndarray, following: np.ndarray | None = None
    ) -> None:
        """Add outputs [B,L,V]. following: ids [B,L] of the tokens after each, in a text."""
        self.tokens += int(np.prod(expected.shape[:-1]))
        for first in range(0, expected.shape[1], TOKENS):
            few = slice(first, first + TOKENS)
            both = actual[:, few], expected[:, few]
            self.same += int((both[0].argmax(-1) == both[1].argmax(-1)).sum())
            self._errors.add(*both)
            if following is not None:
                self._entropy += [_cross_entropy(logits, following[:, few]) for logits in both]

    def figures(self, manifest: Manifest) -> dict[str, Any]:
        """Return the fields of Quality."""
        figures = {
            "error": rounded_up(self._errors.rms),
            "agreement": self.same / self.tokens if manifest.decodes else None,
            "tokens": self.tokens,
        }
        if not self.bytes_of_token:
            return figures
        for name, nats in zip(("", "float32_"), self._entropy / self.tokens, strict=True):
            bits = nats / math.log(2) / self.bytes_of_token
            figures[f"{name}perplexity"] = _short(_exponential(nats))
            figures[f"{name}bits_per_byte"] = _short(bits)
        return figures


def _of_text(session: Session, plain: Session, sample: Sample, say: Progress = silent) -> Loss:
    """Compare two decoders on windows of text. The tokens that begin a text are not predicted."""
    loss, first = Loss(sample.bytes_of_token), max(sample.first, 1)
    steps = Steps(say, "measuring the loss against float32", len(sample.windows), "windows of text")
    for window in sample.windows:
        session.reset()
        plain.reset()
        for begin in range(0, len(window) - 1, READ):
            read = window[None, begin : min(begin + READ, len(window) - 1)]
            actual, expected = (of.prefill(read, chunk=READ) for of in (session, plain))
            skipped = max(first - 1 - begin, 0)
            following = window[None, begin + 1 + skipped : begin + 1 + read.shape[1]]
            loss.add(actual[:, skipped:], expected[:, skipped:], following)
        steps.advance()
    return loss


def _of_reference(session: Session, model: Model, manifest: Manifest) -> Loss:
    """Compare an artefact with the module on the case of the reference."""
    loss, case = Loss(), expected_outputs(model, manifest, long=False).case
    session.reset()
    chunk = case.tokens.shape[1]
    loss.add(session.prefill(case.tokens, chunk=chunk, **case.beginning()), case.full)
    return loss


def _cross_entropy(logits: np.ndarray, following: np.ndarray) -> float:
    """Return the sum of -log of the probability of each following token, in nats."""
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    at = np.take_along_axis(wide, following[..., None], -1)[..., 0]
    return float((np.log(np.exp(wide, out=wide).sum(-1)) - at).sum())


def _exponential(nats: float) -> float:
    return math.exp(nats) if nats < math.log(FAILED) else FAILED


def _short(number: float) -> float:
    return float(f"{number:.5g}")


def _check_loss(loss: Loss, manifest: Manifest, inputs: Inputs, text: Sample) -> None:
    """Raise ValueError for a loss above the limit."""
    if loss.ratio <= inputs.most:
        return
    figures = loss.figures(manifest)
    weights = manifest.weights.format if manifest.weights else ""
    formats = {"weights": weights, "cache": manifest.cache}
    named = [f"{name} {format_}" for name, format_ in formats.items() if format_]
    what = " and ".join(named) or f"dtype {manifest.dtype}"
    measured = (
        f"{figures['perplexity']:.3g} instead of {figures['float32_perplexity']:.3g} on "
        f"{loss.tokens} tokens, {text.name}"
    )
    enough = math.ceil(100 * loss.ratio) / 100
    remedy = f"choose a larger one of {BY_SIZE}, calibrate 4 bits with your text, or accept it"
    rule = f"{what} to raise the perplexity at most {inputs.most:g} times"
    got = f"{loss.ratio:.2f} times ({measured})"
    raise refusal("export", rule, got, f"{remedy} with max_loss {enough:.2f}")
