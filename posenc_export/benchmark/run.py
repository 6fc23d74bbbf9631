"""Run a benchmark: check what is asked for, start one worker per contestant, and measure."""

import math
from pathlib import Path
from typing import List, Optional, Sequence, Tuple, Union

from posenc_export.benchmark.contestants import Contestant, gather, usable
from posenc_export.benchmark.measurement import Measurement, Progress
from posenc_export.benchmark.other_processes import busy_machine
from posenc_export.benchmark.report import Report
from posenc_export.benchmark.workers import started
from posenc_export.runtime.graphs.providers import check_threads

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
# Of a quick run; the seconds are those of all contestants together, without loading.
QUICK_TOKENS, QUICK_ROUNDS, QUICK_SECONDS = 512, 10, 25.0


def run(
    folders: Sequence[Union[str, Path]],
    runtimes: Sequence[str] = (),
    contexts: Sequence[int] = CONTEXTS,
    prompts: Optional[Sequence[int]] = None,
    batch: int = 1,
    rounds: int = 10,
    threads: int = 2,
    seconds: float = 1.5,
    different_models: bool = False,
    providers: Sequence[str] = (),
    progress: Optional[Progress] = None,
    quick: bool = False,
) -> Report:
    """Measure prefill and decode times of artefacts and other runtimes.

    Args:
        folders, runtimes, different_models, providers: the contestants (`gather`).
        contexts: tokens in the cache of a decode step; models without a cache have no decode.
        prompts: tokens of a prompt at prefill; None for the contexts. As of contexts, numbers
            beyond the range of a model are skipped.
        batch, rounds, threads, seconds, progress: as for `Measurement`.
        quick: measure QUICK_TOKENS tokens in QUICK_ROUNDS rounds, or as many as the models can
            read, in QUICK_SECONDS, in place of contexts, prompts, rounds and seconds.

    Raises:
        ValueError: no folder, folders of different models, no usable number of tokens, a runtime
            that is not installed or supports none of the folders, a contestant that fails.
    """
    _check(rounds, batch, threads, seconds)
    contestants = gather(folders, runtimes, different_models, providers)
    if quick:
        contexts = prompts = (min(QUICK_TOKENS, *(c.manifest.max_positions for c in contestants)),)
        rounds, seconds = QUICK_ROUNDS, QUICK_SECONDS / (len(contestants) + 1)
    cached, prefilled = _tokens(contexts, prompts, contestants)
    sleeping = threads > 1 and busy_machine()
    names = [*(contestant.label for contestant in contestants), "limits"]
    with started(names, threads, sleeping) as (*workers, limits_worker):
        how = (threads, batch, rounds, seconds, progress or (lambda line: None), sleeping)
        return Measurement(contestants, workers, limits_worker, *how).report(cached, prefilled)


def _check(rounds: int, batch: int, threads: int, seconds: float) -> None:
    check_threads(threads)
    if min(rounds, batch) < 1 or not 0 < seconds < math.inf:
        raise ValueError(
            f"benchmark: expected rounds, batch and seconds above 0, got {rounds}, {batch} "
            f"and {seconds}; give other numbers"
        )


def _tokens(
    contexts: Sequence[int], prompts: Optional[Sequence[int]], contestants: Sequence[Contestant]
) -> Tuple[List[int], List[int]]:
    """Return the numbers of tokens in the cache of a step, and of a prompt, to measure."""
    steps = all(contestant.manifest.states for contestant in contestants)
    cached = usable(contexts if steps else (), contestants)
    prefilled = usable(contexts if prompts is None else prompts, contestants)
    if not cached and not prefilled:
        raise ValueError("benchmark: expected a context or a prompt to measure, got none; give one")
    return cached, prefilled
