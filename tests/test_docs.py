"""The documentation agrees with the source tree."""

import json
import pydoc
import re
from pathlib import Path
from typing import Any, Dict

import pytest

from bench.runtime_pages import PROGRAMS, programs
from posenc_export.export import ExportOptions

TOP = Path(__file__).parents[1]


def test_the_programs_in_docs_are_those_that_inspect_prints() -> None:
    assert [(TOP / "docs/runtimes" / name).read_text() for name in PROGRAMS] == list(programs())


def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ExportOptions, "quick", True)  # tests/export runs the whole grid
    names: Dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((TOP / "docs/tour.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert (
        max(names["errors"]["exact"]) < max(names["errors"]["float32"])
        and (tmp_path / "build/tour/alibi.svg").is_file()
    )


def test_the_pages_of_the_api_name_what_exists() -> None:
    for page in sorted((TOP / "docs/api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert pydoc.locate(name) is not None, f"{page.name} has {name}"
