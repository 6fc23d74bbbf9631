"""The documentation agrees with the source tree."""

import pydoc
import re
from pathlib import Path

from bench.runtime_pages import PROGRAMS, programs

TOP = Path(__file__).parents[1]


def test_the_programs_in_docs_are_those_that_inspect_prints() -> None:
    assert [(TOP / "docs/runtimes" / name).read_text() for name in PROGRAMS] == list(programs())


def test_the_pages_of_the_api_name_what_exists() -> None:
    for page in sorted((TOP / "docs/api").glob("*.md")):
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            assert pydoc.locate(name) is not None, f"{page.name} has {name}"
