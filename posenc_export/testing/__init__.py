"""Checks of an encoding for its author: oracle, the grid on every target, planted faults."""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Type

from posenc_export import encodings
from posenc_export.encodings import PositionEncoding
from posenc_export.export import Sources, export, half_precision
from posenc_export.export.bounds import accuracy_of
from posenc_export.export.describe import eager
from posenc_export.export.expected import expected_outputs
from posenc_export.export.targets import runnable
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.randomness import drawn_from
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.runtime.session.model import Model
from posenc_export.runtime.verification.measuring import measure
from posenc_export.shared.progress import Steps
from posenc_export.testing import against_oracle
from posenc_export.testing.against_oracle import HEAD_SIZE, HEADS, KV_HEADS, WIDTH, geometry_of
from posenc_export.testing.faults import FAULTS, applicable, plant

__all__ = ["FAULTS", "check_encoding"]

NAME = "encoding_under_test"


def check_encoding(
    cls: Type[PositionEncoding],
    parameters: Optional[Mapping[str, Any]] = None,
    targets: Optional[Sequence[str]] = None,
    faults: Sequence[str] = tuple(FAULTS),
    max_positions: int = 1100,
    progress: Optional[Callable[[str], None]] = None,
) -> Dict[str, Any]:
    """Check an encoding in the same way as the encodings of this package. Exports a decoder of two
    layers to each target, which takes some seconds per target.

    Args:
        cls: class of the encoding, registered or not.
        parameters: parameters of the encoding by name; defaults if left out.
        targets: names of posenc_export.export.TARGETS; None for all that can run here.
        faults: names of FAULTS that the grid must detect. Faults that do not apply to the encoding
            are skipped. Leave out the faults of positions for an encoding that does not read
            positions.
        max_positions: range of positions of the models.
        progress: called with one line of text at each stage; None to print to stderr if it is a
            terminal.

    Returns:
        {"oracle": {hook: worst error}, "targets": {target: certificate}, "faults": {fault: error of
        the cell that detects it}}.

    Raises:
        ValueError: a class or parameters that cannot be registered or built, a hook that fails or
            rounds positions in float16, a target that cannot represent the encoding.
        AssertionError: a hook that differs from the oracle, a fault that the grid does not detect.
        VerificationError: an artefact that differs from the module.
    """
    for name in faults:
        if name not in FAULTS:
            rule = f"faults to be among {', '.join(FAULTS)}"
            raise ValueError(f"check_encoding: expected {rule}, got {name!r}")
    say = progress or _print
    say(f"{cls.__name__}: comparing with its oracle")
    spec = {"name": NAME, **(parameters or {})}
    with _registered(cls):
        config = _config(spec, cls, max_positions)
        errors = against_oracle.check(cls, spec, max_positions)
        geometry = geometry_of(max_positions, "causal" in cls.works_in)
        with drawn_from(0):
            half_precision.check_encoding(encodings.build(spec, geometry), geometry, "float16")
        sources, certificates = Sources(seeded(config)), {}
        with tempfile.TemporaryDirectory() as folder:
            for target in runnable() if targets is None else targets:
                manifest = export(sources, target, Path(folder) / target, progress=say)
                certificates[target] = manifest.certificate
        detected = _check_faults(cls, config, faults, say)
        return {"oracle": errors, "targets": certificates, "faults": detected}


def _print(line: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _registered(cls: Type[PositionEncoding]) -> Iterator[None]:
    encodings.register(NAME, cls)
    try:
        yield
    finally:
        del encodings.KNOWN.registered[NAME]


def _config(
    spec: Mapping[str, Any], cls: Type[PositionEncoding], max_positions: int
) -> StackConfig:
    causal = "causal" in cls.works_in
    heads: Dict[str, Any] = {"kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    block = block_config(WIDTH, HEADS, max_positions, **heads, encoding=spec, causal=causal)
    tied = encodings.build(spec, geometry_of(max_positions, causal)).token_width(WIDTH) == WIDTH
    return decoder_config(61, 2, 40, block, tied=tied)


def _check_faults(
    cls: Type[PositionEncoding],
    config: StackConfig,
    faults: Sequence[str],
    say: Callable[[str], None],
) -> Dict[str, float]:
    """Errors that detect each planted fault; they must exceed the bound on rounding."""
    model, errors = seeded(config), {}
    manifest = eager(model)[1]
    bound, expected = accuracy_of(model, manifest), expected_outputs(model, manifest, long=False)
    steps = Steps(say, f"{cls.__name__}: planting faults", len(faults), "faults")
    for name in faults:
        steps.advance()
        if not applicable(FAULTS[name], model):
            continue
        wrong = seeded(config)
        plant(FAULTS[name], wrong)
        session = Model(TorchGraph(eager(wrong)[0], manifest)).session()
        measured = measure(session, expected, bound, lambda _: None, until_failure=True)
        if not measured.exceeds(bound.tolerance):
            rule = f"the grid to detect the planted fault {name!r}"
            raise AssertionError(
                f"check_encoding {cls.__name__}: expected {rule}, got no difference; choose "
                "parameters that distinguish positions, or leave the fault out if the encoding "
                "does not read positions"
            )
        errors[name] = max(measured.cells.values())
    return errors
