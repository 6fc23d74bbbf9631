"""Seeded models, each made and traced once in a process: a trace takes most of the time of an export."""

from collections import OrderedDict
from typing import Any, Tuple

from posenc_export.export import Sources
from posenc_export.models.presets import seeded

KEPT = 24  # models at a time
_made: "OrderedDict[Tuple[str, int], Sources]" = OrderedDict()


def sources(config: Any, seed: int = 0) -> Sources:
    """The seeded model of a description; its tests leave it as it is."""
    key = (repr(config), seed)
    if key not in _made:
        _made[key] = Sources(seeded(config, seed))
        if len(_made) > KEPT:
            _made.popitem(last=False)
    _made.move_to_end(key)
    return _made[key]
