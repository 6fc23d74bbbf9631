"""Formats of single weights: for each weight the one with which an artefact of at most a given size
loses least on calibration text.

The loss of a rounded weight is estimated to second order with the Fisher information of the outputs
of its layer, as in optimal brain damage (LeCun et al. 1989) and with one factor for inputs and one
for outputs (Martens and Grosse 2015, K-FAC, both factors diagonal).
"""

from contextlib import ExitStack
from typing import Callable, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor

from posenc_export.encodings.shared.tables import levels_of
from posenc_export.export.describe import Model
from posenc_export.export.quantization.calibration import Use, Watching, weights_of
from posenc_export.export.quantization.formats import FORMATS
from posenc_export.export.quantization.grid import Grid
from posenc_export.export.quantization.rounding import activations_of
from posenc_export.export.quantization.samples import Sample, reads_text
from posenc_export.models.whole_pass import whole_pass
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import WEIGHTS
from posenc_export.shared.progress import Progress, Steps, silent
from posenc_export.shared.refusal import refusal

# The smallest first; linear layers and tables have the same grid in each.
CANDIDATES = ("int4-128", "int4", "int8-32")
WINDOWS = 8  # of calibration data that losses are estimated on
ROWS = 256  # of a weight that are rounded to estimate its error
PAGE = 4096  # bytes; tensors are stored page-aligned (export/targets/onnx_file.py)
GRAPH = 2048  # bytes of nodes and small tensors for each rounded weight
MB = 1_000_000


class Sensitivity:
    """Sums over tokens of calibration text: how far errors of a layer's outputs raise the loss.

    Attributes:
        inputs: squares of the inputs of a linear layer [K] float64; of a table None.
        outputs: squares of the derivatives of the loss, the cross-entropy summed over a window,
            with respect to the outputs [N] float64.
        tokens: number of tokens.
    """

    def __init__(self, use: Use) -> None:
        rows, columns = use.weight.shape
        self.inputs = torch.zeros(columns, dtype=torch.float64) if use.linear else None
        self.outputs = torch.zeros(rows if use.linear else columns, dtype=torch.float64)
        self.tokens = 0

    def add(self, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Add the inputs of a layer that runs, and the derivatives as soon as they are known."""
        output = compute()
        self.tokens += output[..., 0].numel()
        if self.inputs is not None:
            self.inputs += _squares(x)
        if not output.requires_grad:  # it gets derivatives, and all that follows
            output.requires_grad_()
        output.register_hook(self._add_derivatives)
        return output

    def _add_derivatives(self, derivatives: Tensor) -> None:
        self.outputs += _squares(derivatives)

    def loss(self, errors: Tensor, rows: Tensor) -> float:
        """Estimate the rise of the mean cross-entropy in nats by errors [n,K] of rows [n]."""
        if self.inputs is None:
            return float((errors.double().square() @ self.outputs).mean()) / self.tokens / 2
        of_rows = errors.double().square() @ self.inputs / self.tokens
        return float(of_rows @ self.outputs[rows]) / self.tokens / 2 * len(self.outputs) / len(rows)


class Choice(NamedTuple):
    """A format of one weight, its bytes on disk, and the estimated rise of the cross-entropy."""

    format: str
    bytes: int
    loss: float


def check_written(manifest: Manifest, size: float) -> None:
    """Check that the graph and the weights of a written artefact have at most the size. ValueError:
    they are larger, because they hold more than weights: scales that are not numbers of float16, or
    large constants of a module.
    """
    megabytes = sum(manifest.files[name].bytes for name in ("model.onnx", WEIGHTS)) / MB
    if megabytes > size:
        remedy = f"give {2 * size - megabytes:.1f}, which leaves room for other constants"
        raise refusal(
            "export", f"graph and weights of at most {size:g} MB", f"{megabytes:.1f}", remedy
        )


def formats_within(
    model: Model, sample: Sample | None, size: float, say: Progress = silent
) -> dict[str, str]:
    """Return the format of each weight, a key of FORMATS, by name of the parameter. size: most
    megabytes (10^6 bytes) of graph and weights. ValueError: no decoder of text without experts; no
    calibration data; no choice of formats is that small: the message has the smallest size.
    """
    rule = "export: expected a decoder that reads text, without experts, for a size"
    if not reads_text(model) or activations_of(model) != "int8":
        raise ValueError(f"{rule}, got another model; choose a format of weights")
    if sample is None:
        remedy = "give a text as calibrate, --calibrate FILE"
        raise ValueError(f"{rule}, with calibration data, got none; {remedy}")
    readers = _readers(model)
    rest = _unrounded(model, readers, size)
    measured = _measured(model, sample, readers, say)
    choices = {name: _choices(parts) for name, parts in measured.items()}
    chosen = _within(list(choices.values()), int(size * MB) - rest)
    return {name: choice.format for name, choice in zip(choices, chosen, strict=True)}


def _unrounded(model: Model, readers: Mapping[str, list[Use]], size: float) -> int:
    """Return the bytes of what is not rounded. ValueError: as formats_within."""
    rounded_weights = {id(parts[0].weight) for parts in readers.values()}
    tables_of = levels_of(model)
    smaller = {id(model.get_buffer(name)) for name in tables_of}
    numbers = (*model.parameters(), *model.buffers())
    others = [part for part in numbers if id(part) not in rounded_weights | smaller]
    rest = sum(_aligned(part.numel() * part.element_size()) for part in others)
    levels = {part.levels for _, part in tables_of.values() if part.levels}
    rest += sum(_aligned(part.coarse.nbytes) + _aligned(part.fine.nbytes) for part in levels)
    rest += GRAPH * (len(readers) + 1)
    grid = FORMATS[CANDIDATES[0]].projections
    tables = {name: not all(use.linear for use in read) for name, read in readers.items()}
    least = rest + sum(_stored(grid, readers[n][0].weight.shape, of) for n, of in tables.items())
    if size * MB < least:
        smallest = -(-least // 10**4) / 100
        rule = f"a size of at least {smallest:g} MB for this model"
        got = f"{size:g}"
        raise refusal("export", rule, got, f"give {smallest:g} or more, or export a smaller model")
    return rest


def _readers(model: Model) -> dict[str, list[Use]]:
    """Return the uses of each rounded weight, by name of the parameter. Linear layers that share a
    weight are one use.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    readers: dict[str, list[Use]] = {}
    for use in weights_of(model).uses:
        others = readers.setdefault(names[id(use.weight)], [])
        others += [use] * all(other.linear != use.linear for other in others)
    return readers


def _measured(
    model: Model, sample: Sample, readers: Mapping[str, list[Use]], say: Progress = silent
) -> dict[str, list[tuple[Use, Sensitivity]]]:
    """Return the sensitivity of each use on the first windows of a sample."""
    sensitivities = {
        name: [(use, Sensitivity(use)) for use in read] for name, read in readers.items()
    }
    pairs = [pair for some in sensitivities.values() for pair in some]
    watching = Watching((use, sensitivity.add) for use, sensitivity in pairs)
    with ExitStack() as undo, torch.enable_grad():
        # Derivatives are computed with respect to activations only.
        for parameter in model.parameters():
            undo.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        windows = sample.windows[:WINDOWS]
        phase, what = "estimating the loss of each weight", "windows of calibration data"
        steps = Steps(say, phase, len(windows), what)
        for window in windows:
            with watching:
                logits = whole_pass(model, torch.from_numpy(window[None]))[0, :-1]
            following = torch.from_numpy(window[1:])
            torch.nn.functional.cross_entropy(logits, following, reduction="sum").backward()
            steps.advance()
    return sensitivities


def _choices(parts: Sequence[tuple[Use, Sensitivity]]) -> list[Choice]:
    """Return the choices for a weight by size, without those that gain least per byte."""
    weight = parts[0][0].weight.detach()
    rows = torch.arange(0, len(weight), max(len(weight) // ROWS, 1))
    sampled, choices = weight[rows].numpy(), []
    table = not all(use.linear for use, _ in parts)
    for name in CANDIDATES:
        grid = FORMATS[name].projections
        errors = torch.from_numpy(grid.rounded(sampled).weight - sampled)
        loss = sum(sensitivity.loss(errors, rows) for _, sensitivity in parts)
        choices.append(Choice(name, _stored(grid, weight.shape, table), loss))
    kept: list[Choice] = []
    for choice in choices:
        if not kept or choice.loss < kept[-1].loss:
            while kept and kept[-1].bytes >= choice.bytes:  # blocks may be longer than a row
                kept.pop()
            while len(kept) > 1 and _gain(kept[-2], kept[-1]) <= _gain(kept[-2], choice):
                kept.pop()
            kept.append(choice)
    return kept


def _gain(coarse: Choice, fine: Choice) -> float:
    """Return by how much the loss falls for each further byte."""
    return (coarse.loss - fine.loss) / (fine.bytes - coarse.bytes)


def _within(choices: Sequence[Sequence[Choice]], most: int) -> list[Choice]:
    """Return a choice for each weight, of at most `most` bytes together; best steps come first."""
    chosen, left = [0] * len(choices), most - sum(options[0].bytes for options in choices)
    steps = [
        (index, step) for index, options in enumerate(choices) for step in range(len(options) - 1)
    ]
    # Gains of a weight fall from step to step.
    steps.sort(key=lambda at: _gain(*choices[at[0]][at[1] : at[1] + 2]), reverse=True)
    for index, step in steps:
        cost = choices[index][step + 1].bytes - choices[index][step].bytes
        if chosen[index] == step and cost <= left:
            chosen[index], left = step + 1, left - cost
    return [options[index] for options, index in zip(choices, chosen, strict=True)]


def _stored(grid: Grid, shape: Sequence[int], table: bool) -> int:
    """Return the bytes of the codes, scales and zero points of a weight [N,K] on target `ort`."""
    assert grid.block is not None
    rows, blocks = shape[0], -(-shape[1] // grid.block)
    scales = _aligned(rows * blocks * 2)
    zeros = _aligned(rows * -(-blocks // 2)) if grid.zeros else 0
    of_table = _aligned(rows * blocks) if table and grid.zeros else 0
    return _aligned(rows * blocks * grid.block * grid.bits // 8) + scales + zeros + of_table


def _aligned(count: int) -> int:
    return -(-count // PAGE) * PAGE


def _squares(numbers: Tensor) -> Tensor:
    return numbers.detach().double().flatten(0, -2).square().sum(0)
