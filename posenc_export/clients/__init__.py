"""Write programs that run one artefact without this package; `posenc inspect --runtime` prints them."""

from functools import partial
from typing import Callable, Dict, Tuple

from posenc_export.clients import c, libtorch, node, python
from posenc_export.clients.states import CAPACITY, check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared.suggestion import suggestion

__all__ = ["CAPACITY", "LANGUAGES", "program"]

# By language: the function that writes the program, and the graph inputs that the program can fill.
LANGUAGES: Dict[str, Tuple[Callable[[Manifest], str], Dict[str, str]]] = {
    **{name: (partial(python.program, language=name), python.FEEDS) for name in python.LIBRARIES},
    "node": (node.program, node.FEEDS),
    "c": (c.program, c.FEEDS),
    "libtorch": (libtorch.program, libtorch.FEEDS),
}


def program(manifest: Manifest, language: str) -> str:
    """Return the text of a program for an artefact: a decode loop on one row for decoders and blocks with a cache, a single call for other models.

    Args:
        language: a key of LANGUAGES.

    Raises:
        ValueError: the language is unknown, it does not run the artefact's graph, or the program cannot fill one of its inputs.
    """
    if language not in LANGUAGES:
        raise ValueError(f"inspect: expected runtime to be one of {', '.join(LANGUAGES)}, got {language!r}; {suggestion(language, LANGUAGES)}")
    write, feeds = LANGUAGES[language]
    check(manifest, feeds, "model.pt" if language == "libtorch" else "model.onnx")
    return write(manifest)
