"""Edges of a model, where its computation changes: those of its encodings and what layers see."""

import re
from typing import Any, Dict, Iterator, List

from posenc_export.encodings.shared.base import Edge
from posenc_export.export.describe import Model
from posenc_export.export.read_module import ReadModule
from posenc_export.models.parts import build
from posenc_export.models.whole_pass import encodings_in
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.caches import WINDOW_ROOM
from posenc_export.runtime.session.session import REWIND
from posenc_export.runtime.verification.grid_inputs import fill_length

# Numbers of cached tokens at which calls are compared in every model with a cache. Capacities of
# caches are doubled at powers of two, and prompts are divided at 256; 300 is none of these.
DEPTHS = (64, 256, 300, 512, 1024, 2048, 4096)
LONGEST_NAME = 64
SINGLE = 1 << 24  # first whole number behind which float32 has gaps
OTHER = re.compile(r"[^A-Za-z0-9_.,:()+^ -]")  # not allowed in names of cells


def edges_of(model: Model) -> List[Edge]:
    """Return the edges within the range of positions, in order and without repetitions."""
    last = model.config.max_positions - 1
    stated = (*_stated(model), Edge("2^24", SINGLE))
    within = [edge for edge in stated if 0 < edge.at <= last]
    edges = {Edge(OTHER.sub("?", e.name)[:LONGEST_NAME], e.at) for e in within}
    return sorted(edges, key=lambda edge: (edge.at, edge.name))


def indices_of(edges: List[Edge], manifest: Manifest) -> Dict[str, int]:
    """Return the tokens at edges of a sequence from 0 on, by name, with the depths of a cache, and
    where a session gives tokens up because the cache of a window or of chunks is full.
    """
    room, length = REWIND + WINDOW_ROOM - 1, fill_length(manifest) if manifest.states else 0
    limited = [edge for edge in edges if edge.name.startswith(("window ", "chunk "))]
    full = {f"full cache of {edge.name}": edge.at + room for edge in limited}
    full |= {f"{depth:,} cached tokens": depth for depth in DEPTHS}
    full = {name: at for name, at in full.items() if at < length}
    return {**full, **{edge.name: edge.at for edge in edges}}


def _stated(model: Any) -> Iterator[Edge]:
    if isinstance(model, ReadModule):  # what it compares positions, lengths and distances with
        yield from (Edge(name, at) for name, at in model.config.edges.items())
    for attention in model.config.attentions:
        yield from build("sees", attention.sees).edges()
    for encoding in encodings_in(model):
        yield from encoding.edges()
