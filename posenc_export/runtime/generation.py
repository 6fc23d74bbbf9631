"""Text from a session: a prompt, then one token after the other."""

from typing import Any, Iterator

import numpy as np

from posenc_export.runtime.rows import Rows
from posenc_export.runtime.sampling import choose


def generate(session: Any, prompt: Rows, tokens: int, temperature: float, top_k: int, top_p: float, seed: int) -> Iterator[np.ndarray]:
    """Session.generate."""
    if session.manifest.kind != "decoder":
        raise ValueError(f"session: generate takes a decoder, got kind {session.manifest.kind}; call prefill")
    if tokens < 1:
        raise ValueError(f"session: tokens is at least 1, got {tokens}; give tokens=N")
    counts = [len(row) for row in prompt]
    if not all(counts):
        raise ValueError(f"session: a prompt has a token in every row, got {counts}; leave empty rows out")
    random = np.random.default_rng(seed)
    output = session.prefill(prompt)
    logits = np.stack([output[row, count - 1] for row, count in enumerate(counts)])
    for index in range(tokens):
        chosen = choose(logits, temperature, top_k, top_p, random)
        yield chosen
        if index + 1 < tokens:
            logits = session.step(chosen)
