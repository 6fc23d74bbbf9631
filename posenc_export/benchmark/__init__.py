"""Times prefill and decode of artefact folders against each other and against other runtimes of the same model.

`run(folders, runtimes, contexts)` gives a `Report`: to_json(), table(), verdicts, html(path). Nothing here imports torch or onnxruntime in the
caller: each contestant lives in a worker of its own.
"""

from posenc_export.benchmark.report import Report
from posenc_export.benchmark.run import run

__all__ = ["Report", "run"]
