"""The imports between the rooms of posenc_export, from its source.

A room is what stands at the top of the package or, with an argument, of one subpackage: a folder or
a single file. Imports within functions count.
"""

import ast
import functools
from pathlib import Path
from typing import Iterator

TOP = Path(__file__).parents[1]
PACKAGE = "posenc_export"
Graph = dict[str, set[str]]  # what each module or room imports


def modules(top: Path = TOP) -> dict[str, Path]:
    """Return the file of every module, by dotted name."""
    paths = {
        path: path.relative_to(top).with_suffix("").parts
        for path in sorted((top / PACKAGE).rglob("*.py"))
    }
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for path, parts in paths.items()
    }


def imports(files: dict[str, Path], lazy: bool = True) -> Graph:
    """Return what each module imports, as dotted names: modules of the package, and names of
    other packages. lazy: count imports within functions.
    """
    return {
        name: {
            target for node in _statements(_parsed(path), lazy) for target in _targets(node, files)
        }
        - {name}
        for name, path in files.items()
    }


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _statements(node: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield node
    elif lazy or not (
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ):
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            below = getattr(node, part, ())
            for statement in below if isinstance(below, list) else ():
                yield from _statements(statement, lazy)


def _targets(node: ast.AST, files: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in files else node.module


def own(graph: Graph) -> Graph:
    """Return the graph without other packages."""
    return {name: targets & graph.keys() for name, targets in graph.items()}


def room_of(module: str, inside: str) -> str:
    """Return the part of a module's name below `inside`; the name itself for the file
    __init__.py of `inside`.
    """
    return module.removeprefix(inside).removeprefix(".").partition(".")[0] or inside


def rooms(graph: Graph, inside: str = PACKAGE) -> Graph:
    """Return what each room imports."""
    result: Graph = {}
    for module, targets in graph.items():
        if module == inside or module.startswith(f"{inside}."):
            here = result.setdefault(room_of(module, inside), set())
            here |= {
                room_of(target, inside)
                for target in targets
                if target == inside or target.startswith(f"{inside}.")
            }
    return {room: targets - {room} for room, targets in result.items()}


def circles(graph: Graph) -> list[set[str]]:
    """Return the largest sets of nodes that all reach one another, of at least two nodes."""
    reached: Graph = {}
    for node in graph:
        waiting, reached[node] = [node], set()
        while waiting:
            new = graph[waiting.pop()] - reached[node]
            reached[node] |= new
            waiting += new
    results = {
        frozenset(
            other
            for other in graph
            if other == node or (node in reached[other] and other in reached[node])
        )
        for node in graph
    }
    return [set(each) for each in results if len(each) > 1]
