"""Opening what is audited."""

from pathlib import Path
from typing import Any, Tuple

from posenc_export.auditing import completions_server
from posenc_export.auditing.confined import Confined
from posenc_export.auditing.graph import FILES
from posenc_export.shared.refusal import refusal

OF_FOLDERS = ("model.onnx", "openvino_model.xml", "model.pt2", "model.pte")


def opened(graph: Any) -> Tuple[Path, Any]:
    """Open a server, a file in a process of its own, or what an exporter writes into a folder."""
    if isinstance(graph, completions_server.Server):
        return Path(graph.url), graph
    path = Path(graph)
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
    return path, Confined(path)
