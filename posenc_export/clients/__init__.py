"""Programs that run one artefact without this package, for `posenc inspect --runtime`."""

from posenc_export.clients.programs import CAPACITY, LANGUAGES, program

__all__ = ["CAPACITY", "LANGUAGES", "program"]
