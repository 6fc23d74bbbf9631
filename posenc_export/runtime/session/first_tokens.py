"""The first tokens of a text, and the tokens that an artefact forbids or forces."""

import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.records import Generation
from posenc_export.runtime.session import arguments, discarding, errors
from posenc_export.runtime.session.argument_arrays import Rows
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import suggestion


@dataclass(frozen=True)
class First:
    """What rows read before the first generated token; the arguments of Session.generate."""

    prompt: Optional[Rows]
    encoder: Optional[Rows] = None
    language: Optional[str] = None
    task: Optional[str] = None
    endless: bool = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        rows = self.encoder if self.prompt is None else self.prompt
        return 1 if rows is None else len(rows)


def feed(session: Any, first: First) -> np.ndarray:
    """Feed the prompt, or the first tokens of a decoder that reads an encoder. Return the logits
    after them [B,V]. Raise ValueError as Session.generate does.
    """
    prompt, manifest = first.prompt, session.manifest
    if prompt is not None:
        if first.language or first.task:
            rule = "no prompt with language or task, which determine the first tokens"
            raise errors.expected(rule, f"both: {first.language or first.task}", "give one")
        counts = [len(row) for row in prompt]
        if not all(counts):
            rule, got = "a prompt with a token in every row", f"rows of {counts} tokens"
            raise errors.expected(rule, got, "leave empty rows out")
        if first.endless:
            return _in_pieces(session, prompt, first.encoder)
        return session.prefill(prompt, encoder=first.encoder, logits_to_keep=1)[:, -1]
    before, after = _around_language(manifest, check(manifest), first.language, first.task)
    start = [before] * first.rows
    logits = session.prefill(start, encoder=first.encoder, logits_to_keep=1)[:, -1]
    if after is None:
        return logits
    ids = np.array(sorted((manifest.generation or Generation()).languages.values()))
    languages = ids[logits[:, ids].argmax(-1)].tolist()
    return session.prefill([[language, *after] for language in languages], logits_to_keep=1)[:, -1]


def _in_pieces(session: Any, prompt: Rows, encoder: Optional[Rows]) -> np.ndarray:
    """Feed a prompt of any length, with room made for each piece. Return the logits after it. A
    prompt that is refused changes nothing.
    """
    checked = arguments.check_prefill(session.manifest, arguments.Passed(prompt))
    if session.batch:
        arguments.check_start(session.manifest, session.position, session.length, checked)
    begin, logits = 0, np.zeros((len(prompt), 1))
    while begin < max(map(len, prompt)):
        room = discarding.make_room(session) if session.batch else session.capacity
        pieces = [row[begin : begin + room] for row in prompt]
        last = session.prefill(pieces, encoder=encoder, logits_to_keep=1)[:, -1]
        logits = np.where([[len(piece) > 0] for piece in pieces], last, logits)
        begin, encoder = begin + room, None
    return logits


def check(manifest: Manifest) -> int:
    """Return the start token. Raise ValueError for a model that has none."""
    if not manifest.encoder or not manifest.start_ids:
        got = "one that reads none" if not manifest.encoder else "one without start_ids"
        rule = "a decoder that reads an encoder and has start_ids"
        raise refusal("generate", rule, got, "give a prompt, and no encoder")
    return manifest.start_ids[0]


def _around_language(
    manifest: Manifest, start: int, language: Optional[str], task: Optional[str]
) -> Tuple[List[int], Optional[List[int]]]:
    """Return all first tokens and None, or those before and after a language to be detected."""
    known = manifest.generation or Generation()
    language, task = language or known.language, task or known.task
    ids: List[Optional[int]] = [start, *(() if language or task else known.forced)]
    detected = not language and bool(known.languages) and (len(ids) == 1 or ids[1] is None)
    if language or detected:
        named = None
        if language:  # its code or its token, such as en or <|en|>
            codes = {_code(name): token for name, token in known.languages.items()}
            named = _named("language", _code(language.lower()), codes)
        ids[1:2] = [named]
    if task:
        ids.append(_named("task", task, known.tasks))
    elif language and "transcribe" in known.tasks:
        ids.append(known.tasks["transcribe"])
    if known.no_timestamps is not None and ids[-1] != known.no_timestamps:
        ids.append(known.no_timestamps)
    known_ids = [token for token in ids if token is not None]
    return ([start], known_ids[1:]) if detected else (known_ids, None)


def _code(name: str) -> str:
    return name.removeprefix("<|").removesuffix("|>")


def _named(what: str, name: str, ids: Dict[str, int]) -> int:
    if not ids:
        rule = f"no {what} for a model whose generation_config.json lists none"
        raise refusal("generate", rule, repr(name), "leave it out")
    if name not in ids:
        rule, remedy = f"{what} to be one of {', '.join(ids)}", suggestion(name, list(ids))
        raise refusal("generate", rule, repr(name), remedy)
    return int(ids[name])


class TokenRules:
    """The rules for tokens after prompts of `lengths` tokens [B], from those of the artefact."""

    def __init__(self, known: Optional[Generation], lengths: np.ndarray) -> None:
        self._known = known
        forces = known is not None and known.forced_first is not None
        self._forced = (lengths == 1) & forces  # rows whose first token is forced

    def applied(
        self, logits: np.ndarray, index: int, rows: Union[slice, Sequence[int]] = slice(None)
    ) -> np.ndarray:
        """Return logits [n,V] of some rows, after `index` tokens, with -inf for forbidden ones."""
        known = self._known
        if known is None:
            return logits
        logits, forced = logits.copy(), self._forced[rows]
        if index == 0 and forced.any():
            logits[forced] = -math.inf
            logits[forced, known.forced_first] = 0.0
        logits[:, list(known.suppressed)] = -math.inf
        if index < 2:  # rows whose first token that is not forced is this one
            logits[np.ix_(forced == index, known.suppressed_first)] = -math.inf
        return logits
