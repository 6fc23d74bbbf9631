"""Imports run one way, as the tables of CONTRIBUTING.md say. Nothing is imported here: sources
are parsed.
"""

import functools
import re
import tomllib
from pathlib import Path

import pytest

from tests.rooms import PACKAGE, TOP, Graph, circles, imports, modules, own, rooms

RUNTIME = f"{PACKAGE}.runtime"
HEAVY = {"torch", "onnx", "onnx_ir", "onnxruntime", "openvino", "matplotlib", "transformers"}


@functools.cache
def imported(lazy: bool) -> Graph:
    return imports(modules(), lazy)


def allowed(inside: str) -> Graph:
    """Return what each room may import, according to its table in CONTRIBUTING.md."""
    text = (TOP / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition(f"| room of `{inside.replace('.', '/')}/` |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", table, re.MULTILINE)
    return {room: set() if others == "nothing" else {*others.split(", ")} for room, others in rows}


@pytest.mark.parametrize("inside", [PACKAGE, RUNTIME])
def test_a_room_imports_only_what_contributing_allows(inside: str) -> None:
    between = rooms(own(imported(lazy=True)), inside)
    front = between.pop(inside)  # the file __init__.py, which no room imports
    between.pop("__main__", None)  # nor the program
    assert allowed(inside).keys() == between.keys() and front <= between.keys()
    assert {
        room: targets - allowed(inside)[room]
        for room, targets in between.items()
        if targets - allowed(inside)[room]
    } == {}


@pytest.mark.parametrize("inside", [PACKAGE, RUNTIME])
def test_what_contributing_allows_has_no_circle(inside: str) -> None:
    assert circles(allowed(inside)) == []


@pytest.mark.parametrize("folder", ["posenc_export", "tests", "bench"])
def test_lines_of_python_are_within_the_budget(folder: str) -> None:
    budget = tomllib.loads((TOP / "pyproject.toml").read_text())["tool"]["posenc"]["lines"]
    files = (TOP / folder).rglob("*.py")
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    assert count <= budget[folder]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(own(imported(lazy=True))) == []


@pytest.mark.parametrize("inside", [f"{PACKAGE}.{room}" for room in ("models", "export")])
def test_no_parts_of_a_room_import_each_other_in_a_circle(inside: str) -> None:
    assert circles(rooms(own(imported(lazy=True)), inside)) == []


@pytest.mark.parametrize(
    "start", [PACKAGE, RUNTIME, f"{PACKAGE}.commands.cli", f"{PACKAGE}.shared.numerics"]
)
def test_importing_the_front_imports_no_framework(start: str) -> None:
    reached = _reached(start)
    assert not {name.partition(".")[0] for name in reached} & HEAVY
    assert not {
        name
        for name in reached
        if name.startswith((f"{PACKAGE}.benchmark", f"{PACKAGE}.export", f"{PACKAGE}.models"))
    }


def _reached(start: str) -> set[str]:
    """Return every module that an import of `start` imports, with the packages that it stands
    in.
    """
    graph, reached, waiting = imported(lazy=False), set(), [start]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [*graph.get(name, ()), *([name.rpartition(".")[0]] if "." in name else [])]
    return reached


def test_an_import_within_a_function_counts(tmp_path: Path) -> None:
    for name, text in (
        ("low", "def late():\n    from posenc_export import high\n"),
        ("high", "import posenc_export.low\n"),
        ("__init__", ""),
    ):
        (tmp_path / PACKAGE).mkdir(exist_ok=True)
        (tmp_path / PACKAGE / f"{name}.py").write_text(text)
    files = modules(tmp_path)
    assert (
        circles(rooms(own(imports(files)))) == [{"low", "high"}]
        and circles(own(imports(files, lazy=False))) == []
    )
