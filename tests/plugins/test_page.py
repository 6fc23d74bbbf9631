"""The programs in docs/own-encoding.md run."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Iterator

import pytest

from posenc_export import encodings
from posenc_export.encodings.shared.plugins import GROUP

PAGE = (Path(__file__).parents[2] / "docs/own-encoding.md").read_text()


@pytest.fixture
def as_before() -> Iterator[None]:
    """Restore registered encodings and imported modules after the test."""
    yield
    for name in ("decay", "slow_turn"):
        encodings.KNOWN.registered.pop(name, None)
    for name in ("decay", "cosine", "skew", "slopes"):
        sys.modules.pop(name, None)


@pytest.mark.exhaustive
def test_the_programs_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_before: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    names: dict = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        file = re.match(r"# (\w+\.py)\n", program)
        if file:
            (tmp_path / file[1]).write_text(program)
        else:
            exec(program, names)
    assert names["manifest"].packages["decay"].name == "decay"
    assert names["found"]["targets"]["torchscript"]["passed"]


def test_the_package_of_the_page_installs_the_files_of_its_entry_points() -> None:
    (content,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    package = tomllib.loads(content)
    offered = package["project"]["entry-points"]
    assert set(offered) == {GROUP}
    assert {place.partition(":")[0] for place in offered[GROUP].values()} == set(
        package["tool"]["setuptools"]["py-modules"]
    )
