"""Random small faults in the files of a room, each tried with the tests that run its line.

    python -m tests.mutations encodings tests/encodings --sample 30 --seed 1

Needs the package coverage, which records which test functions run which lines. Every mutation is
written into a copy of the tree, which the tests import. Results go to bench/results/mutations.json.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Set, Type

from posenc_export.shared import json_rows

TOP = Path(__file__).parents[1]
RESULTS = TOP / "bench/results/mutations.json"
COPIED = ("posenc_export", "tests", "bench")
LONGEST = 300  # seconds for the tests of one mutation
OPERATORS: Dict[Type[Any], Type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutation(NamedTuple):
    """Another text between two offsets of a source of bytes, in a line of it."""

    line: int
    start: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutations(source: bytes) -> Iterator[Mutation]:
    """Yield a source with one operator replaced, one number one larger, or one condition negated,
    within functions.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, functions)]
    nodes = {node: None for body in bodies for part in body for node in ast.walk(part)}
    for node in nodes:
        changed = _changed(node)
        if changed and (text := ast.unparse(changed)) != ast.unparse(node):
            start, end = (
                starts[line - 1] + column
                for line, column in (
                    (node.lineno, node.col_offset),  # type: ignore[attr-defined]
                    (node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
                )
            )
            yield Mutation(node.lineno, start, end, f"({text})")  # type: ignore[attr-defined]


def _changed(node: ast.AST) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        first = OPERATORS[type(node.ops[0])]()
        return ast.Compare(node.left, [first, *node.ops[1:]], node.comparators)
    if isinstance(node, ast.BoolOp):
        return ast.BoolOp(OPERATORS[type(node.op)](), node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        return ast.Constant(not node.value if type(node.value) is bool else node.value + 1)
    return None


def lines_of_tests(copy: Path, tests: Sequence[str]) -> Dict[str, Dict[int, Set[str]]]:
    """Run tests in a copy of the tree and return the test functions that run each line of a file;
    the empty name stands for what runs outside of them.
    """
    import coverage

    settings = copy / "coverage.ini"
    settings.write_text("[run]\ndynamic_context = test_function\nsource = posenc_export\n")
    _pytest(copy, [*tests], 3600, "-m", "coverage", "run", f"--rcfile={settings}")
    data = coverage.CoverageData(str(copy / ".coverage"))
    data.read()
    lines: Dict[str, Dict[int, Set[str]]] = defaultdict(dict)
    for file in data.measured_files():
        for line, names in data.contexts_by_lineno(file).items():
            lines[str(Path(file).relative_to(copy))][line] = {n.rpartition(".")[2] for n in names}
    return lines


def _pytest(copy: Path, arguments: Sequence[str], seconds: float, *before: str) -> Any:
    options = ("-q", "-n", "0", "-x", "-p", "no:cacheprovider", "-m", "not exhaustive")
    command = [sys.executable, *before, "-m", "pytest", *options, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
    )


def tried(copy: Path, file: str, mutation: Mutation, tests: Sequence[str]) -> Dict[str, Any]:
    """Write a mutation, run tests until the first failure, and restore the file. Return
    {"file", "line", "mutated", "by", "seconds"}; "by" is the test that failed, or empty.
    """
    path, begun = copy / file, time.monotonic()
    right = path.read_bytes()
    path.write_bytes(mutation.applied(right))
    try:
        ran = _pytest(copy, tests, LONGEST, "-B")  # Python may take bytecode of this second as new
        named = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ran.stdout, re.MULTILINE)
        by = named[1] if named else "" if ran.returncode == 0 else ran.stderr.strip()[-100:]
    except subprocess.TimeoutExpired:
        by = f"no end within {LONGEST} s"
    finally:
        path.write_bytes(right)
    row = {"file": file, "line": mutation.line, "mutated": mutation.text, "by": by}
    return {**row, "seconds": round(time.monotonic() - begun, 1)}


def main(arguments: Sequence[str]) -> int:
    """Try a sample of mutations. Returns the exit status: 1 if one is not found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", help="folder or file below posenc_export")
    parser.add_argument("tests", nargs="+", help="tests that must find the mutations")
    parser.add_argument("--sample", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    rows: List[Dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary).resolve()
        for path in TOP.iterdir():
            if path.name in COPIED:
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, copy / path.name, ignore=ignored)
            elif not path.name.startswith("."):  # tests read it, and change nothing
                (copy / path.name).symlink_to(path)
        of_file, room = lines_of_tests(copy, given.tests), f"posenc_export/{given.room}"
        places = [
            (file, mutation)
            for file, lines in sorted(of_file.items())
            if file.startswith(room)
            for mutation in mutations((copy / file).read_bytes())
            if lines.get(mutation.line, set()) - {""}  # run by some test, not on import alone
        ]
        chosen = random.Random(given.seed).sample(places, min(given.sample, len(places)))
        for file, mutation in chosen:
            names = sorted(of_file[file][mutation.line] - {""})
            rows.append(tried(copy, file, mutation, [*given.tests, "-k", " or ".join(names)]))
            print(json.dumps(rows[-1]), flush=True)
    lost = [row for row in rows if not row["by"]]
    print(f"{len(rows) - len(lost)} of {len(rows)} found, of {len(places)} places")
    json_rows.write(given.json, rows)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
