"""Smaller outliers among the inputs of products that round them to 8 bits with one scale per token
(Xiao et al. 2023, SmoothQuant).

A channel of the output of a norm that is divided by s in the norm, and multiplied by s in the
columns of the weights that read it, gives the same products. With s = sqrt(largest input / largest
weight), outliers of inputs and of weights are shared out. All s are powers of 2, so that no number
is rounded.
"""

from contextlib import ExitStack
from typing import Dict, Iterator, List, Mapping, Tuple, Union

import torch
from torch import Tensor

from posenc_export.export.describe import Model
from posenc_export.export.quantization.calibration import run
from posenc_export.export.quantization.samples import Sample
from posenc_export.export.weight_file import page_out
from posenc_export.models.attention import Attention
from posenc_export.models.layer import Layer
from posenc_export.models.parameters import sharing_weights
from posenc_export.models.parts.mlps import Gated, Plain
from posenc_export.models.parts.norms import LayerNorm, RMSNorm
from posenc_export.models.parts.projections import Grouped
from posenc_export.models.parts.residuals import Residual
from posenc_export.shared.progress import Progress, silent

WINDOWS = 8  # of calibration data
LEAST = 1e-5  # smallest input and weight that are distinguished from 0

Norm = Union[RMSNorm, LayerNorm]


def smoothed(model: Model, sample: Sample, say: Progress = silent) -> Model:
    """Return a model with equal outputs and scaled norms; it shares other weights."""
    groups = [part.weight for _, norm, linears in _groups(model) for part in (norm, *linears)]
    biases = [getattr(norm, "bias", None) for _, norm, _ in _groups(model)]
    changed = {id(parameter) for parameter in (*groups, *biases)}
    largest = _largest(model, sample, say)
    page_out(model.parameters())  # weights that are copied are not read again
    copied = sharing_weights(model, changed)
    _scale(copied, largest)
    return copied


def _largest(model: Model, sample: Sample, say: Progress) -> Dict[str, Tensor]:
    """Return the largest magnitude [K] of each channel of each norm's output, by name."""
    largest: Dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name, norm, _ in _groups(model):
            largest[name] = torch.zeros_like(norm.weight)

            def record(_: torch.nn.Module, __: object, y: Tensor, name: str = name) -> None:
                largest[name] = torch.maximum(largest[name], y.abs().flatten(0, -2).amax(0))

            hooks.callback(norm.register_forward_hook(record).remove)
        few = sample.kept(WINDOWS * sample.windows.shape[1])
        run(model, few, say, "measuring inputs of weights")
    return largest


def _scale(model: Model, largest: Mapping[str, Tensor]) -> None:
    """Scale norms and the weights that read them in place."""
    with torch.no_grad():
        for name, norm, linears in _groups(model):
            weights = torch.stack([linear.weight.abs().amax(0) for linear in linears]).amax(0)
            ratio = largest[name].clamp(min=LEAST) / weights.clamp(min=LEAST)
            scale = torch.exp2(torch.log2(ratio).div(2).round())
            for parameter in (norm.weight, getattr(norm, "bias", None)):
                if parameter is not None:
                    parameter /= scale
            for linear in linears:
                linear.weight *= scale


def _groups(model: Model) -> Iterator[Tuple[str, Norm, List[torch.nn.Linear]]]:
    """Yield norms with a weight whose output only linear layers read, with these layers."""
    for name, layer in model.named_modules():
        residual = getattr(layer, "residual", None)
        if (
            isinstance(layer, Layer)
            and isinstance(residual, Residual)
            and residual.of_input
            and residual.adds_mlp
            and not residual.parallel
        ):
            attention, mlp = layer.attention, layer.mlp
            if (
                isinstance(attention, Attention)
                and isinstance(attention.projection, Grouped)
                and not attention.by_content
            ):
                read = [attention.projection.qkv]
                yield from _group(f"{name}.residual.attention_norm", residual.attention_norm, read)
            if isinstance(mlp, (Gated, Plain)):
                read = [mlp.gate, mlp.up] if isinstance(mlp, Gated) else [mlp.up]
                yield from _group(f"{name}.residual.mlp_norm", residual.mlp_norm, read)


def _group(
    name: str, norm: torch.nn.Module, linears: List[torch.nn.Linear]
) -> Iterator[Tuple[str, Norm, List[torch.nn.Linear]]]:
    if isinstance(norm, (RMSNorm, LayerNorm)) and norm.weight is not None:
        yield name, norm, linears
