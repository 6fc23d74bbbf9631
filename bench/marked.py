"""Generated parts of pages, between the comments <!-- NAME --> and <!-- end of NAME -->."""

from pathlib import Path


def replace(page: Path, name: str, content: str) -> None:
    """Replace what stands between the two comments of a page. Raises ValueError if the page
    lacks one of them.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, begun, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(
            f"{page.name}: expected the comments {begin.strip()} and {end}, got a page without them"
        )
    page.write_text(before + begin + content + end + after, encoding="utf-8")
