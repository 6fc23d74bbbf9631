"""Run a benchmark: measure the contestants in turn, and measure disturbed samples again, until every number of tokens has its rounds."""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from posenc_export.benchmark import machine
from posenc_export.benchmark.contestants import Contestant, gather, usable
from posenc_export.benchmark.disturbance import Reading, disturbed
from posenc_export.benchmark.limits import share_of_limit, step_bytes
from posenc_export.benchmark.report import Report
from posenc_export.benchmark.results import Loaded, Row
from posenc_export.benchmark.spread import ratios, spread
from posenc_export.benchmark.verdicts import LEAST
from posenc_export.benchmark.workers import Worker, started
from posenc_export.runtime.graphs.providers import check_threads

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
PREFILL_LIMIT = 3.0  # seconds; a prompt that takes longer is timed once
PROMPTS = 2 * LEAST  # fewest prompts of a shorter time: twice the rounds that a ratio needs, because some are disturbed
DECODE_SHARE = 0.4  # share of the time budget; the rest is for prefill and repeated samples
Progress = Callable[[str], None]


class Samples:
    """Samples of one contestant, one per round. Disturbed samples are measured again, at most `patience` times in total; further ones are kept.

    Attributes:
        seconds: the sample of each round.
        redone: samples that were discarded and measured again.
        disturbed: numbers of the rounds whose sample was disturbed and kept.
    """

    def __init__(self, patience: int, cores: int) -> None:
        self.seconds: List[float] = []
        self.disturbed: List[int] = []
        self.redone = 0
        self.patience, self.cores = patience, cores

    def take(self, ask: Callable[[], Dict[str, Any]], clock: Dict[str, float]) -> None:
        """Take one sample.

        Args:
            ask: requests the sample from a worker.
            clock: clock["spin"] is the shortest reference loop of all contestants so far, in seconds; updated.
        """
        while True:
            reply = ask()
            reading = Reading(**reply["reading"])
            clock["spin"] = min(clock.get("spin", reading.spin), reading.spin)
            bad = disturbed(reading, clock["spin"], self.cores)
            if not bad or self.redone >= self.patience:
                break
            self.redone += 1
        if bad:
            self.disturbed.append(len(self.seconds))
        self.seconds += reply["seconds"]


@dataclass
class Turns:
    """The contestants with their workers, and the time budget.

    Args:
        workers: the worker of each contestant.
        limits_worker: the worker that measures the limits of the machine.
        batch: rows of every call.
        rounds: samples per contestant.
        seconds: time per contestant and number of tokens.
        clock: shortest reference loop so far (Samples.take).
    """

    contestants: List[Contestant]
    workers: List[Worker]
    limits_worker: Worker
    batch: int
    rounds: int
    seconds: float
    clock: Dict[str, float] = field(default_factory=dict)

    def prefill(self, tokens: int) -> List[Row]:
        """Time prompts of all contestants in turn. Contestants with long prompts get fewer turns, above PREFILL_LIMIT one."""
        first = [_first_prefill(worker, tokens) for worker in self.workers]
        budget = self.seconds * (1 - DECODE_SHARE) / 2
        wanted = [1 if t > PREFILL_LIMIT else min(self.rounds, max(PROMPTS, int(budget / t))) for t in first]
        taken = [self._samples(count) for count in wanted]
        for turn in range(max(wanted)):
            for worker, samples, count in zip(self.workers, taken, wanted, strict=True):
                if turn < count:
                    samples.take(lambda w=worker: w.ask("prefill", context=tokens), self.clock)  # type: ignore[misc]
        return self._rows("prefill", tokens, taken, {})

    def decode(self, tokens: int) -> List[Row]:
        """Time steps of all contestants in turn, and in the same rounds reads of as many bytes as a step must read."""
        duration = self.seconds * DECODE_SHARE / self.rounds
        taken = [self._samples(self.rounds) for _ in self.workers]
        reads = {step_bytes(c.manifest, tokens, self.batch): self._samples(self.rounds) for c in self.contestants}
        for turn in range(self.rounds):
            for worker, samples in zip(self.workers, taken, strict=True):
                fresh = iter([turn == 0])
                samples.take(lambda w=worker, f=fresh: w.ask("decode", context=tokens, duration=duration, fresh=next(f, False)), self.clock)  # type: ignore[misc]
            for size, samples in reads.items():
                samples.take(lambda s=size: self.limits_worker.ask("bandwidth", bytes=s, duration=duration), self.clock)  # type: ignore[misc]
        return self._rows("decode", tokens, taken, {size: size / spread(samples.seconds).median for size, samples in reads.items()})

    def _samples(self, patience: int) -> Samples:
        return Samples(patience, os.cpu_count() or 1)

    def _rows(self, phase: str, tokens: int, taken: List[Samples], bandwidths: Dict[int, float]) -> List[Row]:
        """Return the rows of one phase, fastest first. bandwidths: bytes per second by bytes read; empty if no limit applies."""
        pairs = sorted(zip(self.contestants, taken, strict=True), key=lambda pair: spread(pair[1].seconds).median)
        fastest = pairs[0][1]
        return [self._row(phase, tokens, contestant, samples, fastest, bandwidths) for contestant, samples in pairs]

    def _row(self, phase: str, tokens: int, contestant: Contestant, samples: Samples, fastest: Samples, bandwidths: Dict[int, float]) -> Row:
        times = spread(samples.seconds)
        size = step_bytes(contestant.manifest, tokens, self.batch)
        bandwidth = bandwidths.get(size) if contestant.reads_known_bytes else None
        over = ratios(samples.seconds, fastest.seconds, {*samples.disturbed, *fastest.disturbed})
        return Row(
            phase=phase,
            tokens=tokens,
            contestant=contestant.label,
            model=contestant.model,
            median_seconds=times.median,
            p10_seconds=times.low,
            p90_seconds=times.high,
            samples_seconds=samples.seconds,
            tokens_per_second=self.batch * (tokens if phase == "prefill" else 1) / times.median,
            ratio_to_fastest=spread(over).median if len(over) >= LEAST else None,
            least_bytes=None if bandwidth is None else size,
            read_bytes_per_second=bandwidth,
            share_of_limit=None if bandwidth is None else share_of_limit(size, times.median, bandwidth),
            samples_redone=samples.redone,
            rounds_disturbed=samples.disturbed,
        )


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
) -> Report:
    """Measure prefill and decode times of artefacts and other runtimes.

    Args:
        folders: artefact folders; each runs on the CPU, and on CUDA if the machine and the artefact support it.
        runtimes: other runtimes to compare with, names in RUNTIMES.
        contexts: tokens in the cache of a decode step. Numbers beyond the range of a model are skipped; models without a cache have no decode.
        prompts: tokens of a prompt at prefill; None for the contexts. Numbers beyond the range of a model are skipped.
        batch: rows of every call.
        rounds: samples per contestant, number of tokens and phase; long prompts get fewer.
        seconds: time per contestant and number of tokens, without the prefill that fills the cache for decode.
        threads: threads of a contestant.
        different_models: allow folders of different models.
        providers: "openvino", "openvino-bf16" and "aotinductor", in addition to the CPU and CUDA, for the folders that they can run.
        progress: called with one line of text at each stage.

    Raises:
        ValueError: no folder, folders of different models, no usable number of tokens, a runtime that is not installed or supports none of the folders, a
            contestant that fails.
    """
    check_threads(threads)
    if min(rounds, batch) < 1 or not 0 < seconds < math.inf:
        raise ValueError(f"benchmark: expected rounds, batch and seconds above 0, got {rounds}, {batch} and {seconds}; give other numbers")
    contestants = gather(folders, runtimes, different_models, providers)
    steps = all(contestant.manifest.states for contestant in contestants)
    cached, prefilled = usable(contexts if steps else (), contestants), usable(contexts if prompts is None else prompts, contestants)
    if not cached and not prefilled:
        raise ValueError("benchmark: expected a context or a prompt to measure, got none; give one")
    say = progress or (lambda line: None)
    with started([c.label for c in contestants] + ["limits"], threads) as (*workers, limits_worker):
        loads = [_load(c, w, threads, batch, say) for c, w in zip(contestants, workers, strict=True)]
        turns = Turns(contestants, workers, limits_worker, batch, rounds, seconds)
        say("limits of the machine")
        limits = machine.limits(limits_worker, threads)
        rows = _measured(turns, cached, prefilled, say)
        loaded = [_loaded(c, reply, w.ask("memory")["peak"]) for c, w, reply in zip(contestants, workers, loads, strict=True)]
    return Report(machine.described(threads), limits, loaded, rows, batch)


def _measured(turns: Turns, cached: Sequence[int], prefilled: Sequence[int], say: Progress) -> List[Row]:
    """Measure decode with each number of `cached` tokens, then prefill with each number of `prefilled` tokens."""
    rows: List[Row] = []
    for phase, numbers, measure in (("decode", cached, turns.decode), ("prefill", prefilled, turns.prefill)):
        for tokens in numbers:
            say(f"{phase} at {tokens} tokens: {len(turns.contestants)} contestants, {turns.rounds} rounds")
            rows += measure(tokens)
    return rows


def _load(contestant: Contestant, worker: Worker, threads: int, batch: int, say: Progress) -> Dict[str, Any]:
    say(f"load {contestant.label}")
    return worker.ask("load", runtime=contestant.runtime, folder=str(contestant.folder), provider=contestant.provider, threads=threads, batch=batch)


def _loaded(contestant: Contestant, reply: Dict[str, Any], peak: int) -> Loaded:
    manifest = contestant.manifest
    return Loaded(
        contestant=contestant.label,
        model=contestant.model,
        runtime=contestant.runtime,
        target=manifest.target,
        provider=contestant.provider,
        dtype=manifest.dtype,
        artefact=contestant.artefact,
        artefact_digest=manifest.digest,
        weights=reply["weights"],
        load_seconds=reply["load"],
        first_calls_seconds=reply["warm_up"],
        peak_memory_bytes=peak,
    )


def _first_prefill(worker: Worker, tokens: int) -> float:
    """Return the seconds of a prompt. A time above the limit is measured again, because torch.compile may have compiled for a new length."""
    seconds: float = worker.ask("prefill", context=tokens)["seconds"][0]
    return seconds if seconds <= PREFILL_LIMIT else min(seconds, worker.ask("prefill", context=tokens)["seconds"][0])
