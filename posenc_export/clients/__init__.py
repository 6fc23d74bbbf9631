"""Programs that run one artefact without this package, as `posenc inspect --runtime` prints them."""

from functools import partial
from typing import Callable, Dict, Tuple

from posenc_export.clients import c, libtorch, node, python
from posenc_export.clients.states import CAPACITY, check
from posenc_export.runtime.manifest import Manifest

__all__ = ["CAPACITY", "LANGUAGES", "program"]

# Who writes the program, and the inputs that it can fill.
LANGUAGES: Dict[str, Tuple[Callable[[Manifest], str], Dict[str, str]]] = {
    **{name: (partial(python.program, language=name), python.FEEDS) for name in python.LIBRARIES},
    "node": (node.program, node.FEEDS),
    "c": (c.program, c.FEEDS),
    "libtorch": (libtorch.program, libtorch.FEEDS),
}


def program(manifest: Manifest, language: str) -> str:
    """The text of a program for an artefact: a decode loop of one row for decoders and blocks with a cache, one call for the others.

    Args:
        language: a key of LANGUAGES.

    Raises:
        ValueError: an artefact whose graph the language does not run, another language, an input that no program knows how to fill.
    """
    if language not in LANGUAGES:
        raise ValueError(f"inspect: expected runtime to be one of {', '.join(LANGUAGES)}, got {language!r}; choose one of these")
    write, feeds = LANGUAGES[language]
    check(manifest, feeds, "model.pt" if language == "libtorch" else "model.onnx")
    return write(manifest)
