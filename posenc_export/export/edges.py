"""Edges of a model, where its computation changes: those of its encodings and what layers see."""

import re
from typing import Any, Dict, Iterator, Mapping, Tuple

from posenc_export.encodings.shared.combined import parts_of
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


def edges_of(model: Model) -> Dict[str, int]:
    """Return the edges within the range of positions by name, in order."""
    last = model.config.max_positions - 1
    within = [(at, name) for name, at in (*_stated(model), ("2^24", SINGLE)) if 0 < at <= last]
    return {OTHER.sub("?", name)[:LONGEST_NAME]: at for at, name in sorted(within)}


def indices_of(edges: Mapping[str, int], manifest: Manifest) -> Dict[str, int]:
    """Return the tokens at edges of a sequence from 0 on, by name, with the depths of a cache, and
    where a session gives tokens up because the cache of a window or of chunks is full.
    """
    room, length = REWIND + WINDOW_ROOM - 1, fill_length(manifest) if manifest.states else 0
    limited = [name for name in edges if name.startswith(("window ", "chunk "))]
    full = {f"full cache of {name}": edges[name] + room for name in limited}
    full |= {f"{depth:,} cached tokens": depth for depth in DEPTHS}
    full = {name: at for name, at in full.items() if at < length}
    return {**full, **edges}


def _stated(model: Any) -> Iterator[Tuple[str, int]]:
    if isinstance(model, ReadModule):  # what it compares positions, lengths and distances with
        yield from model.config.edges.items()
    for attention in model.config.attentions:
        yield from build("sees", attention.sees).edges().items()
    for encoding in encodings_in(model):
        for part in parts_of(encoding):
            yield from part.edges().items()
