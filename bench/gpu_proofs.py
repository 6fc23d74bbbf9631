"""Parts "repaired" and "parity" of bench.gpu: the models of the dry run, verified on CUDA."""

import tempfile
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

from posenc_export.export import Sources, export
from posenc_export.export.quantization.formats import FORMATS, KEEP
from posenc_export.runtime import verify
from posenc_export.runtime.artefact.certificate import bound_of, worst_cell
from posenc_export.runtime.graphs import cuda
from tests.cuda_models import FEW_BITS, FILES, KINDS, weights_of

# The artefacts of a model: target and dtype. The others are those of an encoding alone, which its
# decoder has on every target.
HALF, WIDE = ("float16", "bfloat16"), ("float32", "float16")
EVERY = [*(("ort-cuda", dtype) for dtype in HALF), *(("onnx", dtype) for dtype in WIDE)]
EVERY += [("onnx-static", "float32")]
ARTEFACTS = {
    **dict.fromkeys(("decoders", "presets", "depths"), EVERY),
    **{"checkpoints": EVERY[:3], "parts": EVERY},
    **dict.fromkeys(("blocks", "variants", "few bits"), EVERY[:1]),
}


# What was wrong or refused on a device, and has changed since: exponents of bfloat16, experts and
# sinks, products of addressed matrices, weights of few bits.
REPAIRED = (
    *(f"decoders: {name}" for name in ("binary", "pope", "rope_longrope", "cope")),
    *("parts: part-sinks", "decoders: transformer_xl", "decoders: deberta"),
    *(f"few bits: rope{FEW_BITS}{weights}" for weights in FORMATS),
    *(f"few bits: {kind}{FEW_BITS}{KEEP}" for kind in FILES),
)


def proof(name: str, rehearse: bool = False) -> Iterator[dict[str, Any]]:
    """Verify the artefacts of a model on CUDA; yield one row for each. rehearse: only the first,
    with the quick grid, on the CPU if CUDA does not run.
    """
    import torch  # noqa: F401  loads the CUDA libraries that the provider needs

    kind, make = models()[name]
    sources = make()
    provider = "cuda" if not rehearse or cuda.obstacle() is None else "cpu"
    for target, dtype in ARTEFACTS[kind][: 1 if rehearse else None]:
        row: dict[str, Any] = {"model": name, "kind": kind, "target": target, "dtype": dtype}
        with (
            tempfile.TemporaryDirectory() as temporary,
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always", RuntimeWarning)
            try:
                how: dict[str, Any] = {"dtype": dtype, "weights": weights_of(name)}
                export(sources, target, Path(temporary) / "a", verify=False, **how)
                certificate = verify(Path(temporary) / "a", provider, record=False, quick=rehearse)
            except (ValueError, RuntimeError) as error:
                yield {**row, "refused": " ".join(str(error).split())[:500]}
                continue
        texts = [str(item.message) for item in warned if issubclass(item.category, RuntimeWarning)]
        yield {**row, **summary(certificate, texts)}


def summary(certificate: Mapping[str, Any], warned: Sequence[str]) -> dict[str, Any]:
    """Return what the results keep of a certificate, and of warnings."""
    worst, errors = worst_cell(certificate), certificate["cells"]
    failed = [cell for cell in errors if not errors[cell] <= bound_of(certificate, cell)]
    kept: dict[str, Any] = {"passed": certificate["passed"], "worst": errors[worst]}
    kept |= {"tolerance": bound_of(certificate, worst), "at": worst, "cells": len(errors)}
    if failed:
        kept |= {"failed": len(failed), "such as": {cell: errors[cell] for cell in failed[:6]}}
        kept["failures"] = dict(list(certificate["failures"].items())[:2])
    if warned:
        kept["warnings"] = sorted({text[:300] for text in warned})
    return kept


def models() -> dict[str, tuple[str, Callable[[], Sources]]]:
    """Return the models of the dry run by kind and name: their kinds, and what makes them."""
    pairs = ((kind, *of) for kind in ARTEFACTS for of in KINDS[kind]().items())
    return {f"{kind}: {name}": (kind, make) for kind, name, make in pairs}
