"""Embed texts, reading those of similar length together."""

from pathlib import Path
from typing import Annotated, Any, Dict, List, Optional, Sequence

import numpy as np
from msgspec import Meta, Struct

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import codec
from posenc_export.runtime.session.argument_arrays import at_least, short_repr
from posenc_export.shared.foreign import json_of, typed
from posenc_export.shared.refusal import refusal

OUTPUT = "sentence_embedding"
PROMPTS = "config_sentence_transformers.json"
BATCH = 1024  # default for the largest number of tokens, padding included, that are read together
AGAIN = "correct it in the checkpoint, and export it again"


class Truncation(Struct):
    """How a tokenizer.json cuts texts."""

    max_length: Annotated[int, Meta(ge=0)]


class Tokenizer(Struct):
    """What is read of a tokenizer.json."""

    truncation: Optional[Truncation] = None


class Settings(Struct):
    """What is read of PROMPTS."""

    prompts: Optional[Dict[str, Optional[str]]] = None
    default_prompt_name: Optional[str] = None


def rows_of(model: Any, texts: Sequence[str], prompt: Optional[str] = None) -> List[np.ndarray]:
    """Return the token ids of each text, cut to the maximal length. Raise as Model.embed."""
    check_model(model)
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise refusal("embed", "a list of texts", short_repr(texts), "put one text into a list")
    begin = _prompt(model.folder, prompt)
    tokenizer = codec(model.folder, model.manifest, longest(model))
    return [np.array(tokenizer.encode(begin + text), np.int64) for text in texts]


def embed(model: Any, rows: Sequence[np.ndarray], batch: int = BATCH) -> np.ndarray:
    """Return the embeddings [n,E] float32 of rows of token ids. Raise as Session.read_out."""
    at_least("batch", batch, 1)
    embeddings = np.zeros((len(rows), int(model.manifest.outputs[-1].axes[-1])), np.float32)
    session = model.session()
    for indices in groups([len(row) for row in rows], batch):
        embeddings[indices] = session.read_out([rows[index] for index in indices])
    return embeddings


def check_model(model: Any) -> None:
    """Raise ValueError unless a model comes from an artefact with sentence embeddings."""
    check_embeds(model.manifest)
    if model.folder is None:
        rule, remedy = f"an artefact with output {OUTPUT}", "export it, and load the folder"
        raise refusal("embed", rule, "a module in memory", remedy)


def check_embeds(manifest: Manifest) -> None:
    """Raise ValueError unless a model has the output OUTPUT."""
    if (last := manifest.outputs[-1].name) != OUTPUT:
        remedy = "export a sentence-transformers folder, or call session().prefill"
        raise refusal("embed", f"an artefact with output {OUTPUT}", last, remedy)


def longest(model: Any) -> int:
    """Return the tokens at which the tokenizer cuts a text; the range of positions otherwise."""
    path, most = model.folder / "tokenizer.json", int(model.manifest.max_positions)
    if not path.is_file():
        return most
    content = json_of("embed", path.name, path.read_bytes(), AGAIN)
    cut = typed("embed", path.name, content, Tokenizer, AGAIN).truncation
    return most if cut is None else min(most, cut.max_length)


def groups(lengths: Sequence[int], batch: int) -> List[List[int]]:
    """Return the indices of rows to read together, longest first: as many rows of similar length as
    `batch` tokens with their padding, at least one.
    """
    batches: List[List[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch:
            batches.append([])
        batches[-1].append(index)
    return batches


def _prompt(folder: Path, name: Optional[str]) -> str:
    """Return the text of a prompt of the checkpoint, of its default prompt without a name."""
    path = folder / PROMPTS
    content = json_of("embed", path.name, path.read_bytes(), AGAIN) if path.is_file() else {}
    settings = typed("embed", path.name, content, Settings, AGAIN)
    prompts, name = settings.prompts or {}, settings.default_prompt_name if name is None else name
    if name is None:
        return ""
    text = prompts.get(name)
    if text is None:
        rule = f"prompt to be one of {', '.join(prompts) or 'none'}"
        raise refusal("embed", rule, repr(name), "leave it out, or put it before the texts")
    return text
