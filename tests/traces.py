"""Seeded models that are built and traced once per process, because most of the time of an
export is spent on tracing.
"""

from collections import OrderedDict
from typing import Any, Tuple

from posenc_export.export import Sources
from posenc_export.models.presets import seeded

KEPT = 64  # models that are kept; they are tiny
_made: "OrderedDict[Tuple[str, int], Sources]" = OrderedDict()


def sources(config: Any, seed: int = 0) -> Sources:
    """Return the sources of a seeded model; tests must not modify it."""
    key = (repr(config), seed)
    if key not in _made:
        _made[key] = Sources(seeded(config, seed))
        if len(_made) > KEPT:
            _made.popitem(last=False)
    _made.move_to_end(key)
    return _made[key]
