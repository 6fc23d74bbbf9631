"""What linear layers and tables read on calibration data, whatever the code of a model: second
moments of inputs, scales of cached keys and values, and smaller outliers of inputs.

Products that round their inputs to 8 bits with one scale per token lose precision by outliers (Xiao
et al. 2023, SmoothQuant). A channel of the output of a norm that is divided by s in the norm, and
multiplied by s in the columns of the weights that read it, gives the same products. With s =
sqrt(largest input / largest weight), outliers of inputs and of weights are shared out. All s are
powers of 2, so that no number is rounded.
"""

from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posenc_export.encodings.shared.base import PositionEncoding
from posenc_export.export.describe import eager
from posenc_export.export.quantization.samples import Sample
from posenc_export.export.read_module import OF_MODULE, Model, ReadModule
from posenc_export.models.attention import Attention
from posenc_export.models.layer import Layer
from posenc_export.models.parameters import sharing_weights
from posenc_export.models.parts.mlps import Gated, Plain
from posenc_export.models.parts.norms import LayerNorm, RMSNorm
from posenc_export.runtime.artefact.rules import keys_and_values
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.shared.numerics import HEADROOM
from posenc_export.shared.progress import Progress, Steps, silent

aten = torch.ops.aten
LINEAR = {torch.nn.functional.linear, aten.linear, aten.linear.default}
TABLE = {torch.nn.functional.embedding, aten.embedding, aten.embedding.default}
# Takes an input, and a function that returns the output; returns the output.
Watcher = Callable[[Tensor, Callable[[], Tensor]], Tensor]
LARGEST_CODE = 127
# Smallest scale of a channel, relative to the largest scale of the cache: other text may have
# larger values in a channel than the sample.
LEAST = 2.0**-8
MEMORY = 1 << 30  # bytes of moments that are accumulated in one pass over the sample
SMOOTHING_WINDOWS = 8  # of calibration data
LEAST_INPUT = 1e-5  # smallest input and weight that are distinguished from 0


class Use(NamedTuple):
    """A weight, read as the matrix of a linear layer or as a table of token ids."""

    weight: Tensor
    linear: bool


class RoundedWeights(NamedTuple):
    """The weights of a model that are rounded."""

    linear: Mapping[str, Tensor]  # of linear layers [N,K], by name of the layer
    tables: Sequence[Tensor]  # of tokens
    experts: Sequence[Tensor]  # [N,K,M]
    units: Sequence[Tensor]  # those of linear layers that read the units of an MLP

    @property
    def uses(self) -> list[Use]:
        """The uses of all weights but those of experts."""
        linear = [Use(weight, True) for weight in self.linear.values()]
        return linear + [Use(weight, False) for weight in self.tables]


def weights_of(model: Model) -> RoundedWeights:
    """Return the weights of a model that are rounded."""
    if isinstance(model, ReadModule):
        of = model.products
        linear, *others = map(model.by_name, (of.linear, of.tables, of.experts, of.of_units()))
        layers = {name.removesuffix(".weight"): weight for name, weight in linear.items()}
        return RoundedWeights(layers, *([*found.values()] for found in others))
    plain, tables = (_weights(model, kind) for kind in (torch.nn.Linear, torch.nn.Embedding))
    mlps = [part for part in model.modules() if isinstance(part, (Gated, Plain))]
    return RoundedWeights(plain, [*tables.values()], [], [part.down.weight for part in mlps])


def with_same_input(model: Model) -> dict[str, str]:
    """Return the name of the first linear layer that reads the same value, for those after it."""
    if isinstance(model, ReadModule):
        same = model.products.with_same_input()
        names = {
            name: OF_MODULE + name.removesuffix(".weight") for pair in same.items() for name in pair
        }
        return {names[name]: names[first] for name, first in same.items()}
    gated = [name for name, part in model.named_modules() if isinstance(part, Gated)]
    return {f"{name}.up": f"{name}.gate" for name in gated}


def _weights(model: Model, kind: Any) -> dict[str, Any]:
    """Return the weights of modules of a class by name, without encodings, which stay float32."""
    encodings = [part for part in model.modules() if isinstance(part, PositionEncoding)]
    inside = {part for encoding in encodings for part in encoding.modules()}
    outside = [(name, part) for name, part in model.named_modules() if part not in inside]
    return {name: part.weight for name, part in outside if isinstance(part, kind)}


class Watching(TorchFunctionMode):
    """While it is entered, calls of linear layers and look-ups in tables go through watchers.

    Args:
        watchers: pairs of the use of a weight, and the function that its calls go through.
    """

    def __init__(self, watchers: Iterable[tuple[Use, Watcher]]) -> None:
        super().__init__()
        self._watchers = {(id(use.weight), use.linear): one for use, one in watchers}

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if function in LINEAR or function in TABLE:
            linear = function in LINEAR
            first, second = args[:2]
            ids_first = function is torch.nn.functional.embedding
            x, weight = (first, second) if linear or ids_first else (second, first)
            watcher = self._watchers.get((id(weight), linear))
            if watcher is not None:
                return watcher(x, lambda: function(*args, **named))
        return function(*args, **named)


def moments(model: Model, sample: Sample, say: Progress = silent) -> Iterator[dict[str, Tensor]]:
    """Yield the mean of x x' [K,K] float64 of each layer's inputs x; a pass per group of MEMORY."""
    layers, same = weights_of(model).linear, with_same_input(model)
    for group in _groups({name: part for name, part in layers.items() if name not in same}):
        sizes = {name: weight.size(1) for name, weight in group.items()}
        sums = {name: torch.zeros(n, n, dtype=torch.float64) for name, n in sizes.items()}
        watchers = [(Use(weight, True), _noting(_add_to, sums[n])) for n, weight in group.items()]
        with Watching(watchers):
            run(model, sample, say, "measuring inputs of weights", head=True)
        for total in sums.values():
            total /= sample.described.tokens
        yield sums | {name: sums[first] for name, first in same.items() if first in sums}
        del sums  # before those of the next group are allocated


def _groups(layers: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield groups of layers whose moments take at most MEMORY, or single layers."""
    group: dict[str, Tensor] = {}
    for name, weight in layers.items():
        if group and 8 * sum(other.size(1) ** 2 for other in (*group.values(), weight)) > MEMORY:
            yield group
            group = {}
        group[name] = weight
    yield group


def _noting(note: Callable[[Tensor, Tensor], Any], found: Tensor) -> Watcher:
    """Return a watcher that calls note(found, tokens [N,K]) with what a layer reads."""

    def watch(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        note(found, x.flatten(0, -2))
        return compute()

    return watch


def _add_to(total: Tensor, rows: Tensor) -> None:
    total.add_(rows.T @ rows)


def cache_scales(model: Model, sample: Sample, say: Progress = silent) -> dict[str, np.ndarray]:
    """Return scales [K,D] float32 of the channels of cached keys and values, by name of the state.
    The largest code is HEADROOM times the largest value in the sample.

    The windows are placed at positions over the whole range, because rotations move large values
    between channels.
    """
    module, manifest = eager(model)
    names = [state.past for state in manifest.states]
    cached = {state.past for state in keys_and_values(manifest)}
    largest: dict[str, Tensor] = {}

    def record(_: torch.nn.Module, __: Any, outputs: Any) -> None:
        present = outputs[-1]
        for name, state in zip(names[len(names) - len(present) :], present, strict=True):
            if name in cached:
                magnitudes = state.abs().amax((0, 2))
                largest[name] = torch.maximum(magnitudes, largest.get(name, magnitudes))

    module.register_forward_hook(record)
    last = model.config.max_positions - sample.windows.shape[1]
    starts = np.linspace(0, last, len(sample.windows)).astype(int).tolist()
    run(model, sample, say, "measuring keys and values", starts, module=module)
    return {name: _scales(numbers.numpy()) for name, numbers in largest.items()}


def _scales(largest: np.ndarray) -> np.ndarray:
    reached = np.maximum(largest, LEAST * (largest.max() or 1.0))
    return (reached * (HEADROOM / LARGEST_CODE)).astype(np.float32)


def run(
    model: Model,
    sample: Sample,
    say: Progress,
    what: str,
    starts: Sequence[int] | None = None,
    head: bool = False,
    module: torch.nn.Module | None = None,
) -> None:
    """Run the model on every window.

    Args:
        say: reports how many windows are done.
        what: what they are run for, for `say`.
        starts: start position of each window; None for 0.
        head: whether the head of a decoder reads all tokens, or only the last one, which takes less
            time.
        module: of the model, as describe.eager returns it; None for a new one.
    """
    length = sample.windows.shape[1]
    plain, manifest = eager(model)
    graph = TorchGraph(plain if module is None else module, manifest)
    session = Loaded(graph).session(capacity=length)
    steps = Steps(say, what, len(sample.windows), "windows of calibration data")
    for window, start in zip(sample.windows, starts or [0] * len(sample.windows), strict=True):
        session.reset()
        session.prefill(window[None], start=start, chunk=length, logits_to_keep=None if head else 1)
        steps.advance()


class Group(NamedTuple):
    """The weights [K] of a norm, and those [N,K] of the linear layers that alone read it."""

    factors: list[Tensor]
    readers: list[Tensor]


def smoothed(model: Model, sample: Sample, say: Progress = silent) -> Model:
    """Return a model with equal outputs and scaled norms; it shares other weights."""
    largest, changed = _largest(model, sample, say), _scaled_weights(model)
    copied = sharing_weights(model, changed)
    with torch.no_grad():
        for group, inputs in zip(_norms(copied), largest, strict=True):
            weights = torch.stack([weight.abs().amax(0) for weight in group.readers]).amax(0)
            ratio = inputs.clamp(min=LEAST_INPUT) / weights.clamp(min=LEAST_INPUT)
            scale = torch.exp2(torch.log2(ratio).div(2).round())
            for factor in group.factors:
                factor /= scale
            for weight in group.readers:
                weight *= scale
    if isinstance(copied, ReadModule):
        names = {id(parameter): name for name, parameter in copied.named_parameters()}
        copied.changed |= {names[weight] for weight in _scaled_weights(copied)}
    return copied


def _scaled_weights(model: Model) -> list[int]:
    """Return the ids of all weights that are scaled."""
    return [id(weight) for group in _norms(model) for part in group for weight in part]


def _largest(model: Model, sample: Sample, say: Progress) -> list[Tensor]:
    """Return the largest magnitude [K] of each channel of what each group reads."""
    first = [group.readers[0] for group in _norms(model)]
    largest = [torch.zeros(weight.size(1)) for weight in first]
    pairs = zip(first, largest, strict=True)
    watchers = [(Use(weight, True), _noting(_keep_largest, of)) for weight, of in pairs]
    few = sample.kept(SMOOTHING_WINDOWS * sample.windows.shape[1])
    with Watching(watchers):
        run(model, few, say, "measuring inputs of weights")
    return largest


def _keep_largest(largest: Tensor, rows: Tensor) -> None:
    torch.maximum(largest, rows.abs().amax(0), out=largest)


def _norms(model: Model) -> Iterator[Group]:
    """Yield norms with a weight whose output only linear layers read, with these layers."""
    if isinstance(model, ReadModule):
        for found in model.products.scaled():
            named: list[list[Tensor]] = [[*model.by_name(names).values()] for names in found]
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


def _group(norm: torch.nn.Module, linears: list[torch.nn.Linear]) -> Iterator[Group]:
    if isinstance(norm, (RMSNorm, LayerNorm)):
        bias = getattr(norm, "bias", None)
        yield Group([norm.weight, *([] if bias is None else [bias])], [of.weight for of in linears])
