"""Generate tokens with a session: prefill a prompt, then sample and feed one token at a time."""

from typing import Any, Iterator, Optional, Sequence

import numpy as np

from posenc_export.runtime.session.arguments import Rows, array_of, at_least, short_repr
from posenc_export.runtime.session.sampling import check, choose

ENDED = -1  # id that is given for a row that has ended


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
    """Implement Session.generate, which documents the arguments."""
    manifest = session.manifest
    if manifest.kind != "decoder" and not (manifest.kind == "module" and manifest.outputs[0].axes[-1] == manifest.vocabulary):
        raise ValueError(f"session: expected a decoder for generate, got kind {manifest.kind}; call prefill")
    at_least("max_tokens", max_tokens, 1)
    check(temperature, top_k, top_p)
    counts = [len(row) for row in prompt]
    if not all(counts):
        raise ValueError(f"session: expected a prompt with a token in every row, got rows of {counts} tokens; leave empty rows out")
    stops = array_of("stop", list(session.manifest.stop_ids if stop is None else stop))
    if stops.size and stops.dtype.kind not in "iu":
        raise ValueError(f"session: expected stop to be token ids, got {short_repr(stop)}; leave it out for those of the artefact")
    random, going = np.random.default_rng(at_least("seed", seed, 0)), np.ones(len(counts), bool)
    logits = session.prefill(prompt, encoder=encoder, logits_to_keep=1)[:, -1]
    for index in range(max_tokens):
        chosen = np.where(going, choose(logits, temperature, top_k, top_p, random), ENDED)
        yield chosen
        going = going & ~np.isin(chosen, stops)
        if index + 1 == max_tokens or not going.any():
            return
        if going.all():
            logits = session.step(chosen)
        else:  # rows that have ended read no more tokens
            output = session.prefill([[token] if more else [] for token, more in zip(chosen.tolist(), going, strict=True)])
            logits = np.where(going[:, None], output[:, 0], logits)
