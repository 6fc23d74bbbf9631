"""JSON files of results, with one line for each row."""

import json
from pathlib import Path
from typing import Any

WIDTH = 600  # characters of a line that contains nested values


def write(path: Path, value: Any) -> None:
    """Write a value as JSON. A list or object has one line if it contains only numbers and strings, or if it is within another one and fits in WIDTH characters."""
    path.write_text(_text(json.loads(json.dumps(value)), "") + "\n", encoding="utf-8")


def _text(value: Any, indent: str) -> str:
    line = json.dumps(value)
    nested = isinstance(value, (dict, list)) and any(isinstance(each, (dict, list)) for each in (value.values() if isinstance(value, dict) else value))
    if not nested or (indent and len(line) <= WIDTH):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_text(each, inner)}" for key, each in value.items()]
    else:
        lines = [inner + _text(each, inner) for each in value]
    return ",\n".join([line[0] + "\n" + lines[0], *lines[1:]]) + "\n" + indent + line[-1]
