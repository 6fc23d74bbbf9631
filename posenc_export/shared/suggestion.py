"""Suggest the closest name, or the command that helps, in messages about unknown names."""

import difflib
import re
from pathlib import Path
from typing import Collection, Iterable

from posenc_export.shared.refusal import short_repr

# org/name, as people copy it from the Hugging Face hub, and a file of it in the format GGUF.
HUB = re.compile(
    r"(?:hf:/+|https:/+huggingface\.co/)?([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)"
    r"(?:/([\w./-]+\.gguf))?"
)

CLOSE = 0.7  # ratio of difflib; 0.6, its default, takes cosin for swin


def suggestion(name: object, names: Iterable[str], otherwise: str = "choose one of these") -> str:
    """Return the remedy for an unknown name: the closest of `names`, or if none is close
    `otherwise`, by default for messages that list them.
    """
    known = {text.lower(): text for text in names}
    near = difflib.get_close_matches(str(name).lower(), known, 1, CLOSE)
    return f"did you mean {known[near[0]]}?" if near else otherwise


def check_name(what: str, name: str, names: Collection[str]) -> None:
    """Raise ValueError that begins with `what`, as "export: expected target", for other names."""
    if name not in names:
        near = suggestion(name, names)
        raise ValueError(f"{what} to be one of {', '.join(names)}, got {short_repr(name)}; {near}")


def download(name: object) -> str:
    """Return the command that downloads a model of the Hugging Face hub, or ""."""
    match = HUB.fullmatch(str(name))
    if match is None or Path(match[1]).exists():
        return ""
    organization, model, file = match.groups()
    return f"hf download {organization}/{model} {f'{file} ' if file else ''}--local-dir {model}"
