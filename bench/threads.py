"""Two threads beside one: times of steps and of prompts of 16 to 512 tokens, and what the choice of `load(threads="auto")` loses.

    python -m bench.threads ARTEFACT ... [--seconds 2]

Both take turns. A ratio is that of the shortest times, which disturbances change less than medians. "auto" is the time with the chosen number relative to the
shorter of the two, for 2 cores: 1.00 if the choice is the better one.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, List, Sequence

import numpy as np

from posenc_export.runtime import load
from posenc_export.runtime.graphs import threads

PROMPTS = (16, 64, 512)
STEPS = 20


def timed(session: Any, tokens: np.ndarray, steps: bool) -> float:
    """Return the seconds of a step, as the mean of STEPS, or of a prefill of the tokens; the session keeps its length."""
    begun, count = time.perf_counter(), STEPS if steps else tokens.shape[1]
    for _ in range(STEPS if steps else 0):
        session.step(tokens[:, 0])
    if not steps:
        session.prefill(tokens)
    seconds = time.perf_counter() - begun
    session.rewind(count)
    return seconds / (STEPS if steps else 1)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="ARTEFACT")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds for each number")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        sessions = [load(folder, provider="cpu", threads=count).session() for count in (1, 2)]
        value, random = sessions[0].manifest.inputs[0], np.random.default_rng(0)
        vocabulary = sessions[0].manifest.vocabulary
        tokens = (
            random.integers(0, vocabulary, (1, 512))
            if vocabulary
            else random.standard_normal((1, 512, *value.token_shape), dtype=np.float32)
        )
        for session in sessions:
            session.prefill(tokens[:, :128])
        picked, found = min(2, threads.chosen("auto", sessions[0].manifest) or 2), []
        for count in (1, *PROMPTS):
            taken: List[List[float]] = [[], []]
            end = time.perf_counter() + options.seconds
            while time.perf_counter() < end or len(taken[0]) < 5:
                for times, session in zip(taken, sessions, strict=True):
                    times.append(timed(session, tokens[:, :count], count == 1))
            one, two = map(min, taken)
            found.append(
                f"{'step' if count == 1 else count}: {two / one:.2f} of {one * 1e6:.0f} us, auto {(one, two)[picked - 1] / min(one, two):.2f}"
            )
        print(f"{folder.name}, auto takes {picked}: " + ", ".join(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
