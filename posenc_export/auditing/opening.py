"""Opening what is audited."""

import math
from pathlib import Path
from typing import Any, Tuple

from posenc_export.auditing import completions_server
from posenc_export.auditing.confined import Confined
from posenc_export.auditing.graph import FILES
from posenc_export.shared.refusal import refusal

OF_FOLDERS = ("model.onnx", "model.pt2")
LONGEST = 10**7  # seconds of an audit
LARGEST = 1 << 31  # numbers of the inputs and outputs of one call


def opened(graph: Any, seconds: float) -> Tuple[Path, Any]:
    """Open a server, a file in a process of its own, which may take some seconds, or what
    an exporter writes into a folder.
    """
    if isinstance(graph, completions_server.Server):
        return Path(graph.url), graph
    path = Path(graph)
    if not 0 < seconds <= LONGEST:
        raise refusal("audit", f"seconds above 0, at most {LONGEST}", seconds, "give another limit")
    if str(graph).startswith(("http://", "https://")):
        return path, completions_server.Server(str(graph))
    if path.is_dir() and not all((path / name).is_file() for name in FILES):
        files = [path / name for name in OF_FOLDERS if (path / name).is_file()]
        if not files:
            rule = f"a folder with {', '.join(OF_FOLDERS)}, or {' and '.join(FILES)}"
            raise refusal("audit", rule, f"{path} without these", "give the file of the graph")
        path = files[0]
    if not path.exists():
        raise refusal("audit", "the file of a graph", f"{path}, which does not exist", "correct it")
    if not path.is_file() and not path.is_dir():
        raise refusal("audit", "the file of a graph", f"{path}, which is no file", "give one")
    return path, _bounded(Confined(path, seconds))


def _bounded(graph: Any) -> Any:
    """Return a graph. Raise ValueError if its fixed axes ask for more memory than a call gets."""
    values = (*graph.inputs, *graph.outputs)
    fixed = [[axis for axis in value.axes if isinstance(axis, int)] for value in values]
    size = sum(math.prod(axes) for axes in fixed)
    if size > LARGEST or any(axis < 0 for axes in fixed for axis in axes):
        rule = f"inputs and outputs whose fixed axes ask for at most {LARGEST:,} numbers"
        got = f"{size:,} in {len(values)} values"
        raise refusal("audit", rule, got, "export it with smaller axes, or open ones")
    return graph
