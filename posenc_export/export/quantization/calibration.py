"""Second moments of the inputs of linear layers, and scales of cached keys and values."""

from contextlib import ExitStack
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.export.describe import Model, eager
from posenc_export.export.quantization.rounding import linear_layers
from posenc_export.export.quantization.samples import Sample
from posenc_export.models.parts.mlps import Gated
from posenc_export.models.stack import Stack
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.shared.numerics import HEADROOM
from posenc_export.shared.progress import Progress, Steps, silent

LARGEST_CODE = 127
# Smallest scale of a channel, relative to the largest scale of the cache: other text may have
# larger values in a channel than the sample.
LEAST = 2.0**-8
MEMORY = 1 << 30  # bytes of moments that are accumulated in one pass over the sample

# Of a module that has run; takes its inputs and outputs.
Hook = Callable[[torch.nn.Module, Any, Any], None]


def moments(model: Model, sample: Sample, say: Progress = silent) -> Iterator[Dict[str, Tensor]]:
    """Yield the mean of x x' [K,K] float64 of each layer's inputs x; a pass per group of MEMORY."""
    layers = linear_layers(model)
    gated = [name for name, part in model.named_modules() if isinstance(part, Gated)]
    same = {f"{name}.up": f"{name}.gate" for name in gated}
    whole = not isinstance(model, Stack)  # of a Stack, nothing reads what its head computes
    for group in _groups({name: part for name, part in layers.items() if name not in same}):
        sizes = {name: part.in_features for name, part in group.items()}
        sums = {name: torch.zeros(n, n, dtype=torch.float64) for name, n in sizes.items()}
        of_head = [part for name, part in group.items() if name.startswith("head.")]
        with ExitStack() as hooks:
            for name, part in group.items():
                hooks.callback(part.register_forward_hook(_add_to(sums[name])).remove)
            for part in () if whole else of_head:
                part.forward = _no_outputs(part.out_features)  # type: ignore[method-assign, assignment]
                hooks.callback(delattr, part, "forward")
            run(model, sample, say, "measuring inputs of weights", head=whole or bool(of_head))
        for total in sums.values():
            total /= sample.described.tokens
        yield sums | {name: sums[first] for name, first in same.items() if first in sums}
        del sums  # before those of the next group are allocated


def _no_outputs(size: int) -> Callable[[Tensor], Tensor]:
    """Return a forward pass of a linear layer that computes nothing, and returns zeros."""
    return lambda x: x.new_zeros(1).expand(*x.shape[:-1], size)


def _groups(layers: Mapping[str, torch.nn.Linear]) -> Iterator[Dict[str, torch.nn.Linear]]:
    """Yield groups of layers whose moments take at most MEMORY, or single layers."""
    group: Dict[str, torch.nn.Linear] = {}
    for name, part in layers.items():
        if group and 8 * sum(other.in_features**2 for other in (*group.values(), part)) > MEMORY:
            yield group
            group = {}
        group[name] = part
    yield group


def _add_to(total: Tensor) -> Hook:
    """Return a hook that adds x x' of every token x that a layer reads to a total."""

    def add(_: torch.nn.Module, inputs: Sequence[Any], __: Any) -> None:
        x = inputs[0].flatten(0, -2)
        total.add_(x.T @ x)

    return add


def cache_scales(model: Model, sample: Sample, say: Progress = silent) -> Dict[str, np.ndarray]:
    """Return scales [K,D] float32 of the channels of cached keys and values, by name of the state.
    The largest code is HEADROOM times the largest value in the sample.

    The windows are placed at positions over the whole range, because rotations move large values
    between channels.
    """
    largest: Dict[str, Tensor] = {}
    last = model.config.max_positions - sample.windows.shape[1]
    starts = np.linspace(0, last, len(sample.windows)).astype(int).tolist()
    with ExitStack() as hooks:
        for layer, attention in enumerate(model.attentions()):
            hook = _largest_of(attention, f"past_key_values.{layer}.", largest)
            hooks.callback(attention.register_forward_hook(hook).remove)
        run(model, sample, say, "measuring keys and values", starts)
    return {name: _scales(numbers.numpy()) for name, numbers in largest.items()}


def _scales(largest: np.ndarray) -> np.ndarray:
    reached = np.maximum(largest, LEAST * (largest.max() or 1.0))
    return (reached * (HEADROOM / LARGEST_CODE)).astype(np.float32)


def _largest_of(attention: Any, prefix: str, largest: Dict[str, Tensor]) -> Hook:
    """Return a hook that records in `largest` the largest cached magnitude of each channel."""
    states = [(n, spec) for n, spec in enumerate(attention.states()) if spec.grows]
    caches = [(n, prefix + spec.name) for n, spec in states if spec.name in ("key", "value")]

    def record(_: torch.nn.Module, __: Any, outputs: Any) -> None:
        for index, name in caches:
            magnitudes = outputs[1][index].abs().amax((0, 2))
            largest[name] = torch.maximum(magnitudes, largest.get(name, magnitudes))

    return record


def run(
    model: Model,
    sample: Sample,
    say: Progress,
    what: str,
    starts: Optional[Sequence[int]] = None,
    head: bool = False,
) -> None:
    """Run the model on every window.

    Args:
        say: reports how many windows are done.
        what: what they are run for, for `say`.
        starts: start position of each window; None for 0.
        head: whether the head of a decoder reads all tokens, or only the last one, which takes less
            time.
    """
    length = sample.windows.shape[1]
    session = Loaded(TorchGraph(*eager(model))).session(capacity=length)
    steps = Steps(say, what, len(sample.windows), "windows of calibration data")
    for window, start in zip(sample.windows, starts or [0] * len(sample.windows), strict=True):
        session.reset()
        session.prefill(window[None], start=start, chunk=length, logits_to_keep=None if head else 1)
        steps.advance()
