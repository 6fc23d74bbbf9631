"""Second moments of the inputs of linear layers, and scales of cached keys and values."""

from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor

from posenc_export.export.describe import Model, eager
from posenc_export.export.quantization.samples import Sample
from posenc_export.export.quantization.uses import Use, linear_layers, with_same_input
from posenc_export.export.quantization.watching import Watcher, Watching
from posenc_export.models.stack import Stack
from posenc_export.runtime.artefact.rules import keys_and_values
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.shared.numerics import HEADROOM
from posenc_export.shared.progress import Progress, Steps, silent

LARGEST_CODE = 127
# Smallest scale of a channel, relative to the largest scale of the cache: other text may have
# larger values in a channel than the sample.
LEAST = 2.0**-8
MEMORY = 1 << 30  # bytes of moments that are accumulated in one pass over the sample


def moments(model: Model, sample: Sample, say: Progress = silent) -> Iterator[Dict[str, Tensor]]:
    """Yield the mean of x x' [K,K] float64 of each layer's inputs x; a pass per group of MEMORY."""
    layers, same = linear_layers(model), with_same_input(model)
    whole = not isinstance(model, Stack)  # of a Stack, nothing reads what its head computes
    for group in _groups({name: part for name, part in layers.items() if name not in same}):
        sizes = {name: weight.size(1) for name, weight in group.items()}
        sums = {name: torch.zeros(n, n, dtype=torch.float64) for name, n in sizes.items()}
        heads = {name for name in group if not whole and name.startswith("head.")}
        watchers = [
            (Use(weight, True), _add_to(sums[name], weight.size(0) if name in heads else 0))
            for name, weight in group.items()
        ]
        with Watching(watchers):
            run(model, sample, say, "measuring inputs of weights", head=whole or bool(heads))
        for total in sums.values():
            total /= sample.described.tokens
        yield sums | {name: sums[first] for name, first in same.items() if first in sums}
        del sums  # before those of the next group are allocated


def _groups(layers: Mapping[str, Tensor]) -> Iterator[Dict[str, Tensor]]:
    """Yield groups of layers whose moments take at most MEMORY, or single layers."""
    group: Dict[str, Tensor] = {}
    for name, weight in layers.items():
        if group and 8 * sum(other.size(1) ** 2 for other in (*group.values(), weight)) > MEMORY:
            yield group
            group = {}
        group[name] = weight
    yield group


def _add_to(total: Tensor, zeros: int) -> Watcher:
    """Return a watcher that adds x x' of every token x that a layer reads to a total. zeros: of its
    outputs, if they are not computed; 0 computes them.
    """

    def add(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        rows = x.flatten(0, -2)
        total.add_(rows.T @ rows)
        return x.new_zeros(1).expand(*x.shape[:-1], zeros) if zeros else compute()

    return add


def cache_scales(model: Model, sample: Sample, say: Progress = silent) -> Dict[str, np.ndarray]:
    """Return scales [K,D] float32 of the channels of cached keys and values, by name of the state.
    The largest code is HEADROOM times the largest value in the sample.

    The windows are placed at positions over the whole range, because rotations move large values
    between channels.
    """
    module, manifest = eager(model)
    names = [state.past for state in manifest.states]
    cached = {state.past for state in keys_and_values(manifest)}
    largest: Dict[str, Tensor] = {}

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
    starts: Optional[Sequence[int]] = None,
    head: bool = False,
    module: Optional[torch.nn.Module] = None,
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
