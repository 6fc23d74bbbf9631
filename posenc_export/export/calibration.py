"""What a sample of inputs tells about a model: the second moments of what its linear layers read, and how large its cached keys and values are."""

import hashlib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export.export.describe import Model, eager, text_of
from posenc_export.export.fewer_bits import linear_layers
from posenc_export.numerics import HEADROOM
from posenc_export.runtime.manifest import Calibration
from posenc_export.runtime.model import Model as Loaded
from posenc_export.runtime.torch_graph import TorchGraph
from posenc_export.text import BYTES

LENGTH = 256  # tokens of a window
WINDOWS = 512  # most windows that are read
LAST_CODE = 127
LEAST = 2.0**-8  # of the largest number of a cache: channels whose numbers are all smaller in the sample share this one's scale
MEMORY = 1 << 30  # bytes of moments that are gathered in one pass over the sample


@dataclass(frozen=True)
class Sample:
    """Inputs of a model, cut into windows that each begin a row.

    Args:
        windows: [n,L] int64 token ids, or [n,L,E] float32 hidden states.
        sha256: of the file.
    """

    windows: np.ndarray
    sha256: str

    @property
    def described(self) -> Calibration:
        """As the manifest names it."""
        return Calibration(self.sha256, int(np.prod(self.windows.shape[:2])))


def read(path: Union[str, Path], model: Model) -> Sample:
    """The sample in a file: UTF-8 text for models that read tokens, by their tokenizer or byte by byte; float32 [tokens,E] in .npy for those that read numbers.

    Raises:
        ValueError: a model that reads an encoder, has no tokenizer and another vocabulary than bytes; a file of another form, or shorter than a window.
        OSError: the file cannot be read.
    """
    manifest = eager(model)[1]
    if manifest.encoder:
        raise ValueError("export: expected a model that reads no encoder for calibration, got one that does; leave the calibration out")
    content, source = Path(path).read_bytes(), manifest.inputs[0]
    rows = _tokens(content, model, manifest.vocabulary) if source.dtype == "int64" else _numbers(Path(path), int(source.axes[-1]))
    length = min(LENGTH, manifest.max_positions)
    count = min(len(rows) // length, WINDOWS)
    if not count:
        raise ValueError(f"export: expected a sample of at least {length} tokens for calibration, got {len(rows)} in {path}; give a longer one")
    return Sample(rows[: count * length].reshape(count, length, *rows.shape[1:]), hashlib.sha256(content).hexdigest())


def _tokens(content: bytes, model: Model, vocabulary: int) -> np.ndarray:
    tokenizer = text_of(model).tokenizer
    if tokenizer:
        from tokenizers import Tokenizer

        ids: List[int] = Tokenizer.from_str(tokenizer.decode()).encode(content.decode("utf-8", "replace"), add_special_tokens=False).ids
        return np.array(ids, np.int64)
    if vocabulary != BYTES:
        raise ValueError(f"export: expected a model with a tokenizer or of bytes (vocabulary {BYTES}) for calibration by text, got vocabulary {vocabulary}; leave it out")
    return np.frombuffer(content, np.uint8).astype(np.int64)


def _numbers(path: Path, width: int) -> np.ndarray:
    rule = f"export: expected hidden states float32 [tokens,{width}] in a .npy file for calibration"
    try:
        rows = np.load(path, allow_pickle=False)
    except (EOFError, ValueError) as error:
        raise ValueError(f"{rule}, got {path.name} ({error}); write it with numpy.save") from None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[1] != width or not np.isfinite(rows).all():
        found = f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else "several arrays"
        raise ValueError(f"{rule}, all finite, got {found}; write it with numpy.save")
    return rows


def moments(model: Model, sample: Sample) -> Dict[str, Tensor]:
    """Mean x x' [K,K] float64 of what each linear layer reads, by name. The sample is passed again where moments of all layers would take too much memory."""
    found: Dict[str, Tensor] = {}
    for layers in _groups(linear_layers(model)):
        sums = {name: torch.zeros((part.in_features, part.in_features), dtype=torch.float64) for name, part in layers.items()}
        with ExitStack() as hooks:
            for name, part in layers.items():
                hooks.enter_context(_watched(part, sums[name]))
            _pass(model, sample, [0] * len(sample.windows))
        found |= {name: total / sample.described.tokens for name, total in sums.items()}
    return found


def _groups(layers: Mapping[str, torch.nn.Linear]) -> Iterator[Dict[str, torch.nn.Linear]]:
    """Layers whose moments take MEMORY together, or one layer."""
    group: Dict[str, torch.nn.Linear] = {}
    for name, part in layers.items():
        if group and 8 * sum(other.in_features**2 for other in (*group.values(), part)) > MEMORY:
            yield group
            group = {}
        group[name] = part
    yield group


@contextmanager
def _watched(part: torch.nn.Linear, total: Tensor) -> Iterator[None]:
    """While it lasts, x x' of every token that a layer reads is added to a total."""

    def add(_: torch.nn.Module, read: Sequence[Any], __: Any) -> None:
        x = read[0].flatten(0, -2)
        total.add_(x.T @ x)

    handle = part.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def cache_scales(model: Model, sample: Sample) -> Dict[str, np.ndarray]:
    """Scales [K,D] float32 of the channels of keys and values, by name of the state, with which the largest number of the sample is HEADROOM below the last code.

    Windows stand at positions over the whole range: a rotation moves a large number from one channel to another.
    """
    largest: Dict[str, Tensor] = {}
    starts = np.linspace(0, model.config.max_positions - sample.windows.shape[1], len(sample.windows)).astype(int).tolist()
    with ExitStack() as hooks:
        for layer, attention in enumerate(model.attentions()):
            hooks.enter_context(_measured(attention, f"past_key_values.{layer}.", largest))
        _pass(model, sample, starts)
    return {name: _scales(numbers.numpy()) for name, numbers in largest.items()}


def _scales(largest: np.ndarray) -> np.ndarray:
    reached = np.maximum(largest, LEAST * (largest.max() or 1.0))
    return (reached * (HEADROOM / LAST_CODE)).astype(np.float32)


@contextmanager
def _measured(attention: Any, prefix: str, largest: Dict[str, Tensor]) -> Iterator[None]:
    """While it lasts, the largest magnitude of each channel of the keys and values that an attention caches is kept in `largest`."""
    kept = [(index, prefix + carried.name) for index, carried in enumerate(attention.states()) if carried.grows and carried.name in ("key", "value")]

    def keep(_: torch.nn.Module, __: Any, made: Any) -> None:
        for index, name in kept:
            found = made[1][index].abs().amax((0, 2))
            largest[name] = torch.maximum(found, largest.get(name, found))

    handle = attention.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _pass(model: Model, sample: Sample, starts: Sequence[int]) -> None:
    """Give every window to the model, as a row of its own from a position on."""
    session, length = Loaded(TorchGraph(*eager(model))).session(), sample.windows.shape[1]
    for window, start in zip(sample.windows, starts, strict=True):
        session.reset()
        session.prefill(window[None], start=start, chunk=length)
