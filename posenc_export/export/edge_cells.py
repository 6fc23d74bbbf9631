"""Compare a reduced model (edge_model.py) with its artefact on both sides of every edge."""

import functools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import numpy as np

from posenc_export.encodings.shared.base import Edge
from posenc_export.export.bounds import accuracy_of
from posenc_export.export.describe import Model, describe
from posenc_export.export.edge_model import SPREAD, SPREAD_IN_HALF, edge_model
from posenc_export.export.edges import depths, edges_of
from posenc_export.export.expected import eager_session
from posenc_export.export.graph_values import step_weights
from posenc_export.export.manifest_writer import with_graph
from posenc_export.export.read_module import ReadModule
from posenc_export.export.signatures import has_cache
from posenc_export.export.sources import in_dtype
from posenc_export.export.targets import TARGETS
from posenc_export.export.trace import Source
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.session import Session
from posenc_export.runtime.verification.cells import long_cells, outputs_by
from posenc_export.runtime.verification.grid_inputs import (
    BEHIND,
    BESIDE,
    LongSequence,
    inputs,
    length_for,
)
from posenc_export.runtime.verification.measuring import measure_cells
from posenc_export.runtime.verification.proof import Measured
from posenc_export.runtime.verification.scenarios import Cell, Pairs
from posenc_export.shared.progress import Progress

TITLE = "reduced model, "  # begins the names of cells
NEAR = 128  # a far key has so much weight in the whole model that no larger distance is left to it
WORK = 1 << 36  # multiply-adds of a sequence, unless the whole model has more weights
WHOLE_CALL = 2048  # most tokens of a bidirectional model, whose scores are all in memory
PER_WEIGHT = 512  # multiply-adds for each weight of a step of the whole model, if that is more
DEEPEST = 2048  # tokens that are read for faults at a number of cached tokens alone
BEFORE = 16  # tokens before an edge at which a sequence starts that is too far from position 0


@dataclass(frozen=True)
class Plan:
    """A sequence of `length` tokens for the reduced model, and those that begin before `starts`."""

    length: int
    starts: Tuple[Edge, ...]
    unreached: Dict[str, str]


def edge_errors(source: Source, manifest: Manifest, folder: Path, say: Progress) -> Measured:
    """Measure the cells at edges that the whole model does not reach, or in which far keys do not
    matter.

    Args:
        source: of the whole model.
        manifest: of the artefact of the whole model. Its reduced form has float32, as the float32
            form of an artefact in bfloat16, unless the target has float16 only.
        folder: for the reduced artefact; it is removed afterwards.
    """
    edges, reached = edges_of(source.model), length_for(manifest, _named(edges_of(source.model)))
    if isinstance(source.model, ReadModule):  # its code has one size
        return Measured(unreached=_beyond(edges, reached))
    if not _needed(edges, manifest, reached):
        return Measured()
    halved = manifest.dtype == "float16" and "float32" not in TARGETS[manifest.target].dtypes
    dtype, spread = ("float16", SPREAD_IN_HALF) if halved else ("float32", SPREAD)
    whole = source.model
    written = source.once(("edge model", dtype), lambda: in_dtype(edge_model(whole, spread), dtype))
    reduced = in_dtype(written, "float32")
    plan = planned(reduced, edges, manifest, reached)
    say(f"{manifest.target}: comparing a reduced model at its edges")
    compared, starts = source.once(
        ("edges", dtype, manifest.signature, plan.length, plan.starts),
        lambda: _expected(reduced, edges, plan),
    )
    source_model = source.once(("edge source", dtype), lambda: Source(written, say=say))
    described = describe(written, manifest.target, manifest.signature, TARGETS[manifest.target])
    session = _opened(source_model, described, folder, max(plan.length, BEFORE + BESIDE + 1))
    accuracy = accuracy_of(written, described)
    cells = [] if compared is None else long_cells(described, compared, accuracy.rounds, TITLE)
    for edge, case in starts:
        name = f"{TITLE}{edge.name} from position {edge.at - BEFORE:,} on"
        cells.append(Cell(name, functools.partial(_far, case=case)))
    measured = measure_cells(session, cells, accuracy)
    shutil.rmtree(folder)
    bounds = dict.fromkeys(measured.cells, accuracy.tolerance)
    return replace(measured, bounds=bounds, unreached=plan.unreached)


def _named(edges: List[Edge]) -> Dict[str, int]:
    return {edge.name: edge.at for edge in edges}


def _beyond(edges: List[Edge], reached: int) -> Dict[str, str]:
    """Return the edges that are not within the tokens that the whole model reads."""
    why = f"behind the {reached:,} tokens that are read"
    return {edge.name: f"{edge.at:,}, {why}" for edge in edges if edge.at >= reached}


def _needed(edges: List[Edge], manifest: Manifest, reached: int) -> bool:
    """Return whether the whole model leaves an edge, or a depth up to DEEPEST, to the other."""
    far = any(e.at + BESIDE >= reached or e.by == "distance" and e.at > NEAR for e in edges)
    return far or bool(manifest.states) and reached < min(DEEPEST, manifest.max_positions)


def planned(reduced: Model, edges: List[Edge], manifest: Manifest, reached: int) -> Plan:
    """Return what the reduced model is run on: as many edges as the work allows. manifest: of the
    whole model; reached: number of tokens of its long sequence.
    """
    limit, most = max(WORK, PER_WEIGHT * manifest.step_weights), manifest.max_positions
    wanted = [min(edge.at + BEHIND, most) for edge in edges]
    wanted += [min(DEEPEST + BEHIND, most)] if manifest.states and reached < DEEPEST else []
    longest = most if manifest.states else WHOLE_CALL
    length = max((n for n in wanted if n <= longest and work_of(reduced, n) <= limit), default=0)
    starts, unreached = [], {}
    for edge in edges:
        if edge.at + BESIDE < max(length, reached) or edge.at < length:
            continue
        if edge.by == "position" and manifest.signature == "positions" and manifest.states:
            starts.append(edge)
        else:
            tokens = min(edge.at + BEHIND, most)
            work = f"{work_of(reduced, tokens):.1e}"
            unreached[edge.name] = f"{tokens:,} tokens take {work} multiply-adds"
    return Plan(length, tuple(starts), unreached)


def work_of(reduced: Model, length: int) -> int:
    """Return multiply-adds of a sequence: weights per token, scores and values per pair."""
    pairs = sum(2 * part.heads * part.head_size for part in reduced.attentions()) * length**2
    return step_weights(reduced) * length + (pairs // 2 if has_cache(reduced) else pairs)


def _expected(
    reduced: Model, edges: List[Edge], plan: Plan
) -> Tuple[Optional[LongSequence], List[Tuple[Edge, Tuple[np.ndarray, np.ndarray, int]]]]:
    """Return outputs of the module: of the sequence, and of those that begin before an edge."""
    session = eager_session(reduced, max(plan.length, BEFORE + BESIDE + 1))
    manifest, named = session.manifest, _named(edges)
    named |= depths(plan.length) if manifest.states else {}
    compared = outputs_by(session, manifest, named, length=plan.length) if plan.length else None
    starts = []
    for edge in plan.starts:
        tokens = inputs(manifest, (1, BEFORE + BESIDE + 1), edge.name)
        tokens = tokens[:, : manifest.max_positions - edge.at + BEFORE]
        session.reset()
        outputs = session.prefill(tokens, start=edge.at - BEFORE, chunk=tokens.shape[1])
        starts.append((edge, (tokens, outputs, edge.at - BEFORE)))
    return compared, starts


def _far(session: Session, case: Tuple[np.ndarray, np.ndarray, int]) -> Pairs:
    """Read tokens before an edge and behind it: in one call, in steps, and from the edge on."""
    tokens, expected, start = case
    count = tokens.shape[1]
    yield session.prefill(tokens, start=start, chunk=count), expected
    session.rewind(count - BEFORE + BESIDE)
    for index in range(BEFORE - BESIDE, count):
        yield session.step(tokens[:, index]), expected[:, index]
    session.rewind(count - BEFORE)
    yield session.prefill(tokens[:, BEFORE:]), expected[:, BEFORE:]


def _opened(source: Source, described: Manifest, folder: Path, capacity: int) -> Session:
    """Write the reduced artefact and open a session with one thread per operator on it."""
    folder.mkdir(parents=True)
    graph = TARGETS[described.target].write(source, described, folder)
    manifests.write(with_graph(described, graph), folder)
    loaded = load(folder, provider="cpu", threads=1)
    return loaded.session(capacity=min(capacity, described.max_positions))
