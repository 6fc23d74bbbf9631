"""Checks of an encoding for its author's test suite: module against oracle, the parity grid on every target, planted faults."""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Type

import numpy as np
import torch

from posenc_export import encodings
from posenc_export.encodings import Geometry, PositionEncoding
from posenc_export.encodings.shared.combined import overrides
from posenc_export.export import TARGETS, Sources, export, half_precision
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.randomness import drawn_from
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.shared.progress import Steps
from posenc_export.testing.faults import FAULTS, applicable
from posenc_export.testing.planting import CorrectModel

__all__ = ["FAULTS", "check_encoding"]

NAME = "encoding_under_test"
HEADS, KV_HEADS, HEAD_SIZE, WIDTH = 6, 3, 16, 48  # grouped heads, and numbers of heads and a width that are not powers of two
ROUNDING = 1e-2  # errors below it may be those of angles in float32, 6e-8 of the position, or of tables in float16
PLACES = (0, 1, 2, 255, 1000)  # positions that are compared, besides the last one


def check_encoding(
    cls: Type[PositionEncoding],
    parameters: Optional[Mapping[str, Any]] = None,
    targets: Sequence[str] = tuple(TARGETS),
    faults: Sequence[str] = tuple(FAULTS),
    max_positions: int = 1100,
    progress: Optional[Callable[[str], None]] = None,
) -> Dict[str, Any]:
    """Check an encoding in the same way as the encodings of this package. Exports a decoder of two layers to each target, which takes some seconds per target.

    Args:
        cls: class of the encoding, registered or not.
        parameters: parameters of the encoding by name; defaults if left out.
        targets: names of posenc_export.export.TARGETS.
        faults: names of FAULTS that the grid must detect. Faults that do not apply to the encoding are skipped. Leave out the faults of positions for an
            encoding that does not read positions.
        max_positions: range of positions of the models.
        progress: called with one line of text at each stage; None to print to stderr if it is a terminal.

    Returns:
        {"oracle": {hook: worst error}, "targets": {target: certificate}, "faults": {fault: error of the cell that detects it}}.

    Raises:
        ValueError: a class or parameters that cannot be registered or built, a hook that fails or rounds positions in float16, a target that cannot represent
            the encoding.
        AssertionError: a hook that differs from the oracle, a fault that the grid does not detect.
        VerificationError: an artefact that differs from the module.
    """
    for name in faults:
        if name not in FAULTS:
            raise ValueError(f"check_encoding: expected faults to be among {', '.join(FAULTS)}, got {name!r}")
    say = progress or _print
    say(f"{cls.__name__}: comparing with its oracle")
    with _registered(cls):
        config = _config({"name": NAME, **(parameters or {})}, cls, max_positions)
        found: Dict[str, Any] = {"oracle": _check_oracle(cls, {"name": NAME, **(parameters or {})}, max_positions)}
        _check_float16(cls, {"name": NAME, **(parameters or {})}, max_positions)
        sources, certificates = Sources(seeded(config)), {}
        with tempfile.TemporaryDirectory() as folder:
            for target in targets:
                certificates[target] = export(sources, target, Path(folder) / target, progress=say).certificate
        return {**found, "targets": certificates, "faults": _check_faults(cls, config, faults, say)}


def _print(line: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _registered(cls: Type[PositionEncoding]) -> Iterator[None]:
    """Context in which the class is registered under NAME."""
    encodings.register(NAME, cls)
    try:
        yield
    finally:
        del encodings.KNOWN.registered[NAME]


def _geometry(max_positions: int, causal: bool) -> Geometry:
    return Geometry(WIDTH, HEADS, HEAD_SIZE, max_positions, causal, KV_HEADS)


def _config(spec: Mapping[str, Any], cls: Type[PositionEncoding], max_positions: int) -> StackConfig:
    causal = "causal" in cls.works_in
    block = block_config(WIDTH, HEADS, max_positions, kv_heads=KV_HEADS, head_size=HEAD_SIZE, encoding=spec, causal=causal)
    tied = encodings.build(spec, _geometry(max_positions, causal)).token_width(WIDTH) == WIDTH
    return decoder_config(61, 2, 40, block, tied=tied)


def _check_oracle(cls: Type[PositionEncoding], spec: Mapping[str, Any], max_positions: int) -> Dict[str, float]:
    """Worst errors of embed, rotate and bias, at small and large positions. Scores from content are compared in whole models instead."""
    errors: Dict[str, float] = {}
    places = sorted({place for place in PLACES if place < max_positions} | {max_positions - 1})
    for kind in cls.works_in:
        with drawn_from(0):
            encoding = encodings.build(spec, _geometry(max_positions, kind == "causal"))
            for hook, actual, expected in (*_rows(encoding, places), *_scores(encoding, places, kind == "causal")):
                errors[hook] = max(worst_error(actual, expected), errors.get(hook, 0.0))
    bound = tolerance("float32", 1, 1)
    for hook, error in errors.items():
        if not error <= bound:
            problem = f"expected {hook} within {bound:.1e} of its oracle at positions {', '.join(map(str, places))}, got {error:.1e}"
            remedy = "compute angles in float64 and store them in a Table or an Exact" if error < ROUNDING else "correct the hook or the oracle"
            raise AssertionError(f"check_encoding {cls.__name__}: {problem}: your module disagrees with your oracle; {remedy}")
    return errors


def _check_float16(cls: Type[PositionEncoding], spec: Mapping[str, Any], max_positions: int) -> None:
    with drawn_from(0):
        geometry = _geometry(max_positions, "causal" in cls.works_in)
        half_precision.check_encoding(encodings.build(spec, geometry), geometry, "float16")


def _rows(encoding: PositionEncoding, places: List[int]) -> Iterator[Any]:
    """Results of embed and rotate and of their oracles, if the encoding overrides them."""
    oracle = encoding.oracle()
    for coordinates, of_tokens in _coordinates(encoding, places):
        if overrides(encoding, "embed", "embed_next"):
            x = torch.randn(1, len(places), encoding.token_width(WIDTH))
            states = [torch.zeros(1, *carried.sizes) for carried in encoding.embed_states()]
            yield "embed", _numbers(encoding.embed_next(x, coordinates, states)[0][0]), oracle.embed_rows(_numbers(x[0]), of_tokens)
        if overrides(encoding, "rotate"):
            heads = torch.randn(1, len(places), HEADS, HEAD_SIZE), torch.randn(1, len(places), KV_HEADS, HEAD_SIZE)
            turned = zip(heads, (oracle.rotate_heads, oracle.rotate_key_heads), encoding.rotate(*heads, coordinates), strict=True)
            for x, turn, actual in turned:
                yield "rotate", _numbers(actual[0]), np.stack([turn(_numbers(row), place) for row, place in zip(x[0], of_tokens, strict=True)])


def _coordinates(encoding: PositionEncoding, places: List[int]) -> Iterator[Any]:
    """Positions [1,n] and those of each token for its oracle; on a grid [axes,1,n], as for text, and with other coordinates on each axis."""
    index = torch.tensor([places])
    if not encoding.axes:
        yield index, places
        return
    yield index.expand(encoding.axes, 1, -1), places
    if not encoding.embed_states():  # a state of embed covers the image in its order of tokens
        differing = torch.stack([index.roll(axis, 1) for axis in range(encoding.axes)])
        yield differing, list(zip(*differing[:, 0].tolist(), strict=True))


def _scores(encoding: PositionEncoding, places: List[int], causal: bool) -> Iterator[Any]:
    """The bias and its oracle, if the encoding has a bias; entries of hidden keys are 0."""
    index, oracle = torch.tensor([places]), encoding.oracle()
    made = encoding.bias(index, index)
    if made is not None:
        expected = np.array([[[oracle.bias(head, query, key) for key in places] for query in places] for head in range(HEADS)])
        seen = np.tril(np.ones(expected.shape, bool)) if causal else np.ones(expected.shape, bool)
        yield "bias", np.where(seen, np.broadcast_to(_numbers(made[0]), expected.shape), 0.0), np.where(seen, expected, 0.0)


def _check_faults(cls: Type[PositionEncoding], config: StackConfig, faults: Sequence[str], say: Callable[[str], None]) -> Dict[str, float]:
    """Errors of the cells that detect each planted fault; they must exceed the bound on rounding errors."""
    correct, errors = CorrectModel(seeded(config), lambda: seeded(config)), {}
    steps = Steps(say, f"{cls.__name__}: planting faults", len(faults), "faults")
    for name in faults:
        steps.advance()
        if not applicable(FAULTS[name], correct.model):
            continue
        measured = correct.measured(FAULTS[name])
        if not measured.exceeds(correct.accuracy.tolerance):
            remedy = "choose parameters that distinguish positions, or leave the fault out if the encoding does not read positions"
            raise AssertionError(f"check_encoding {cls.__name__}: expected the grid to detect the planted fault {name!r}, got no difference; {remedy}")
        errors[name] = max(measured.cells.values())
    return errors


def _numbers(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()
