"""Embed texts: tokenize them, read texts of similar length together, and return their embeddings in the order of the texts."""

import json
from pathlib import Path
from typing import Any, List, Optional, Sequence

import numpy as np

from posenc_export.runtime.artefact.tokenizer import codec
from posenc_export.runtime.session.arguments import at_least, short_repr

OUTPUT = "sentence_embedding"
PROMPTS = "config_sentence_transformers.json"
BATCH = 1024  # default for the largest number of tokens, padding included, that are read together


def encode(model: Any, texts: Sequence[str], prompt: Optional[str], batch: int) -> np.ndarray:
    """Implement Model.encode, which documents the arguments."""
    return embed(model, rows_of(model, texts, prompt), batch)


def rows_of(model: Any, texts: Sequence[str], prompt: Optional[str] = None) -> List[np.ndarray]:
    """Return the token ids of each text, cut to the maximal length. Raise ValueError as Model.encode does."""
    check_model(model)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"embed: expected a list of texts, got {short_repr(texts)}; put one text into a list"
        )
    begin = _prompt(model.folder, prompt)
    tokenizer = codec(model.folder, model.manifest, longest(model))
    return [np.array(tokenizer.encode(begin + text), np.int64) for text in texts]


def embed(model: Any, rows: Sequence[np.ndarray], batch: int = BATCH) -> np.ndarray:
    """Return the embeddings [n,E] float32 of rows of token ids. Raise ValueError as Session.read_out does."""
    at_least("batch", batch, 1)
    embeddings = np.zeros((len(rows), int(model.manifest.outputs[-1].axes[-1])), np.float32)
    session = model.session()
    for indices in groups([len(row) for row in rows], batch):
        embeddings[indices] = session.read_out([rows[index] for index in indices])
    return embeddings


def check_model(model: Any) -> None:
    """Raise ValueError unless a model comes from an artefact with sentence embeddings."""
    last = model.manifest.outputs[-1].name
    if last != OUTPUT or model.folder is None:
        found = last if model.folder else "a module in memory"
        raise ValueError(
            f"embed: expected an artefact with output {OUTPUT}, got {found}; export a sentence-transformers folder, or call session().prefill"
        )


def longest(model: Any) -> int:
    """Return the largest number of tokens of a text, special tokens included, at which its tokenizer cuts it; the range of positions if it does not."""
    path, most = model.folder / "tokenizer.json", int(model.manifest.max_positions)
    cut = json.loads(path.read_text(encoding="utf-8")).get("truncation") if path.is_file() else None
    return min(most, int(cut["max_length"])) if cut else most


def groups(lengths: Sequence[int], batch: int) -> List[List[int]]:
    """Return the indices of rows to read together, longest first: as many rows of similar length as `batch` tokens with their padding, at least one."""
    found: List[List[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > batch:
            found.append([])
        found[-1].append(index)
    return found


def _prompt(folder: Path, name: Optional[str]) -> str:
    """Return the text of a prompt of the checkpoint; of its default prompt, or none, if no name is given."""
    path = folder / PROMPTS
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    prompts, name = (
        settings.get("prompts") or {},
        settings.get("default_prompt_name") if name is None else name,
    )
    if name is None:
        return ""
    if not isinstance(prompts.get(name), str):
        raise ValueError(
            f"embed: expected prompt to be one of {', '.join(prompts) or 'none'}, got {name!r}; leave it out, or put it before the texts"
        )
    return str(prompts[name])
