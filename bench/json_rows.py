"""JSON files of results, with one line for each row."""

import json
from pathlib import Path
from typing import Any

WIDTH = 200  # characters of a nested object or list that has one line


def read(path: Path, absent: Any = None) -> Any:
    """Return the value of a file; `absent` if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else absent


def write(path: Path, value: Any) -> None:
    """Write a value as JSON, with a line for each item of a list, and for what is nested within
    WIDTH.
    """
    path.write_text(_text(json.loads(json.dumps(value)), "") + "\n", encoding="utf-8")


def _text(value: Any, indent: str) -> str:
    line = json.dumps(value)
    items = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, (dict, list)) and any(isinstance(i, (dict, list)) for i in items)
    if not nested or (indent and len(line) <= WIDTH):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items()]
    else:
        lines = [inner + json.dumps(item) for item in value]
    return ",\n".join([line[0] + "\n" + lines[0], *lines[1:]]) + "\n" + indent + line[-1]
