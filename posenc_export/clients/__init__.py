"""Programs that run one artefact with ONNX Runtime alone, as `posenc inspect --runtime` prints them."""

from posenc_export.clients import node, python
from posenc_export.clients.states import CAPACITY, check
from posenc_export.runtime.manifest import Manifest

__all__ = ["CAPACITY", "LANGUAGES", "program"]

LANGUAGES = {"python": (python.program, python.FEEDS), "node": (node.program, node.FEEDS)}  # and what each can fill


def program(manifest: Manifest, language: str) -> str:
    """The text of a program for an artefact: a decode loop of one row for decoders and blocks with a cache, one call for the others.

    Args:
        language: a key of LANGUAGES.

    Raises:
        ValueError: an artefact that is no ONNX graph, another language, an input that no program knows how to fill.
    """
    if language not in LANGUAGES:
        raise ValueError(f"inspect: expected runtime to be one of {', '.join(LANGUAGES)}, got {language!r}; choose one of these")
    write, feeds = LANGUAGES[language]
    check(manifest, feeds)
    return write(manifest)
