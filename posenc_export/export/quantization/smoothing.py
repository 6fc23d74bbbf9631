"""Smaller outliers among the inputs of products that round them to 8 bits with one scale per token
(Xiao et al. 2023, SmoothQuant).

A channel of the output of a norm that is divided by s in the norm, and multiplied by s in the
columns of the weights that read it, gives the same products. With s = sqrt(largest input / largest
weight), outliers of inputs and of weights are shared out. All s are powers of 2, so that no number
is rounded.
"""

from typing import Callable, Iterator, List, NamedTuple

import torch
from torch import Tensor

from posenc_export.export.describe import Model
from posenc_export.export.quantization.calibration import run
from posenc_export.export.quantization.samples import Sample
from posenc_export.export.quantization.uses import Use
from posenc_export.export.quantization.watching import Watcher, Watching
from posenc_export.export.read_module import ReadModule
from posenc_export.models.attention import Attention
from posenc_export.models.layer import Layer
from posenc_export.models.parameters import sharing_weights
from posenc_export.models.parts.mlps import Gated
from posenc_export.models.parts.norms import LayerNorm, RMSNorm
from posenc_export.shared.progress import Progress, silent

WINDOWS = 8  # of calibration data
LEAST = 1e-5  # smallest input and weight that are distinguished from 0


class Group(NamedTuple):
    """The weights [K] of a norm, and those [N,K] of the linear layers that alone read it."""

    factors: List[Tensor]
    readers: List[Tensor]


def smoothed(model: Model, sample: Sample, say: Progress = silent) -> Model:
    """Return a model with equal outputs and scaled norms; it shares other weights."""
    largest, changed = _largest(model, sample, say), _weights(model)
    copied = sharing_weights(model, changed)
    _scale(copied, largest)
    if isinstance(copied, ReadModule):
        names = {id(parameter): name for name, parameter in copied.named_parameters()}
        copied.changed |= {names[weight] for weight in _weights(copied)}
    return copied


def _weights(model: Model) -> List[int]:
    """Return the ids of all weights that are scaled."""
    return [id(weight) for group in _groups(model) for part in group for weight in part]


def _largest(model: Model, sample: Sample, say: Progress) -> List[Tensor]:
    """Return the largest magnitude [K] of each channel of what each group reads."""
    first = [group.readers[0] for group in _groups(model)]
    largest = [torch.zeros(weight.size(1)) for weight in first]
    watchers = [
        (Use(weight, True), _recorder(sums)) for weight, sums in zip(first, largest, strict=True)
    ]
    few = sample.kept(WINDOWS * sample.windows.shape[1])
    with Watching(watchers):
        run(model, few, say, "measuring inputs of weights")
    return largest


def _recorder(largest: Tensor) -> Watcher:
    """Return a watcher that keeps the largest magnitudes of inputs in `largest` [K]."""

    def record(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        torch.maximum(largest, x.abs().flatten(0, -2).amax(0), out=largest)
        return compute()

    return record


def _scale(model: Model, largest: List[Tensor]) -> None:
    """Scale norms and the weights that read them in place."""
    with torch.no_grad():
        for group, inputs in zip(_groups(model), largest, strict=True):
            weights = torch.stack([weight.abs().amax(0) for weight in group.readers]).amax(0)
            ratio = inputs.clamp(min=LEAST) / weights.clamp(min=LEAST)
            scale = torch.exp2(torch.log2(ratio).div(2).round())
            for factor in group.factors:
                factor /= scale
            for weight in group.readers:
                weight *= scale


def _groups(model: Model) -> Iterator[Group]:
    """Yield norms with a weight whose output only linear layers read, with these layers."""
    if isinstance(model, ReadModule):
        for found in model.products.scaled():
            named: List[List[Tensor]] = [[*model.by_name(names).values()] for names in found]
            if [*map(len, named)] == [*map(len, found)]:  # all of them are weights of the calls
                yield Group(*named)
        return
    for layer in model.modules():
        if isinstance(layer, Layer) and not layer.residual.of_sum:
            residual, attention, mlp = layer.residual, layer.attention, layer.mlp
            if isinstance(attention, Attention) and not attention.by_content:
                yield from _group(residual.attention_norm, [attention.projection.qkv])
            read = [mlp.gate, mlp.up] if isinstance(mlp, Gated) else [mlp.up]
            yield from _group(residual.mlp_norm, read)


def _group(norm: torch.nn.Module, linears: List[torch.nn.Linear]) -> Iterator[Group]:
    if isinstance(norm, (RMSNorm, LayerNorm)):
        bias = getattr(norm, "bias", None)
        yield Group([norm.weight, *([] if bias is None else [bias])], [of.weight for of in linears])
