"""Prove an artefact: the grid of scenarios against the eager module, and the eager module against the float64 oracle."""

import copy
import math
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import numpy as np
import torch

from posenc_export.export.describe import Model, attention_of, dtype_of, eager, layers_of
from posenc_export.export.scenarios import Case, grid, grid_of_whole_calls
from posenc_export.models import oracle
from posenc_export.models.config import from_json, to_json
from posenc_export.models.presets import rebuild
from posenc_export.numerics import tolerance, worst_error
from posenc_export.runtime import Session, load
from posenc_export.runtime import manifest as manifests
from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.torch_graph import TorchGraph

Progress = Callable[[str], None]
BATCHES = (1, 3)
LENGTH = 36  # tokens per row: long enough for every cut, short enough for an oracle that goes entry by entry
LONGEST = 4096  # tokens of the one cell that fills a cache to its end; beyond it the start offsets carry the proof
CHUNK = 512
FAILED = 1e300


class VerificationError(Exception):
    """An artefact does not agree with its module.

    Args:
        certificate: what was measured, as in the manifest.
    """

    def __init__(self, certificate: Dict[str, Any]) -> None:
        failed = {name: error for name, error in certificate["cells"].items() if not error <= certificate["tolerance"]}
        worst = max(failed, key=lambda name: failed[name])
        super().__init__(f"verify: errors stay within {certificate['tolerance']:.1e}, got {failed[worst]:.1e} at '{worst}' and {len(failed) - 1} more cells; do not deploy")
        self.certificate = certificate


def verify(folder: Union[str, Path], model: Optional[Model] = None, progress: Optional[Progress] = None, provider: str = "cpu") -> Dict[str, Any]:
    """Run the grid on an artefact, write the certificate into its manifest and return it: {"passed", "tolerance", "provider", "cells": {name: worst error}}.

    Args:
        model: the float32 module it was exported from; may be left out for presets and seeded models.

    Raises:
        ValueError: not an artefact, or a model whose description differs.
    """
    folder = Path(folder)
    manifest = manifests.read(folder)
    model = rebuild(from_json(manifest.config), manifest.source) if model is None else model
    if to_json(model.config) != manifest.config:
        raise ValueError(f"verify: the model is the one that was exported, got another config than in {folder}")
    if dtype_of(model) != manifest.dtype:
        model = copy.deepcopy(model).to(getattr(torch, manifest.dtype))
    certificate = measure(folder, manifest, model.eval(), progress or (lambda _: None), provider)
    manifests.write(manifest.replace(certificate=certificate), folder)
    return certificate


def check(folder: Path, model: Model, progress: Progress) -> Manifest:
    """As `verify`, on a fresh export.

    Raises:
        VerificationError: a cell exceeds the tolerance.
    """
    manifest = manifests.read(folder)
    certificate = measure(folder, manifest, model, progress, "cpu")
    if not certificate["passed"]:
        raise VerificationError(certificate)
    manifest = manifest.replace(certificate=certificate)
    manifests.write(manifest, folder)
    return manifest


def measure(folder: Path, manifest: Manifest, model: Model, progress: Progress, provider: str) -> Dict[str, Any]:
    """The certificate of an artefact against `model`, which has the artefact's dtype."""
    # One thread: the order of sums, and so the figures of the certificate, are then the same on every run.
    return certify(lambda: load(folder, provider=provider, threads=1, capacity=min(manifest.max_positions, LONGEST)), manifest, model, progress, provider)


def certify(open_session: Callable[[], Session], manifest: Manifest, model: Model, progress: Progress, provider: str = "cpu") -> Dict[str, Any]:
    """Run every cell on sessions of `open_session`, against the eager module in float32, and that against the oracle."""
    exact = copy.deepcopy(model).float().eval()
    config = attention_of(model)
    bound = tolerance(manifest.dtype, layers_of(model), max(config.width, getattr(model.config, "hidden", 0)))
    length = min(LENGTH, config.max_positions)
    cells: Dict[str, float] = {}
    session = open_session()
    scenarios = grid(length) if manifest.states else grid_of_whole_calls(length)
    for start in _starts(manifest, length):
        progress(f"{manifest.target}: verifying from position {start}")
        for batch in BATCHES:
            case = _case(exact, batch, length, start, manifest.dtype)
            for name, scenario in scenarios.items():
                session.reset()
                cells[f"batch {batch}, start {start}: {name}"] = max(worst_error(a, e) for a, e in scenario(session, case))
        expected = np.stack([oracle.full_pass(exact, row, start) for row in case.tokens[:1]])
        cells[f"oracle, start {start}"] = worst_error(case.full[:1], expected)
    if manifest.axes:
        cells["coordinates"], cells["coordinates: oracle"] = _coordinates(session, exact, manifest, length)
    if manifest.input("token_type_ids"):
        cells["segments"], cells["segments: oracle"] = _segments(session, exact, manifest, length)
    if manifest.states:
        progress(f"{manifest.target}: verifying a full cache")
        cells["cache filled to its end"] = _filled(session, exact, manifest)
    cells = {name: _rounded_up(error) for name, error in cells.items()}
    return {"passed": all(error <= bound for error in cells.values()), "tolerance": bound, "provider": provider, "cells": cells}


def _starts(manifest: Manifest, length: int) -> List[int]:
    if manifest.signature == "mask":
        return [0]  # positions are counted from the mask
    return sorted({0, min(1000, manifest.max_positions - length), manifest.max_positions - length})


def _case(model: Model, batch: int, length: int, start: int, dtype: str) -> Case:
    fork_at = length // 2
    tokens = _inputs(model, (batch, length), 0, dtype)
    other = tokens.copy()
    other[:, fork_at:] = _inputs(model, (batch, length - fork_at), 1, dtype)
    return Case(tokens, _full(model, tokens, start), start, fork_at, other, _full(model, other, start))


def _inputs(model: Model, shape: Tuple[int, int], seed: int, dtype: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    vocabulary = getattr(model.config, "vocabulary", 0)
    if vocabulary:
        return random.integers(vocabulary, size=shape)
    return random.standard_normal((*shape, attention_of(model).width)).astype(dtype)


def _full(model: Model, tokens: np.ndarray, start: int) -> np.ndarray:
    return _eager_session(model).prefill(_wide(tokens), start=start, chunk=tokens.shape[1])


def _eager_session(model: Model) -> Session:
    module, manifest = eager(model)
    return Session(TorchGraph(module, manifest), manifest)


def _wide(tokens: np.ndarray) -> np.ndarray:
    return tokens if tokens.dtype == np.int64 else tokens.astype(np.float32)


def _coordinates(session: Session, model: Model, manifest: Manifest, length: int) -> Tuple[float, float]:
    """Every token at a place of its own on every axis, in chunks against eager at once, and that against the oracle."""
    tokens = _inputs(model, (2, length), 3, manifest.dtype)
    grid = np.random.default_rng(4).integers(manifest.max_positions, size=(manifest.axes, 2, length))
    session.reset()
    full = _eager_session(model).prefill(_wide(tokens), chunk=length, grid=grid)
    expected = oracle.full_pass(model, tokens[0], 0, grid[:, 0])
    return worst_error(session.prefill(tokens, chunk=7, grid=grid), full), worst_error(full[0], expected)


def _segments(session: Session, model: Model, manifest: Manifest, length: int) -> Tuple[float, float]:
    """Every token of a segment of its own, behind padding, against eager, and that against the oracle."""
    tokens = _inputs(model, (2, length), 5, manifest.dtype)
    types = np.random.default_rng(6).integers(int(manifest.config["segments"]), size=tokens.shape)
    mask = np.ones_like(types)
    mask[0, :3] = 0
    session.reset()
    full = _eager_session(model).prefill(tokens, attention_mask=mask, token_types=types)
    expected = oracle.full_pass(model, tokens[1], 0, token_types=types[1])
    return worst_error(session.prefill(tokens, attention_mask=mask, token_types=types), full), worst_error(full[1], expected)


def _filled(session: Session, model: Model, manifest: Manifest) -> float:
    length = min(manifest.max_positions, LONGEST)
    tokens = _inputs(model, (1, length), 2, manifest.dtype)
    reference = _eager_session(model)
    session.reset()
    worst = 0.0
    for first in range(0, length - 1, CHUNK):
        part = tokens[:, first : min(first + CHUNK, length - 1)]
        worst = max(worst, worst_error(session.prefill(part), reference.prefill(_wide(part))))
    return max(worst, worst_error(session.step(tokens[:, -1]), reference.step(_wide(tokens[:, -1]))))


def _rounded_up(error: float) -> float:
    """Two digits, upwards by up to a tenth: a certificate states a bound, in JSON, which has no infinity."""
    if not math.isfinite(error):
        return FAILED
    return float(f"{1.05 * error:.1e}")
