"""The form of messages about values that do not follow a rule."""

import os
from pathlib import Path

SHOWN = 200  # most characters of a value that a message quotes


def expect(holds: bool, rule: str, got: object) -> None:
    """Raise the ValueError `expected rule, got got` unless a rule holds. Callers say where."""
    if not holds:
        raise ValueError(f"expected {rule}, got {got}")


def refusal(where: str, rule: str, got: object, remedy: str = "") -> ValueError:
    """Return the ValueError `where: expected rule, got got; remedy`."""
    return ValueError(f"{where}: expected {rule}, got {got}" + (f"; {remedy}" if remedy else ""))


def path_of(where: str, value: object) -> Path:
    """Return a caller's path. Raise ValueError for a value of another type."""
    if not isinstance(value, (str, os.PathLike)):
        raise refusal(where, "a path, as text or pathlib.Path", short_repr(value))
    return Path(value)


def short_repr(value: object) -> str:
    """Format a caller's value for an error message: one line of at most SHOWN characters."""
    line = " ".join(repr(value).split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."
