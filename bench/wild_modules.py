"""Read modules that others published on PyPI, as they are, and list what came of each.

    python -m bench.wild_modules [NAME ...]

wild_modules.toml says how each is installed and made. Needs a package index; packages go into a
folder of their own. Each module is read in a process of its own, with random weights. Outcomes are
kept line by line, and the page has the last one of each module.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tomllib
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence
from unittest import mock

from bench import marked

HERE = Path(__file__).parent
TOP = HERE.parent
PACKAGES, RESULTS = Path("build/wild"), HERE / "results" / "wild-modules.jsonl"
SECONDS = 600  # for one module
OUTCOMES = ("exact", "refused", "error", "wrong", "not made")


class Case(NamedTuple):
    """A module: its entry in wild_modules.toml with one option in its place."""

    name: str
    packages: str
    code: str
    can: str = ""
    vectors: bool = False
    output: str | None = None
    length: int = 11


class Row(NamedTuple):
    """A module, what came of it, and the largest error or the reason."""

    case: Case
    outcome: str
    why: str


class Empty(MetaPathFinder, Loader):
    """Stands for packages of these names."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        ours = name.partition(".")[0] in self.packages
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return mock.MagicMock()

    def exec_module(self, module: Any) -> None:
        """Nothing is in it."""


def cases() -> list[Case]:
    """Return the cases of wild_modules.toml."""
    found = []
    for entry in tomllib.loads((HERE / "wild_modules.toml").read_text("utf-8"))["module"]:
        for option, text in entry.pop("options", {"": ""}).items():
            name = entry["name"] + (f", {option.replace('-', ' ')}" if option else "")
            code = entry["code"].replace("OPTION", text)
            found.append(Case(**{**entry, "name": name, "code": code}))
    return found


def install(requirement: str) -> None:
    """Install a package without its dependencies, unless it is in PACKAGES."""
    done = PACKAGES / f"{requirement}.installed"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade"]
        target = ["--target", str(PACKAGES), "-c", str(TOP / "constraints.txt")]
        if subprocess.run([*pip, *target, requirement], capture_output=True).returncode == 0:
            done.touch()


def row(case: Case) -> Row:
    """Return the row of a module, which another process reads."""
    for requirement in case.packages.split():
        install(requirement)
    command = [sys.executable, "-m", "bench.wild_modules", case.name, "--here"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Row(case, "error", f"not read within {SECONDS} s")
    if run.returncode:
        return Row(case, "error", (run.stderr.strip().splitlines() or ["no message"])[-1])
    return Row(case, *json.loads(run.stdout.splitlines()[-1]))


def attempt(case: Case) -> list[str]:
    """Make and read a module in this process: the outcome, and the largest error or the reason."""
    import torch

    from posenc_export.reading.read import read_module
    from posenc_export.reading.refused import Refused
    from posenc_export.shared.numerics import tolerance
    from tests.reading.compare import errors
    from tests.reading.test_zoo import sequence

    torch.manual_seed(0)
    sys.path.insert(0, str(PACKAGES))
    try:
        module = made(case.code)
        shape = (2, case.length)
        example = torch.randn(*shape, 32) if case.vectors else torch.randint(50, shape)
        with torch.no_grad():
            module(example)
    except Exception as error:
        return ["not made", _line(error)]
    with torch.no_grad():
        try:
            reading = read_module(module, example, 64, output=case.output)
        except Refused as error:
            return ["refused", str(error).replace(str(PACKAGES.resolve()) + "/", "")]
        except Exception as error:
            return ["error", _line(error)]
        found = max(errors(reading, module, sequence(example)).values())
    return ["exact" if found <= tolerance("float32", 2, 64) else "wrong", f"{found:.1e}"]


def made(code: str) -> Any:
    """Run the code of a case and return its module in eval mode, with weights that show faults."""
    import torch
    from torch import nn

    class Calling(nn.Module):
        def __init__(self, inner: nn.Module, call: Callable[[Any, Any], Any]) -> None:
            super().__init__()
            self.inner, self.call = inner, call

        def forward(self, x: Any) -> Any:
            return self.call(self.inner, x)

    def by_file(path: str) -> Any:
        """Import one file of a package that cannot be imported here as a whole."""
        specification = importlib.util.spec_from_file_location("by_file", PACKAGES / path)
        assert specification is not None and specification.loader is not None
        file = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(file)
        return file

    def empty(*packages: str) -> None:
        """Stand for packages that are imported, and not needed."""
        sys.meta_path.insert(0, Empty(packages))

    names: dict[str, Any] = dict(torch=torch, nn=nn, calling=Calling, by_file=by_file, empty=empty)
    names.update(V=50, E=32, N=64)
    exec(code, names)
    module = names["m"].eval().requires_grad_(False)
    for parameter in module.parameters():
        # Initial weights of 0.02, and projections of zeros, hide a wrong mask or position.
        if parameter.dim() > 1 and parameter.std() < 0.15:
            parameter.normal_(0.0, 0.2)
    return module


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def page(rows: list[Row]) -> str:
    """Return the page of rows."""
    can = [r for r in rows if not r.case.can]
    exact = sum(r.outcome == "exact" for r in can)
    counts = "; ".join(f"{o}: {sum(r.outcome == o for r in rows)}" for o in OUTCOMES)
    lines = []
    for r in rows:
        why = r.why.replace("|", "\\|").replace("<", "&lt;")
        lines.append([r.case.name, r.case.can or "yes", r.outcome, why])
    heads = ["module", "can be exact", "outcome", "largest error, or why"]
    said = f"Of {len(can)} modules that can be exact, {exact} are. {counts}."
    return f"{marked.text('wild-modules')}\n{said}\n\n{marked.markdown(heads, lines)}\n"


def kept(new: Row) -> list[Row]:
    """Add a row to the outcomes; return the last of each module, in order."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps([new.case.name, new.outcome, new.why]) + "\n")
    lines = map(json.loads, RESULTS.read_text("utf-8").splitlines())
    known = {name: outcome for name, *outcome in lines}
    return sorted(Row(c, *known[c.name]) for c in cases() if c.name in known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--here", action="store_true", help="one module, in this process")
    options = parser.parse_args()
    chosen = [c for c in cases() if not options.names or c.name in options.names]
    if options.here:
        warnings.simplefilter("ignore")
        print(json.dumps(attempt(chosen[0])))
        return
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for case in sorted(chosen, key=lambda case: bool(case.can)):
        new = row(case)
        print(f"{case.name}: {new.outcome}: {new.why}", flush=True)
        (TOP / "docs/wild-modules.md").write_text(page(kept(new)), encoding="utf-8")


if __name__ == "__main__":
    main()
