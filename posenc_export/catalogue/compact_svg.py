"""Short SVG: what matplotlib writes, with coordinates in tenths of a point, each style once, and
no metadata, comments or groups without effect.
"""

import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Dict, List, Tuple
from xml.etree.ElementTree import Element

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
HREF = f"{{{XLINK}}}href"
POINTS = {"M": 1, "L": 1, "Q": 2, "C": 3, "Z": 0}  # of each command of a path
FONTS = ["DejaVu Sans", "Verdana", "Arial"]  # in pictures; layouts are computed for the first
LENGTHS = ("x", "y", "width", "height", "transform")


def save(figure: Any, path: Path) -> None:
    """Save a matplotlib figure as a short SVG file."""
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "font.sans-serif": FONTS}):
        figure.savefig(drawn, format="svg")
    path.write_text(compact(drawn.getvalue()), encoding="utf-8")


def compact(picture: bytes) -> str:
    """Return an SVG file of matplotlib as one line for each panel. Identifiers are numbered, so
    that equal figures give equal text.

    Coordinates are rounded to 0.1 points, those of curves to 0.01, because the curves of markers
    have a radius of one or two points.
    """
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(picture)  # without comments and document type
    names = _referenced(root)
    classes: Dict[str, str] = {}
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    _shorten(root, names, classes)
    style = next(root.iter(f"{{{SVG}}}style"))
    style.text = _css(style.text or "") + "".join(
        f".{name}{{{_css(rules)}}}" for rules, name in classes.items()
    )
    for child in root:
        child.tail = "\n"
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _referenced(root: Element) -> Dict[str, str]:
    """A short name for each identifier that is referenced, in order of first reference."""
    found: Dict[str, str] = {}
    for element in root.iter():
        for value in (element.get(HREF, ""), element.get("clip-path", "")):
            for name in re.findall(r"^(?:url\()?#(\w+)", value):
                found.setdefault(name, f"i{len(found)}")
    return found


def _shorten(element: Element, names: Dict[str, str], classes: Dict[str, str]) -> None:
    """Shorten an element and its children; children of a group without attributes take its
    place, except those of a panel.
    """
    children: List[Element] = []
    for child in element:
        panel = child.get("id", "").startswith("axes")
        _shorten(child, names, classes)
        children += (
            list(child)
            if child.tag == f"{{{SVG}}}g" and not child.attrib and not panel
            else [child]
        )
    element[:] = children
    element.tail = None
    if not (element.text or "").strip():
        element.text = None
    attributes = dict(element.attrib)
    element.attrib.clear()
    for key, value in attributes.items():
        _keep(element, key, value, names, classes)


def _keep(
    element: Element, key: str, value: str, names: Dict[str, str], classes: Dict[str, str]
) -> None:
    """Set an attribute in its short form, unless it has no effect."""
    if key == "style":
        element.set("class", classes.setdefault(value, f"s{len(classes)}"))
    elif key == "d":
        element.set(key, _path(value, 2 if "C" in value else 1))
    elif key == "id":
        if value in names:
            element.set(key, names[value])
    elif key in (HREF, "clip-path"):
        element.set(
            key,
            re.sub(r"#(\w+)", lambda match: f"#{names[match[1]]}", value)
            if "#" in value
            else "".join(value.split()),
        )
    elif (
        key in LENGTHS and not value.startswith("matrix") and not value.endswith("pt")
    ):  # neither factors nor the size of the picture
        if not value.startswith("rotate(-0 "):
            element.set(
                key,
                re.sub(r"-?\d+\.\d+", lambda match: _number(round(float(match[0]) * 10), 1), value),
            )
    else:
        element.set(key, value)


def _path(text: str, places: int) -> str:
    """A path with relative coordinates in units of 10^-places. Differences are taken of rounded
    coordinates, so that rounding errors do not add up.
    """
    at, last, out = (0, 0), "", []
    words = text.replace("z", "Z").split()
    while words:
        command = words.pop(0)
        numbers = [round(float(words.pop(0)) * 10**places) for _ in range(2 * POINTS[command])]
        points: List[Tuple[int, int]] = list(zip(numbers[::2], numbers[1::2], strict=True))
        moves = [
            value - origin for point in points for value, origin in zip(point, at, strict=True)
        ]
        if command == "L" and last == "L" and not any(moves):
            continue
        words_out = " ".join(_number(move, places) for move in moves)
        out.append((" " if command == last else command.lower()) + words_out)
        at, last = points[-1] if points else at, command
    return "".join(out).replace(" -", "-")


def _number(units: int, places: int) -> str:
    return re.sub(r"^(-?)0\.", r"\1.", f"{units / 10**places:.6g}")


def _css(rules: str) -> str:
    return re.sub(r"([:;,]) ", r"\1", rules)
