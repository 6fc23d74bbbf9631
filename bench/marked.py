"""Texts and tables of generated pages, and parts of others between <!-- NAME --> and <!-- end of
NAME -->.
"""

from pathlib import Path
from typing import Any, Iterable, Sequence

TEXTS = Path(__file__).parent / "texts"


def text(page: str) -> str:
    """Return the text of a generated page, with places for what is measured."""
    return (TEXTS / f"{page}.md").read_text(encoding="utf-8")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (heads, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(heads)}", *lines[1:]])


def replace(page: Path, name: str, content: str) -> None:
    """Replace what stands between two comments of a page. Raise ValueError if one is missing."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, begun, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        rule = f"the comments {begin.strip()} and {end}"
        raise ValueError(f"{page.name}: expected {rule}, got a page without them")
    page.write_text(before + begin + content + end + after, encoding="utf-8")
