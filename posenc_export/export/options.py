"""Options of an export, and which of them each target supports."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from posenc_export.export.quantization.formats import FORMATS, KEEP, MIXED, format_of
from posenc_export.export.signatures import NAMES
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS, SCALED
from posenc_export.runtime.artefact.schema import TARGETS
from posenc_export.runtime.verification.proof import check_tolerance
from posenc_export.shared.progress import Progress
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name

MAX_LOSS = 1.10
KNOWN = {
    "signature": NAMES,
    "dtype": ("float32", "float16", "bfloat16"),
    "weights": (*FORMATS, KEEP),
    "cache": tuple(CACHE_FORMATS),
}


@dataclass(frozen=True)
class ExportOptions:
    """How a model is exported.

    Args:
        signature: "positions" (position_ids) or "mask" (attention_mask).
        dtype: "float32", "float16" or "bfloat16" (target ort-cuda), of weights, activations and
            caches; None selects the target's first dtype.
        verify: run the parity grid and write its certificate; "quick" for its quick check.
        progress: called with one line of text at each stage.
        weights: name of formats.FORMATS to quantize the linear layers and the token table; "keep"
            for the blocks of a GGUF file, on target ort (rounding.kept); None keeps weights
            in dtype.
        calibrate: file with calibration data for weights of 4 bits or int8 and for caches: text, or
            hidden states float32 [tokens,E] in .npy for a model that reads them.
        cache: name of CACHE_FORMATS (runtime.artefact.cache_formats), in which keys and values are
            cached beside float32; "int8" needs calibration data; None keeps caches in dtype.
        tolerance: largest error, above 0 and below 1, of the artefact against its module with the
            same rounded weights. It holds for the float32 form of an artefact that rounds
            activations or caches. None for that of float32 (numerics.tolerance).
        text: file with text on which the loss of an artefact of few bits is measured; None for a
            part of the calibration data, or a text of this package.
        max_loss: limit of the perplexity on that text, divided by that in float32; at least 1.
        size: limit in megabytes (10^6 bytes) of graph and weights, on target ort: each weight gets
            one of several formats (quantization/mixed.py); None for no limit.
    """

    signature: str = "positions"
    dtype: str | None = None
    verify: bool | str = True
    progress: Progress | None = None
    weights: str | None = None
    calibrate: str | Path | None = None
    cache: str | None = None
    tolerance: float | None = None
    text: str | Path | None = None
    max_loss: float = MAX_LOSS
    size: float | None = None

    @property
    def format(self) -> str | None:
        """Format of weights: `weights`, or MIXED if a size is given."""
        return self.weights if self.size is None else MIXED

    @property
    def rounds(self) -> bool:
        """Whether less precision than float32 was asked for in weights, activations or caches."""
        return bool(self.format or self.cache) or self.dtype not in (None, "float32")

    @property
    def quick(self) -> bool:
        """Whether the quick grid was asked for."""
        return self.verify == "quick"

    def say(self, line: str) -> None:
        """Report progress, if it is wanted."""
        if self.progress is not None:
            self.progress(line)

    def check(self, targets: Sequence[str]) -> None:
        """Check the options for some targets.

        Raises:
            ValueError: unknown target, signature, dtype, weight or cache format; one that a target
                does not support; a quantized cache without calibration data, or calibration data
                that is not needed; a size that is not above 0, or with a format of weights; a
                tolerance that is not above 0 and below 1; a largest loss below 1.
        """
        for target in targets:
            self._check_target(target)
        self._check_calibration()
        if self.verify not in (True, False, "quick"):
            rule = "verify to be True, False or 'quick'"
            raise refusal("export", rule, repr(self.verify), "omit it for the whole grid")
        check_tolerance(self.tolerance)
        if self.size is not None and (self.weights is not None or not 0 < self.size < math.inf):
            got = f"{self.size:g} MB" + (f" and weights {self.weights}" if self.weights else "")
            rule = "a size above 0 and no format of weights with it"
            raise refusal("export", rule, got, "give one of them")
        if not self.max_loss >= 1:
            rule = "max_loss to be at least 1, the perplexity of float32"
            raise refusal("export", rule, self.max_loss, f"omit it for {MAX_LOSS}")

    def _check_target(self, target: str) -> None:
        if not isinstance(target, str):
            got, remedy = type(target).__name__, "write export_model(model, target, folder)"
            raise refusal("export", "the name of a target", f"an object of class {got}", remedy)
        check_name("export: expected target", target, list(TARGETS))
        for what, known in KNOWN.items():
            name = getattr(self, what)
            if name is not None:
                check_name(f"export: expected {what}", name, known)
        kind = TARGETS[target]
        if self.dtype is not None and self.dtype not in kind.dtypes:
            rule = f"dtype {' or '.join(kind.dtypes)} for target {target}"
            raise refusal("export", rule, self.dtype, "change dtype or target")
        if self.signature not in kind.layout:
            rule = f"signature {' or '.join(kind.layout)} for target {target}"
            raise refusal("export", rule, self.signature, "choose target ort or onnx")
        if self.format is not None:
            able = [name for name, other in TARGETS.items() if self.format in other.formats]
            what = f"weights {self.format}" if self.size is None else f"size {self.size:g}"
            self._check_format(what, target, able)
        if self.cache is not None:
            self._check_format(f"cache {self.cache}", target, CACHE_FORMATS[self.cache].targets)

    def _check_format(self, what: str, target: str, able: Sequence[str]) -> None:
        if target not in able or self.dtype not in (None, *TARGETS[target].few_bits_dtypes):
            got = target if self.dtype is None else f"{target} in {self.dtype}"
            in_half = [name for name in able if "float32" not in TARGETS[name].dtypes]
            plain = " or ".join(name for name in able if name not in in_half)
            others = f", to {' or '.join(in_half)} for half precision," if in_half else ""
            remedy = f"change the target{others} or omit {what.partition(' ')[0]}"
            raise refusal("export", f"target {plain} in float32 for {what}", got, remedy)

    def _check_calibration(self) -> None:
        if self.calibrate is None and self.cache in SCALED:
            rule = f"calibration data for the scales of cache {self.cache}"
            remedy = "give a sample of the model's inputs as calibrate, --calibrate FILE"
            raise refusal("export", rule, "none", remedy)
        calibrated = self.format is not None and format_of(self.format).calibrated
        if self.calibrate is not None and self.cache not in SCALED and not calibrated:
            caches = " or ".join(SCALED)
            rule = f"calibration data only for weights int8 or of 4 bits, or cache {caches}"
            got, remedy = f"it for {self.format or 'neither'}", "omit calibrate, --calibrate"
            raise refusal("export", rule, got, remedy)
