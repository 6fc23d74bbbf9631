"""Suggest the closest name in messages about unknown names."""

import difflib
from typing import Iterable


def suggestion(name: object, names: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the closest of `names` if one is close, otherwise the advice to choose one of them."""
    near = difflib.get_close_matches(str(name), list(names), 1)
    return f"did you mean {near[0]}?" if near else "choose one of these"
