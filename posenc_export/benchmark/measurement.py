"""Run a benchmark: measure the contestants in turn, one sample of each per round."""

import datetime
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from posenc_export.benchmark import machine
from posenc_export.benchmark.contestants import Contestant, gather, usable
from posenc_export.benchmark.ratios import FEWEST, spread
from posenc_export.benchmark.report import Report
from posenc_export.benchmark.results import Loaded, Row
from posenc_export.benchmark.workers import Worker, started
from posenc_export.runtime.graphs.providers import check_threads
from posenc_export.shared.progress import Progress, Steps, silent
from posenc_export.shared.refusal import refusal
from posenc_export.shared.suggestion import check_name

PREFILL_LIMIT = 3.0  # seconds; a prompt that takes longer is timed once
DECODE_SHARE = 0.6  # share of the time; the rest is for prefill
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)


@dataclass
class Measurement:
    """One run of a benchmark."""

    contestants: list[Contestant]
    workers: list[Worker]  # that of each contestant
    limits_worker: Worker  # the worker that measures the limits of the machine
    threads: int  # of a contestant
    batch: int  # rows of every call
    rounds: int  # samples per contestant, number of tokens and phase; long prompts get fewer
    # Time per contestant and number of tokens, without the prefill that fills the cache for decode
    seconds: float
    progress: Progress  # called with one line of text at each stage
    steps: Steps  # rounds of all phases; some prompts have fewer
    # Cores used by other processes during each sample.
    other_cores: list[float] = field(default_factory=list)

    def report(self, contexts: Sequence[int], prompts: Sequence[int], **about: Any) -> Report:
        """Load the contestants, and measure decode, then prefill, at each number of tokens. about:
        further fields of the report.
        """
        pairs = zip(self.contestants, self.workers, strict=True)
        replies = [self._load(contestant, worker) for contestant, worker in pairs]
        self.progress("limits of the machine")
        limits = machine.limits(self.limits_worker)
        calls = [("decode", tokens, self.decode) for tokens in contexts]
        calls += [("prefill", tokens, self.prefill) for tokens in prompts]
        how = f"{len(self.contestants)} contestants, {self.rounds} rounds"
        rows: list[Row] = []
        for done, (phase, tokens, measure) in enumerate(calls):
            self.steps.advance(done * self.rounds)
            self.progress(f"{phase} at {tokens} tokens: {how}")
            rows += measure(tokens)
        memory = [worker.ask("memory")["peak"] for worker in self.workers]
        loaded = list(map(_loaded, self.contestants, replies, memory))
        return Report(
            machine.described(self.threads),
            limits,
            loaded,
            rows,
            batch_rows=self.batch,
            other_cores=max(0.0, float(np.mean(self.other_cores))),
            date=datetime.date.today().isoformat(),
            **about,
        )

    def decode(self, tokens: int) -> list[Row]:
        """Time steps of all contestants, and reads of the bytes that a step must read."""
        duration = self.seconds * DECODE_SHARE / self.rounds
        times: list[list[float]] = [[] for _ in self.workers]
        sizes = (machine.step_bytes(own.manifest, tokens, self.batch) for own in self.contestants)
        reads: dict[int, list[float]] = {size: [] for size in sizes}
        for turn in range(self.rounds):
            how = {"context": tokens, "duration": duration, "fresh": turn == 0}
            for worker, samples in zip(self.workers, times, strict=True):
                samples.append(self._sample(worker, "decode", **how))
            for size, samples in reads.items():
                how = {"bytes": size, "duration": duration}
                samples.append(self._sample(self.limits_worker, "bandwidth", **how))
            self.steps.advance()
        bandwidths = {size: size / spread(samples).median for size, samples in reads.items()}
        return self._rows("decode", tokens, times, bandwidths)

    def prefill(self, tokens: int) -> list[Row]:
        """Time prompts of all contestants. Long prompts get fewer turns."""
        counts = [self._prompts(worker, tokens) for worker in self.workers]
        times: list[list[float]] = [[] for _ in self.workers]
        for turn in range(max(counts)):
            for worker, samples, count in zip(self.workers, times, counts, strict=True):
                if turn < count:
                    samples.append(self._sample(worker, "prefill", context=tokens))
            self.steps.advance()
        return self._rows("prefill", tokens, times, {})

    def _prompts(self, worker: Worker, tokens: int) -> int:
        seconds = self._sample(worker, "prefill", context=tokens)
        if seconds > PREFILL_LIMIT:
            return 1
        return min(self.rounds, max(FEWEST, int(self.seconds * (1 - DECODE_SHARE) / seconds)))

    def _sample(self, worker: Worker, do: str, **request: Any) -> float:
        reply = worker.ask(do, **request)
        self.other_cores.append(reply["other_cores"])
        return float(reply["seconds"])

    def _load(self, contestant: Contestant, worker: Worker) -> dict[str, Any]:
        self.progress(f"load {contestant.label}")
        where = {"runtime": contestant.runtime, "folder": str(contestant.folder)}
        how = {"provider": contestant.provider, "threads": self.threads, "batch": self.batch}
        return worker.ask("load", **where, **how)

    def _rows(
        self, phase: str, tokens: int, times: list[list[float]], bandwidths: dict[int, float]
    ) -> list[Row]:
        """Return the rows of a phase, fastest first. bandwidths: bytes per second by bytes read."""
        pairs = list(zip(self.contestants, times, strict=True))
        pairs.sort(key=lambda pair: spread(pair[1]).median)
        rows, together = [], self.batch * (tokens if phase == "prefill" else 1)
        asked = (worker.ask("memory")["resident"] for worker in self.workers)
        resident = dict(zip((own.label for own in self.contestants), asked, strict=True))
        for contestant, samples in pairs:
            of_step = spread(samples)
            size = machine.step_bytes(contestant.manifest, tokens, self.batch)
            bandwidth = bandwidths.get(size) if contestant.reads_known_bytes else None
            row = Row(
                phase=phase,
                tokens=tokens,
                contestant=contestant.label,
                model=contestant.model,
                median_seconds=of_step.median,
                p10_seconds=of_step.low,
                p90_seconds=of_step.high,
                samples_seconds=samples,
                tokens_per_second=together / of_step.median,
                least_bytes=size if bandwidth else None,
                read_bytes_per_second=bandwidth,
                share_of_limit=size / of_step.median / bandwidth if bandwidth else None,
                resident_bytes=resident[contestant.label] or None,
            )
            rows.append(row)
        return rows


def _loaded(contestant: Contestant, reply: dict[str, Any], peak: int) -> Loaded:
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
        load_seconds=reply["load"],
        first_calls_seconds=reply["warm_up"],
        peak_memory_bytes=peak,
        perplexity=contestant.perplexity,
    )


def run(
    folders: Sequence[str | Path],
    runtimes: Sequence[str] = (),
    contexts: Sequence[int] | None = None,
    prompts: Sequence[int] | None = None,
    batch: int = 1,
    rounds: int = 10,
    threads: int = 2,
    seconds: float = 1.5,
    progress: Progress = silent,
    baseline: str = "",
    command: str = "",
) -> Report:
    """Measure prefill and decode times of artefacts and other runtimes.

    Args:
        folders, runtimes: the contestants (`gather`).
        contexts: tokens in the cache of a decode step; models without a cache have no decode. None
            for CONTEXTS, or the range of the models if it is shorter than all of these.
        prompts: tokens of a prompt at prefill; None for the contexts. As of contexts, numbers
            beyond the range of a model are skipped.
        batch, rounds, threads, seconds, progress: as for `Measurement`.
        baseline: the contestant to which times are relative; empty for the fastest.
        command: the command line that the report names, if there is one.

    Raises:
        ValueError: no folder, no usable number of tokens, a runtime that is not installed or
            supports none of the folders, a contestant that fails.
    """
    check_threads(threads)
    if min(rounds, batch) < 1 or not 0 < seconds < math.inf:
        rule = "rounds, batch and seconds above 0"
        raise refusal("benchmark", rule, f"{rounds}, {batch} and {seconds}", "give other numbers")
    contestants = gather(folders, runtimes)
    if baseline:
        labels = [contestant.label for contestant in contestants]
        check_name("benchmark: expected baseline", baseline, labels)
    if contexts is None:
        limit = min(contestant.manifest.max_positions for contestant in contestants)
        contexts = [min(CONTEXTS[0], limit), *CONTEXTS[1:]]
    steps = all(contestant.manifest.states for contestant in contestants)
    cached = usable(contexts if steps else (), contestants)
    prefilled = usable(contexts if prompts is None else prompts, contestants)
    if not cached and not prefilled:
        raise ValueError("benchmark: expected a context or a prompt to measure, got none; give one")
    names = [*(contestant.label for contestant in contestants), "limits"]
    with started(names, threads) as (*workers, limits_worker):
        calls = len(cached) + len(prefilled)
        measuring = Steps(progress, "measuring", rounds * calls, "rounds")
        how = (threads, batch, rounds, seconds, progress, measuring)
        measured = Measurement(contestants, workers, limits_worker, *how)
        return measured.report(cached, prefilled, baseline=baseline, command=command)
