"""The model behind several exports: cast once per dtype, and rounded once per format."""

import copy
from functools import partial
from pathlib import Path
from typing import Any, Mapping

import torch

from posenc_export.export.describe import Model, dtype_of
from posenc_export.export.quantization import calibration, rounding
from posenc_export.export.quantization.calibration import smoothed
from posenc_export.export.quantization.formats import KEEP, format_of
from posenc_export.export.quantization.grid import OnGrid
from posenc_export.export.quantization.rounding import kept
from posenc_export.export.quantization.samples import Sample
from posenc_export.export.read_module import ReadAs, ReadModule, as_model
from posenc_export.export.trace import Source
from posenc_export.export.weight_file import Keep, in_file, in_memory, is_mapped
from posenc_export.models.parameters import fill, slots
from posenc_export.runtime.artefact.cache_formats import SCALED
from posenc_export.runtime.artefact.records import Weights
from posenc_export.shared.progress import Progress, silent
from posenc_export.shared.refusal import refusal


class Sources:
    """The sources of one model, by dtype and by formats of weights and caches.

    Args:
        model: a float32 model of this package, or any other module, which is read as it is. It is
            not modified, and must not be modified while this object is in use.
        owned: whether the caller uses the model no more. Its weights may then move to a temporary
            file, so that their memory can be released between uses.
        how: how to read another module.

    Raises:
        ValueError: read_module.as_model refuses the module.
    """

    def __init__(
        self, model: Model | torch.nn.Module, owned: bool = False, how: ReadAs = ReadAs()
    ) -> None:
        self.model, self._owned = as_model(model, how), owned
        self._keep: Keep = in_memory
        self._made: dict[tuple[Any, ...], Source] = {}

    def keep_in(self, folder: Path) -> None:
        """Keep rounded weights in files of a folder from now on, and those of an owned model."""
        self._keep = partial(in_file, folder)
        if self._owned and dtype_of(self.model) == "float32":
            parameters = list(self.model.parameters())
            for parameter, mapped in zip(parameters, is_mapped(parameters), strict=True):
                if not mapped:
                    parameter.data = torch.from_numpy(self._keep(parameter.detach().numpy()))

    def of(
        self,
        dtype: str,
        weights: str | None = None,
        sample: Sample | None = None,
        cache: str = "",
        formats: Mapping[str, str] | None = None,
        say: Progress = silent,
    ) -> Source:
        """Return the source in a dtype and in eval mode.

        Args:
            weights: format of formats.FORMATS that the weights are rounded to, formats.KEEP or,
                with formats, formats.MIXED; None does not round.
            sample: calibration data; None for none.
            cache: format of cached keys and values; those of SCALED need a sample; empty for dtype.
            formats: that of each weight by name, for formats.MIXED.
            say: reports progress of calibration, rounding, tracing and writing.
        """
        key = dtype, weights, sample and sample.described, cache, str(formats)
        if key not in self._made:
            model = in_dtype(self.model, "float32" if weights else dtype)
            scales, exact, on_grid = None, None, dict[str, OnGrid]()
            if cache in SCALED and sample is not None:
                scales = calibration.cache_scales(model, sample, say)
            described = None if sample is None else sample.described
            fields: dict[str, Any] = {"formats": dict(formats or {}), "cache": cache}
            fields |= {"weights": None, "calibration": described}
            if weights is not None:
                activations = rounding.activations_of(model) if dtype == "float32" else dtype
                fields["weights"] = Weights(weights, activations=activations)
                model, on_grid = self._in_few_bits(model, weights, sample, formats, say)
                if dtype != "float32":
                    model, exact, on_grid = in_half(model, on_grid, dtype, self._keep)
            self._made[key] = Source(model, scales, on_grid, fields, say, exact)
        return self._made[key]

    def _in_few_bits(
        self,
        model: Model,
        weights: str,
        sample: Sample | None,
        formats: Mapping[str, str] | None,
        say: Progress,
    ) -> rounding.Rounded:
        """Return a copy of a float32 model in eval mode with weights rounded as in `of`. The sample
        is only used if the format is calibrated.
        """
        if weights == KEEP:
            return kept(model, self._keep)
        if sample is None or not format_of(weights).calibrated:
            return rounding.rounded(model, weights, (), formats, self._keep, say)
        if format_of(weights).smooth:  # the smoothed copy has no other reference
            return rounding.rounded(
                smoothed(model, sample, say), weights, (), None, self._keep, say
            )
        moments = calibration.moments(model, sample, say)
        return rounding.rounded(model, weights, moments, formats, self._keep, say)


def in_half(
    model: Model, weights: Mapping[str, OnGrid], dtype: str, keep: Keep = in_memory
) -> tuple[Model, Model, dict[str, OnGrid]]:
    """Cast a model with rounded weights, and scales and offsets of blocks, to half precision.
    Return it, a float32 model with the same numbers and the exact values of codes as weights, and
    grids and codes by name of the parameter.
    """
    on_grid = {}
    for name, (grid, codes) in weights.items():
        on_grid[name] = grid, codes.in_dtype(dtype, grid.bits).kept(keep)
    half = in_dtype(model, dtype)
    exact = in_dtype(half, "float32")
    places = slots(exact)
    for name, (_, codes) in on_grid.items():
        fill(places[id(exact.get_parameter(name))], rounding.parameter_of(codes, keep))
    return half, exact, on_grid


def in_dtype(model: Model, dtype: str) -> Model:
    """Return the model itself if it has this dtype and is in eval mode, else a converted copy."""
    if dtype_of(model) == dtype and not model.training:
        return model
    if isinstance(model, ReadModule):
        return model.in_dtype(getattr(torch, dtype))
    return copy.deepcopy(model).to(getattr(torch, dtype)).eval()


def check_half(model: Model, target: str, dtype: str) -> None:
    """Refuse half precision for what needs float32. ValueError: a module with a recurrence or
    totals, or whole numbers in caches that the dtype rounds; a model that chooses experts, unless
    the target has no float32.
    """
    if dtype == "float32" or not isinstance(model, ReadModule):
        return
    what, got = "", dtype
    if any(cache.values and cache.heads for cache in model.caches):
        what = "a module with a recurrence or totals of tokens"
    elif model.whole * torch.finfo(getattr(torch, dtype)).eps > 2:
        what = f"a module whose caches keep whole numbers up to {model.whole:,}"
    elif target != "ort-cuda" and model.products.routers:
        what = "a model that chooses experts"
        got += ", in which a token near a tie gets other experts, and other ones in a step than in"
        got += " a prompt, with activations in half precision"
    if what:
        remedy = "export target ort or onnx in float32"
        raise refusal("export", f"dtype float32 for {what}", got, remedy)
