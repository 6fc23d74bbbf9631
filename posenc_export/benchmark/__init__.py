"""Compare prefill and decode times of artefact folders with each other and with other runtimes of
the same model.

`run(folders, runtimes, contexts)` returns a `Report` with to_json(), table() and headlines;
`page.render(report)` draws it. The calling process imports neither torch nor onnxruntime: each
contestant runs in its own worker process.
"""

from posenc_export.benchmark.measurement import run
from posenc_export.benchmark.report import Report

__all__ = ["Report", "run"]
