"""Checks of an encoding for its author: its oracle, and the grid on every target."""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

from posenc_export import encodings
from posenc_export.encodings import PositionEncoding
from posenc_export.export import Sources, export, half_precision
from posenc_export.export.targets import runnable
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.randomness import drawn_from
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.testing import against_oracle
from posenc_export.testing.against_oracle import HEAD_SIZE, HEADS, KV_HEADS, WIDTH, geometry_of

__all__ = ["check_encoding"]

NAME = "encoding_under_test"


def check_encoding(
    cls: type[PositionEncoding],
    parameters: Mapping[str, Any] | None = None,
    targets: Sequence[str] | None = None,
    max_positions: int = 1100,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Check an encoding in the same way as the encodings of this package. Exports a decoder of two
    layers to each target, which takes some seconds per target.

    Args:
        cls: class of the encoding, registered or not.
        parameters: parameters of the encoding by name; defaults if left out.
        targets: names of posenc_export.export.TARGETS; None for all that can run here.
        max_positions: range of positions of the models.
        progress: called with one line of text at each stage; None to print to stderr if it is a
            terminal.

    Returns:
        {"oracle": {hook: worst error}, "targets": {target: certificate}}.

    Raises:
        ValueError: a class or parameters that cannot be registered or built, a hook that fails or
            rounds positions in float16, a target that cannot represent the encoding.
        AssertionError: a hook that differs from the oracle.
        VerificationError: an artefact that differs from the module.
    """
    say = progress or _print
    spec = {"name": NAME, **(parameters or {})}
    with _registered(cls):
        say(f"{cls.__name__}: comparing with its oracle")
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
        return {"oracle": errors, "targets": certificates}


def _print(line: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _registered(cls: type[PositionEncoding]) -> Iterator[None]:
    encodings.register(NAME, cls)
    try:
        yield
    finally:
        del encodings.KNOWN.registered[NAME]


def _config(
    spec: Mapping[str, Any], cls: type[PositionEncoding], max_positions: int
) -> StackConfig:
    causal = "causal" in cls.works_in
    heads: dict[str, Any] = {"kv_heads": KV_HEADS, "head_size": HEAD_SIZE}
    block = block_config(WIDTH, HEADS, max_positions, **heads, encoding=spec, causal=causal)
    tied = encodings.build(spec, geometry_of(max_positions, causal)).token_width(WIDTH) == WIDTH
    return decoder_config(61, 2, 40, block, tied=tied)
