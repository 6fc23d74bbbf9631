"""What the documents say is what stands in the tree."""

from pathlib import Path

from posenc_export.encodings import REGISTRY

TOP = Path(__file__).parents[1]


def test_the_worked_example_is_the_file_it_speaks_of() -> None:
    assert (TOP / "posenc_export/encodings/kerple.py").read_text() in (TOP / "CONTRIBUTING.md").read_text()


def test_the_readme_names_every_encoding() -> None:
    readme = (TOP / "README.md").read_text()
    assert [name for name in REGISTRY if f"`{name}`" not in readme] == []
