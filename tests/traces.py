"""Seeded models that are built and traced once per process, because most of the time of an
export is spent on tracing; and their artefacts.
"""

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from posenc_export.export import Sources, export
from posenc_export.models.presets import seeded

KEPT = 64  # models that are kept; they are tiny
_made: "OrderedDict[tuple[Any, ...], Sources]" = OrderedDict()


def sources(config: Any, seed: int = 0) -> Sources:
    """Return the sources of a seeded model; tests must not modify it."""
    key = (repr(config), seed)
    if key not in _made:
        _made[key] = Sources(seeded(config, seed))
        if len(_made) > KEPT:
            _made.popitem(last=False)
    _made.move_to_end(key)
    return _made[key]


_folders: dict[tuple[Any, ...], Any] = {}  # temporary folders, and what was exported


def artefact(config: Any, target: str, **options: Any) -> Path:
    """Return the folder of an artefact without a proof, exported once per process; tests must not
    modify it.

    Args:
        config: description of a seeded model, or the Sources of any model.
        target, options: as for export.
    """
    given = isinstance(config, Sources)
    key = (id(config) if given else repr(config), target, *sorted(options.items()))
    if key not in _folders:
        folder = tempfile.TemporaryDirectory()
        model = config if given else sources(config)
        export(model, target, Path(folder.name) / "a", verify=False, **options)
        _folders[key] = folder, config
    return Path(_folders[key][0].name) / "a"


def exported(folder: Path, config: Any, target: str, **options: Any) -> Path:
    """Copy `artefact` to a folder, so that a test may modify it."""
    shutil.copytree(artefact(config, target, **options), folder)
    return folder
