"""Files of a checkpoint folder, which a stranger may have written: regular files of this folder."""

from pathlib import Path

from posenc_export.shared.refusal import refusal

WHERE, AGAIN = "checkpoint", "download it again"
LONGEST = 1 << 26  # bytes of a file that is parsed or copied; the longest tokenizers have 2^25
# Folders of the hub's cache are models--organization--name/snapshots/revision; files are links.
CACHED = "models--"


def inside(path: Path) -> Path:
    """Return the path of a file. ValueError: there is none, it is a pipe or a device, or a link
    that leads out of its folder (of the hub's cache of its model).
    """
    if not path.is_file():
        got = "something else of that name" if path.exists() else "none"
        raise refusal(WHERE, f"a file {path.name} in {str(path.parent)!r}", got, "check the path")
    folder = path.parent.resolve()
    own = next((parent for parent in folder.parents if parent.name.startswith(CACHED)), folder)
    if not path.resolve().is_relative_to(own):
        rule, got = "files within the folder", f"{path.name}, a link that leads out of it"
        raise refusal(WHERE, rule, got, "copy the file into the folder")
    return path


def content(path: Path) -> bytes:
    """Return the content of a file. ValueError: as `inside`, or more than LONGEST bytes."""
    if (size := inside(path).stat().st_size) > LONGEST:
        raise refusal(WHERE, f"{path.name} with at most {LONGEST} bytes", size, AGAIN)
    return path.read_bytes()
