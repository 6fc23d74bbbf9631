"""`posenc list`: print what is registered, or one encoding with its parameters."""

import argparse
import inspect
import json
import textwrap
from typing import Any, Dict, List

from posenc_export.commands.terminal import show
from posenc_export.shared.suggestion import suggestion
from posenc_export.shared.tables import WIDTH, aligned

GROUPS = ("encodings", "targets", "families", "presets")
# A group that is printed on request only, because it calls the hooks of every encoding.
MEASURED = "properties"


def add_arguments(listing: argparse.ArgumentParser) -> None:
    what = (
        f"one of {', '.join(GROUPS)} (default: all of them), {MEASURED} of encodings, or the "
        "name of an encoding, for its formula and parameters"
    )
    listing.add_argument("what", nargs="?", help=what)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status 0.

    Raises:
        ValueError: a name that is neither a group nor an encoding.
    """
    from posenc_export.encodings import KNOWN

    if options.what in KNOWN:
        return _one(options)
    named = (*GROUPS, MEASURED)
    if options.what not in (None, *named):
        rule = f"expected one of {', '.join(named)} or an encoding"
        raise ValueError(
            f"list: {rule}, got {options.what!r}; {suggestion(options.what, [*named, *KNOWN])}"
        )
    rows = (
        _measured()
        if options.what == MEASURED
        else {name: groups for name, groups in _rows().items() if options.what in (None, name)}
    )
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    print("\n\n".join(_text(name, group) for name, group in rows.items()))
    return 0


def _rows() -> Dict[str, List[Dict[str, str]]]:
    from posenc_export.catalogue.listing import encodings, families, presets
    from posenc_export.export import TARGETS

    targets = [
        {"name": name, "graph": target.graph, "cache": target.cache}
        for name, target in TARGETS.items()
    ]
    targets.append(
        {
            "name": "aotinductor",
            "graph": "native code, by posenc compile from pt2",
            "cache": TARGETS["pt2"].cache,
        }
    )
    return {
        "encodings": encodings(),
        "targets": targets,
        "families": families(),
        "presets": presets(),
    }


def _measured() -> Dict[str, List[Dict[str, str]]]:
    from posenc_export.catalogue.properties import rows

    return {MEASURED: rows()}


def _text(name: str, rows: List[Dict[str, str]]) -> str:
    """A heading and a table. `posenc list NAME` prints states and parameters of encodings;
    families with the same description share a row.
    """
    if name == "encodings":
        outside = ["package"] if any(row["package"] != "-" for row in rows) else []
        rows = [{key: row[key] for key in ("name", "hook", *outside, "source")} for row in rows]
    if name == "families":
        names: Dict[str, List[str]] = {}
        for row in rows:
            names.setdefault(row["what"], []).append(row["name"])
        rows = [{"name": ", ".join(alike), "what": what} for what, alike in names.items()]
    return "\n".join([name, *aligned(list(rows[0]), [list(row.values()) for row in rows], WIDTH)])


def _wrapped(docstring: str) -> str:
    """Wrap the paragraphs and entries of a docstring to WIDTH columns. An entry of a section is
    indented by 4 columns, its further lines by more.
    """
    first, *rest = docstring.splitlines()
    parts = [first]
    for line in rest:
        if _continues(parts[-1], line):
            parts[-1] += f" {line.strip()}"
        else:
            parts.append(line)
    return "\n".join(
        textwrap.fill(part, WIDTH, subsequent_indent=" " * 8 if part.startswith(" ") else "")
        for part in parts
    )


def _continues(before: str, line: str) -> bool:
    """Return whether a line of a docstring continues the paragraph or the entry before it."""
    if not before or not line or before.endswith(":"):
        return False
    indent = len(line) - len(line.lstrip())
    return indent > 4 or (indent == 0 and not before.startswith(" "))


def _one(options: argparse.Namespace) -> int:
    """Print one encoding: source, description, parameters with defaults, and properties."""
    from posenc_export.catalogue.listing import encodings
    from posenc_export.catalogue.properties import row_of
    from posenc_export.encodings import KNOWN, parameters

    row = next(row for row in encodings() if row["name"] == options.what)
    measured = {name: cell for name, cell in row_of(options.what).items() if name != "name"}
    if options.json:
        print(json.dumps({**row, MEASURED: measured}, indent=1))
        return 0
    described: Any = inspect.getdoc(KNOWN[options.what])
    print(textwrap.fill(row["source"], WIDTH), "", _wrapped(described), sep="\n")
    defaults = [
        {"parameter": name, "default": str(parameter.default)}
        for name, parameter in parameters(options.what).items()
    ]
    if defaults:
        print()
        show(defaults)
    print()
    show([{"property": name, "measured": cell} for name, cell in measured.items()])
    return 0
