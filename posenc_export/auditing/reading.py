"""Opening the graph of a file by its content, whatever its suffix says."""

from pathlib import Path
from typing import Any

from posenc_export.auditing.graph import FILES, Graph
from posenc_export.runtime.graphs.onnx_files import external_files
from posenc_export.shared.refusal import refusal

EXECUTORCH = b"ET12"  # bytes 4 to 7 of its programs (schema/program.fbs)


def graph_of(path: Path) -> Any:
    """Open a graph in this process. Raise ValueError for other content."""
    if path.is_dir():
        for name in FILES:
            _check_external(path / name)
        return Graph(path)
    with path.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"PK"):
        from posenc_export.auditing.program import Program

        return Program(path)
    is_xml = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")
    if is_xml or head[4:8] == EXECUTORCH:
        got = "XML, as in OpenVINO IR" if is_xml else "a program of ExecuTorch"
        remedy = "export the model to ONNX, or audit the program before its conversion"
        raise refusal("audit", "a graph in ONNX or of torch", f"{path}: {got}", remedy)
    _check_external(path)
    return Graph(path)


def _check_external(path: Path) -> None:
    """Raise ValueError for an ONNX file that reads others than files of its folder."""
    try:
        names = external_files(path)
    except ValueError as error:
        rule, got = "a graph that ONNX Runtime loads on the CPU", f"{path}: {error}"
        raise refusal("audit", rule, got, "give another file") from None
    for name in names:
        _check_beside(path, name)


def _check_beside(path: Path, name: str) -> None:
    """Raise ValueError for a file of weights that is not in the folder of its graph or no file."""
    place = path.parent / name
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    if not inside or place.exists() and not place.is_file():
        rule = "a graph that reads files of its folder alone"
        raise refusal("audit", rule, f"{path} that reads {name[:200]!r}", "give another file")
