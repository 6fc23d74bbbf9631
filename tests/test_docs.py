"""What the documents say is what stands in the tree."""

from pathlib import Path

from posenc_export.encodings import REGISTRY

TOP = Path(__file__).parents[1]


def test_the_worked_example_is_the_file_it_speaks_of() -> None:
    assert (TOP / "posenc_export/encodings/kerple.py").read_text() in (TOP / "CONTRIBUTING.md").read_text()


def test_an_encoding_is_one_file_and_one_line() -> None:
    folder = TOP / "posenc_export/encodings"
    lines = (folder / "__init__.py").read_text().splitlines()
    for name, cls in REGISTRY.items():
        assert (folder / f"{name}.py").is_file() and [line for line in lines if line.startswith(f'    "{name}":')] == [f'    "{name}": "{cls.__name__}",']
