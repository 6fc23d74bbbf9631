"""Text from a session: a prompt, then one token after the other."""

from typing import Any, Iterator, Optional, Sequence

import numpy as np

from posenc_export.runtime.rows import Rows
from posenc_export.runtime.sampling import choose

ENDED = -1  # the id of a row that has ended


def generate(
    session: Any,
    prompt: Rows,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: Optional[Sequence[int]],
    encoder: Optional[Rows],
) -> Iterator[np.ndarray]:
    """Session.generate."""
    manifest = session.manifest
    if manifest.kind != "decoder" and not (manifest.kind == "module" and manifest.outputs[0].axes[-1] == manifest.vocabulary):
        raise ValueError(f"session: generate takes a decoder, got kind {manifest.kind}; call prefill")
    if max_tokens < 1:
        raise ValueError(f"session: max_tokens is at least 1, got {max_tokens}; give max_tokens=N")
    counts = [len(row) for row in prompt]
    if not all(counts):
        raise ValueError(f"session: a prompt has a token in every row, got {counts}; leave empty rows out")
    stops = np.array(session.manifest.stop_ids if stop is None else stop, np.int64)
    random, going = np.random.default_rng(seed), np.ones(len(counts), bool)
    logits = session.prefill(prompt, encoder=encoder, logits_to_keep=1)[:, -1]
    for index in range(max_tokens):
        chosen = np.where(going, choose(logits, temperature, top_k, top_p, random), ENDED)
        yield chosen
        going = going & ~np.isin(chosen, stops)
        if index + 1 == max_tokens or not going.any():
            return
        if going.all():
            logits = session.step(chosen)
        else:  # rows that have ended read nothing more
            output = session.prefill([[token] if more else [] for token, more in zip(chosen.tolist(), going, strict=True)])
            logits = np.where(going[:, None], output[:, 0], logits)
