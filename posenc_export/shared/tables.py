"""Tables of plain text with aligned columns, whose cells are wrapped, and numbers of things."""

import textwrap
from itertools import zip_longest
from typing import Sequence

WIDTH = 100  # largest line length of tables on a terminal
GAP = "  "


def counted(count: int, what: str) -> str:
    """A number of things, such as "1 row" or "2 rows". what: one of them."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def aligned(
    heads: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    shorten: bool = False,
) -> list[str]:
    """Lines of a table. Columns whose cells all begin with a digit or are "-" are right-aligned,
    others left-aligned. Without `heads` it has no headings; cells beyond `width` are wrapped
    between words, or with `shorten` cut there.
    """
    table = [*([] if heads is None else [heads]), *rows]
    widths = _fitted(table, width)
    columns = zip(*rows, strict=True)
    right = [all(cell[:1].isdigit() or cell == "-" for cell in column) for column in columns]
    lines = []
    for row in table:
        wrapped = [
            textwrap.wrap(cell, size, break_long_words=False, break_on_hyphens=False,
                          max_lines=1 if shorten else None, placeholder=" ...")
            for cell, size in zip(row, widths, strict=True)
        ]  # fmt: skip
        for parts in zip_longest(*wrapped, fillvalue=""):
            padded = [
                part.rjust(size) if to_right else part.ljust(size)
                for part, size, to_right in zip(parts, widths, right, strict=True)
            ]
            lines.append(GAP.join(padded).rstrip())
    return lines


def _fitted(table: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Widths of columns; the widest is narrowed first, not below its longest word."""
    columns = list(zip(*table, strict=True))
    sizes = [max(1, *map(len, column)) for column in columns]
    least = [max([1, *map(len, " ".join(column).split())]) for column in columns]
    over = 0 if width is None else sum(sizes) + len(GAP) * (len(sizes) - 1) - width
    while over > 0 and sizes != least:
        wide = [index for index in range(len(sizes)) if sizes[index] > least[index]]
        widest = max(wide, key=lambda index: sizes[index])
        sizes[widest] -= 1
        over -= 1
    return sizes
