"""Calibration data: second moments of the inputs of linear layers, and scales of cached keys and
values.
"""

import dataclasses
import hashlib
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export.export.describe import Model, eager, text_of
from posenc_export.export.quantization.rounding import linear_layers
from posenc_export.models.parts.mlps import Gated
from posenc_export.models.stack import Stack
from posenc_export.runtime.artefact.manifest import Calibration
from posenc_export.runtime.artefact.tokenizer import BYTES, read_tokenizer
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model as Loaded
from posenc_export.shared.numerics import HEADROOM
from posenc_export.shared.progress import Progress, Steps, silent

LENGTH = 256  # tokens per window
WINDOWS = 512  # largest number of windows
LARGEST_CODE = 127
# Smallest scale of a channel, relative to the largest scale of the cache: other text may have
# larger values in a channel than the sample.
LEAST = 2.0**-8
MEMORY = 1 << 30  # bytes of moments that are accumulated in one pass over the sample

Hook = Callable[
    [torch.nn.Module, Any, Any], None
]  # of a module that has run; takes its inputs and outputs


@dataclass(frozen=True)
class Sample:
    """Inputs of a model, split into windows that are independent rows.

    Args:
        windows: [n,L] int64 token ids, each with the tokens in front that begin a text, or [n,L,E]
            float32 hidden states.
        sha256: digest of the content.
        first: number of tokens that begin a text, such as 1 for a beginning-of-text token.
        bytes_of_token: mean length of a token of the text in bytes.
    """

    windows: np.ndarray
    sha256: str
    first: int = 0
    bytes_of_token: float = 1.0

    @property
    def described(self) -> Calibration:
        """The entry in the manifest."""
        return Calibration(self.sha256, int(np.prod(self.windows.shape[:2])))

    def kept(self, tokens: int) -> "Sample":
        """Return the sample with its first windows, of `tokens` tokens together. Others may have
        been held out to measure the artefact.
        """
        return dataclasses.replace(self, windows=self.windows[: tokens // self.windows.shape[1]])


def read(path: Union[str, Path], model: Model, what: str = "calibration data") -> Sample:
    """Read a sample from a file.

    Args:
        path: UTF-8 text for models that read tokens, which is tokenized or read as bytes; .npy with
            float32 [tokens,E] for models that read hidden states or features.
        what: what the sample is, for messages.

    Raises:
        ValueError: a model with cross-attention, or without a tokenizer and with a vocabulary other
            than bytes; a file of another format, or shorter than a window.
        OSError: the file cannot be read.
    """
    manifest = eager(model)[1]
    if manifest.encoder:
        raise ValueError(
            f"export: expected a model that reads no encoder for {what}, got one that does; "
            f"omit the {what}"
        )
    content, source = Path(path).read_bytes(), manifest.inputs[0]
    if source.dtype == "int64":
        sample = of_text(content, model, what)
    else:
        rows = _numbers(Path(path), int(source.axes[-1]))
        sample = Sample(
            _windows(rows, min(LENGTH, manifest.max_positions)), hashlib.sha256(content).hexdigest()
        )
    if not len(sample.windows):
        raise ValueError(
            f"export: expected at least {min(LENGTH, manifest.max_positions)} tokens of "
            f"{what}, got fewer in {path}; pass a longer file"
        )
    return dataclasses.replace(sample, windows=sample.windows[:WINDOWS])


def of_text(content: bytes, model: Model, what: str = "text") -> Sample:
    """Return all windows of a text, UTF-8, tokenized or read as bytes.

    Raises:
        ValueError: a model without a tokenizer and with a vocabulary other than bytes; a tokenizer
            with token ids that the model does not have.
    """
    manifest, tokenizer, digest = (
        eager(model)[1],
        text_of(model).tokenizer,
        hashlib.sha256(content).hexdigest(),
    )
    length = min(LENGTH, manifest.max_positions)
    if not tokenizer and manifest.vocabulary != BYTES:
        rule = (
            f"export: expected a model with a tokenizer or of bytes (vocabulary {BYTES}) for "
            f"{what} from a file"
        )
        raise ValueError(f"{rule}, got vocabulary {manifest.vocabulary}; omit it")
    if not tokenizer:
        return Sample(_windows(np.frombuffer(content, np.uint8).astype(np.int64), length), digest)
    reader = read_tokenizer(tokenizer)
    ids = np.array(
        reader.encode(content.decode("utf-8", "replace"), add_special_tokens=False).ids, np.int64
    )
    if ids.size and ids.max() >= manifest.vocabulary:
        raise ValueError(
            f"export: expected token ids below {manifest.vocabulary} for {what}, got "
            f"{ids.max()} from the tokenizer; save the tokenizer of the model"
        )
    begin = _begin(reader)
    rows = _windows(ids, length - len(begin)) if len(begin) < length else ids[:0].reshape(0, length)
    fronts = np.broadcast_to(np.array(begin, np.int64), (len(rows), len(begin)))
    return Sample(
        np.concatenate([fronts, rows], axis=1), digest, len(begin), len(content) / max(len(ids), 1)
    )


def _begin(reader: Any) -> List[int]:
    """Return the token ids that a tokenizer puts in front of a text."""
    plain, whole = (reader.encode("a", add_special_tokens=special).ids for special in (False, True))
    return next(
        (
            whole[:index]
            for index in range(len(whole))
            if whole[index : index + len(plain)] == plain
        ),
        [],
    )


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
        found = (
            f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else "several arrays"
        )
        raise ValueError(f"{rule}, all finite, got {found}; write it with numpy.save")
    return rows


def moments(model: Model, sample: Sample, say: Progress = silent) -> Iterator[Dict[str, Tensor]]:
    """Yield the mean of x x' [K,K] float64 over the inputs x of each linear layer, by name, in
    groups that take at most MEMORY. Each group takes a pass.
    """
    layers, same = (
        linear_layers(model),
        {
            f"{name}.up": f"{name}.gate"
            for name, part in model.named_modules()
            if isinstance(part, Gated)
        },
    )
    for group in _groups({name: part for name, part in layers.items() if name not in same}):
        sums = {
            name: torch.zeros((part.in_features, part.in_features), dtype=torch.float64)
            for name, part in group.items()
        }
        with ExitStack() as hooks:
            for name, part in group.items():
                hooks.callback(part.register_forward_hook(_add_to(sums[name])).remove)
            run(
                model,
                sample,
                say,
                "measuring inputs of weights",
                head=not isinstance(model, Stack)
                or any(name.startswith("head.") for name in group),
            )
        for total in sums.values():
            total /= sample.described.tokens
        yield sums | {name: sums[first] for name, first in same.items() if first in sums}
        del sums  # before those of the next group are allocated


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
    starts = (
        np.linspace(0, model.config.max_positions - sample.windows.shape[1], len(sample.windows))
        .astype(int)
        .tolist()
    )
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
    """Return a hook that records the largest magnitude of each channel of the keys and values
    that an attention layer caches in `largest`.
    """
    caches = [
        (index, prefix + spec.name)
        for index, spec in enumerate(attention.states())
        if spec.grows and spec.name in ("key", "value")
    ]

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
