"""The description that a package index shows."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import setuptools

TOP = Path(__file__).parents[2]
ADDRESS = "https://example.org/owner/name"


def _described(monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, Any]:
    """Return the arguments that setup.py gives to setuptools."""
    given: dict[str, Any] = {}
    monkeypatch.setenv("URL", url)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    runpy.run_path(str(TOP / "setup.py"))
    return given


def test_links_are_absolute_and_name_files_of_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    links = re.findall(r"\]\(([^)]*)\)", _described(monkeypatch, f"{ADDRESS}/")["long_description"])
    own = [link for link in links if link.startswith(ADDRESS)]
    assert own and not [link for link in links if not re.match("https?:", link)]
    assert all(
        (TOP / re.sub(rf"{ADDRESS}/(raw|blob)/HEAD/|#.*", "", link)).exists() for link in own
    )


def test_the_description_is_the_readme_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    given = _described(monkeypatch, "")
    assert (
        given["long_description"] == (TOP / "README.md").read_text(encoding="utf-8")
        and given["project_urls"] == {}
    )
