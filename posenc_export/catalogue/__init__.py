"""Tables, pictures and pages of what is registered, for posenc list, posenc plot and docs/."""

from importlib import resources


def text(page: str) -> str:
    """Return the text of a generated page, with places for what is measured."""
    path = resources.files(__package__) / "texts" / f"{page}.md"
    return path.read_text(encoding="utf-8")
