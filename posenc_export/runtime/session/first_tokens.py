"""First tokens of a decoder that reads an encoder: the start token and, for Whisper, language and
task, in the order of transformers.

Whisper detects the language of each row where none is given: it is the likeliest one after the
start token.
"""

from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Generation
from posenc_export.runtime.session.arguments import Rows
from posenc_export.shared.suggestion import suggestion


@dataclass(frozen=True)
class First:
    """What rows read before the first generated token; the arguments of Session.generate."""

    prompt: Optional[Rows]
    encoder: Optional[Rows] = None
    language: Optional[str] = None
    task: Optional[str] = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        given = self.encoder if self.prompt is None else self.prompt
        return 1 if given is None else len(given)


def feed(session: Any, first: First) -> np.ndarray:
    """Feed the prompt, or the first tokens of a decoder that reads an encoder. Return the logits
    after them [B,V]. Raise ValueError as Session.generate does.
    """
    prompt, manifest = first.prompt, session.manifest
    if prompt is not None:
        if first.language or first.task:
            rule = "expected no prompt with language or task, which determine the first tokens"
            raise ValueError(f"session: {rule}, got both: {first.language or first.task}; give one")
        counts = [len(row) for row in prompt]
        if not all(counts):
            raise ValueError(
                f"session: expected a prompt with a token in every row, got rows of {counts} "
                "tokens; leave empty rows out"
            )
        return session.prefill(prompt, encoder=first.encoder, logits_to_keep=1)[:, -1]
    before, after = _around_language(manifest, check(manifest), first.language, first.task)
    logits = session.prefill(
        [before] * first.rows,
        encoder=first.encoder,
        logits_to_keep=1,
    )[:, -1]
    if after is None:
        return logits
    ids = np.array(sorted((manifest.generation or Generation()).languages.values()))
    return session.prefill(
        [[int(one), *after] for one in ids[logits[:, ids].argmax(-1)]], logits_to_keep=1
    )[:, -1]


def check(manifest: Manifest) -> int:
    """Return the start token. Raise ValueError for a model that has none."""
    if not manifest.encoder or not manifest.start_ids:
        other = "one that reads none" if not manifest.encoder else "one without start_ids"
        raise ValueError(
            "generate: expected a decoder that reads an encoder and has start_ids, got "
            f"{other}; give a prompt, and no encoder"
        )
    return manifest.start_ids[0]


def _around_language(
    manifest: Manifest, start: int, language: Optional[str], task: Optional[str]
) -> Tuple[List[int], Optional[List[int]]]:
    """Return all first tokens and None, or those before and after a language that must be
    detected.
    """
    known = manifest.generation or Generation()
    language, task = language or known.language, task or known.task
    ids: List[Optional[int]] = [start, *(() if language or task else known.forced)]
    detected = not language and bool(known.languages) and (len(ids) == 1 or ids[1] is None)
    if language or detected:
        ids[1:2] = [_language(known, language) if language else None]
    if task:
        ids.append(_named("task", task, known.tasks))
    elif language and "transcribe" in known.tasks:
        ids.append(known.tasks["transcribe"])
    if known.no_timestamps is not None and ids[-1] != known.no_timestamps:
        ids.append(known.no_timestamps)
    rest = [one for one in ids[2:] if one is not None]
    return ([start], rest) if detected else ([one for one in ids if one is not None], None)


def _language(known: Generation, language: str) -> int:
    """Return the id of a language, given as its code or its token, such as en or <|en|>."""
    names = {
        name.removeprefix("<|").removesuffix("|>"): one for name, one in known.languages.items()
    }
    return _named("language", language.lower().removeprefix("<|").removesuffix("|>"), names)


def _named(what: str, name: str, ids: Any) -> int:
    if not ids:
        raise ValueError(
            f"generate: expected no {what} for a model whose generation_config.json lists "
            f"none, got {name!r}; leave it out"
        )
    if name not in ids:
        raise ValueError(
            f"generate: expected {what} to be one of {', '.join(ids)}, got {name!r}; "
            f"{suggestion(name, list(ids))}"
        )
    return int(ids[name])
