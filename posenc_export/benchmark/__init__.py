"""Times prefill and decode of artefact folders against each other and against the live module.

`run(folders, runtimes, contexts)` gives a `Report`: to_json(), table(), html(path). Nothing here imports torch or onnxruntime in the
caller: each contestant lives in a worker of its own.
"""

from posenc_export.benchmark.report import Report
from posenc_export.benchmark.run import run

__all__ = ["Report", "run"]
