"""Write programs that run one artefact without this package; `posenc inspect --runtime` prints
them.
"""

from posenc_export.clients.programs import CAPACITY, LANGUAGES, program

__all__ = ["CAPACITY", "LANGUAGES", "program"]
