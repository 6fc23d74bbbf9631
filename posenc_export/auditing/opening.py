"""Opening what is audited."""

from pathlib import Path
from typing import Any, Tuple

from posenc_export.auditing import completions_server, program
from posenc_export.auditing.graph import FILES, Graph
from posenc_export.shared.refusal import refusal

OF_FOLDERS = ("model.onnx", "openvino_model.xml", "model.pt2", "model.pte")
PROGRAMS = (".pt2", ".pt", ".pth", ".ts")


def opened(graph: Any) -> Tuple[Path, Any]:
    """Open a server, a graph by its suffix, or what an exporter writes into a folder."""
    path = Path(graph)
    if str(graph).startswith(("http://", "https://")):
        return path, completions_server.Server(str(graph))
    if path.is_dir() and not all((path / name).exists() for name in FILES):
        files = [path / name for name in OF_FOLDERS if (path / name).exists()]
        if not files:
            rule = f"a folder with {', '.join(OF_FOLDERS)}, or {' and '.join(FILES)}"
            raise refusal("audit", rule, f"{path} without these", "give the file of the graph")
        path = files[0]
    if not path.exists():
        raise refusal("audit", "the file of a graph", f"{path}, which does not exist", "correct it")
    if path.suffix == ".xml":
        from posenc_export.auditing.openvino_ir import IntermediateRepresentation

        return path, IntermediateRepresentation(path)
    if path.suffix == ".pte":
        from posenc_export.auditing.executorch_program import ExecutorchProgram

        return path, ExecutorchProgram(path)
    return path, (program.Program if path.suffix in PROGRAMS else Graph)(path)
