"""Short SVG files without metadata; equal figures give equal text."""

import io
import re
from pathlib import Path
from typing import Any

FONTS = ["DejaVu Sans", "Verdana", "Arial"]  # in pictures; layouts are computed for the first
INVISIBLE = r"(?s)<!--.*?-->|<!DOCTYPE.*?>|<metadata>.*?</metadata>"
REFERENCE = r'(?<=href="#)\w+|(?<=url\(#)\w+'


def save(figure: Any, path: Path) -> None:
    """Save a matplotlib figure as a short SVG file."""
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": FONTS}):
        figure.savefig(drawn, format="svg")
    path.write_text(compact(drawn.getvalue()), encoding="utf-8")


def compact(picture: str) -> str:
    """Return an SVG file of matplotlib without what is not visible, with coordinates rounded to
    0.01 points. Identifiers that are referenced are numbered, the others are left out.
    """
    text = re.sub(INVISIBLE, "", picture)
    names = {name: f"i{n}" for n, name in enumerate(dict.fromkeys(re.findall(REFERENCE, text)))}
    text = re.sub(
        r' id="(\w+)"', lambda match: f' id="{names[match[1]]}"' if match[1] in names else "", text
    )
    text = re.sub(REFERENCE, lambda match: names[match[0]], text)
    text = re.sub(r"\d+\.\d{3,}", lambda match: f"{round(float(match[0]), 2):g}", text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    return text.replace("</g><g>", "</g>\n<g>").strip() + "\n"
