"""Opening the graph of a file by its content, whatever its suffix says."""

from pathlib import Path
from typing import Any

from posenc_export.auditing.graph import Graph

MARK = slice(4, 8), b"ET12"  # of a program of ExecuTorch (schema/program.fbs)


def graph_of(path: Path) -> Any:
    """Open a graph in this process. Raise ValueError for other content."""
    if path.is_dir():
        return Graph(path)
    with path.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"PK"):
        from posenc_export.auditing.program import Program

        return Program(path)
    if head[MARK[0]] == MARK[1]:
        from posenc_export.auditing.executorch_program import ExecutorchProgram

        return ExecutorchProgram(path)
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
        from posenc_export.auditing.openvino_ir import IntermediateRepresentation

        return IntermediateRepresentation(path)
    return Graph(path)
