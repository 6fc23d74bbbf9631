"""Folders of the trained decoders: posenc-export-presets, in the source tree or installed."""

import importlib.util
from pathlib import Path

NAMES = ("tiny-rope", "tiny-alibi", "small-rope", "small-alibi", "small-t5", "small-fire")
PACKAGE = "posenc_export_presets"
INSTALL = "pip install 'posenc-export[presets]', or in a source tree ./packages/presets"
SOURCE_TREE = Path(__file__).parents[2] / "packages" / "presets" / PACKAGE


def places() -> list[Path]:
    """Return the folders that may hold presets: the source tree's, then the package's."""
    installed = importlib.util.find_spec(PACKAGE)
    folders = installed.submodule_search_locations if installed else None
    return [SOURCE_TREE, *map(Path, folders or ())]


def preset_folder(name: str) -> Path | None:
    """Return the folder of a preset's artefact, or None."""
    if name not in NAMES:
        return None
    return next((place / name for place in places() if (place / name).is_dir()), None)


def is_preset(folder: Path) -> bool:
    """Whether a folder belongs to the package, which all projects share and nothing writes to."""
    return folder.name in NAMES and folder.parent in places()
