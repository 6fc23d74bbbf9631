"""`posenc list`: print what is registered, or one encoding with its parameters."""

import argparse
import inspect
import json
import textwrap
from typing import Any

from posenc_export.commands.options import Table, option
from posenc_export.commands.terminal import show
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion
from posenc_export.shared.tables import WIDTH, aligned

Rows = list[dict[str, str]]
GROUPS = ("encodings", "targets", "presets")
OPTIONS: Table = {
    "what": option(
        f"one of {', '.join(GROUPS)} (default: all of them), or the name of an encoding, for its "
        "formula and parameters",
        nargs="?",
    )
}


def run(options: argparse.Namespace) -> int:
    """Run the command. Raise ValueError for a name that is neither a group nor an encoding."""
    from posenc_export.encodings import KNOWN

    if options.what in KNOWN:
        return _print_encoding(options)
    if options.what not in (None, *GROUPS):
        rule, got = f"one of {', '.join(GROUPS)} or an encoding", repr(options.what)
        near = suggestion(options.what, [*GROUPS, *KNOWN], "posenc list shows all names")
        raise refusal("list", rule, got, near)
    rows = _rows(options.what)
    whole = options.what is None
    text = "\n\n".join(_text(name, group, shorten=whole) for name, group in rows.items())
    names = " | ".join((*GROUPS, "NAME of an encoding"))
    more = f"\n\nwhole texts: posenc list {names}" if whole else ""
    print(json.dumps(rows, indent=1) if options.json else text + more)
    return 0


def _rows(what: str | None) -> dict[str, Rows]:
    from posenc_export.catalogue.listing import encodings, presets

    groups = (encodings, _targets, presets)
    return {name: rows() for name, rows in zip(GROUPS, groups, strict=True) if what in (None, name)}


def _targets() -> Rows:
    from posenc_export.runtime.artefact.schema import TARGETS

    return [{"name": name, "graph": of.graph, "cache": of.cache} for name, of in TARGETS.items()]


def _text(name: str, rows: Rows, shorten: bool) -> str:
    """A heading and a table. shorten: to a line."""
    if name == "encodings":
        outside = ["package"] if any(row["package"] != "-" for row in rows) else []
        rows = [{key: row[key] for key in ("name", "hook", *outside, "source")} for row in rows]
    return "\n".join(
        [name, *aligned(list(rows[0]), [list(row.values()) for row in rows], WIDTH, shorten)]
    )


def _print_encoding(options: argparse.Namespace) -> int:
    from posenc_export.catalogue.listing import encodings, place_of
    from posenc_export.encodings import KNOWN, parameters

    row = next(row for row in encodings() if row["name"] == options.what)
    if options.json:
        print(json.dumps(row, indent=1))
        return 0
    described: Any = inspect.getdoc(KNOWN[options.what])
    print(textwrap.fill(row["source"], WIDTH), described, place_of(options.what), sep="\n\n")
    if known := parameters(options.what):
        print()
        show([{"parameter": name, "default": str(p.default)} for name, p in known.items()])
    return 0
