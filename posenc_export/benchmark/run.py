"""The measurement: contestants in turn, disturbed samples redone, until every context has its rounds."""

import os
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from posenc_export.benchmark.contestants import Contestant, gather, usable
from posenc_export.benchmark.disturbance import Reading, disturbed
from posenc_export.benchmark.limits import share_of_limit, step_bytes
from posenc_export.benchmark.report import Loaded, Report, Row
from posenc_export.benchmark.spread import spread
from posenc_export.benchmark.workers import Worker, crew

PREFILL_LIMIT = 3.0  # seconds; a longer prompt is prefilled for decoding, not timed
DECODE_SHARE = 0.4  # of the budget; the rest is for prefill and redone samples
Progress = Callable[[str], None]


class Samples:
    """Samples of one contestant. A disturbed sample is measured again, at most `patience` times in all, and kept after that."""

    def __init__(self, patience: int, cores: int) -> None:
        self.seconds: List[float] = []
        self.redone = self.left = 0
        self.patience, self.cores = patience, cores

    def take(self, ask: Callable[[], Dict[str, Any]], clock: Dict[str, float]) -> None:
        """clock["spin"]: quickest reference loop so far, over all contestants."""
        while True:
            reply = ask()
            reading = Reading(**reply["reading"])
            clock["spin"] = min(clock.get("spin", reading.spin), reading.spin)
            bad = disturbed(reading, clock["spin"], self.cores)
            if not bad or self.redone >= self.patience:
                break
            self.redone += 1
        self.left += bad
        self.seconds += reply["seconds"]


def run(
    folders: Sequence[Union[str, Path]],
    runtimes: Sequence[str] = ("eager",),
    contexts: Sequence[int] = (128, 1024, 8192),
    rounds: int = 10,
    threads: int = 2,
    seconds: float = 1.5,
    progress: Optional[Progress] = None,
) -> Report:
    """Time prefill and decode of one row.

    Args:
        folders: artefacts; each runs on the CPU, and on CUDA where the machine and the artefact can.
        runtimes: "eager", "torch.compile": the same config built anew with random weights.
        contexts: tokens; those beyond the model's range are left out.
        rounds: samples per contestant, context and phase; a long prefill gets fewer.
        seconds: time per contestant and context, prefill of the context not counted.
        progress: called with one line at each stage.

    Raises:
        ValueError: no or unequal folders, no usable context, a contestant that fails.
    """
    if rounds < 1 or threads < 1 or seconds <= 0:
        raise ValueError(f"benchmark: expected rounds, threads and seconds above 0, got {rounds}, {threads} and {seconds}; give larger ones")
    contestants = gather(folders, runtimes)
    lengths = usable(contexts, contestants)
    say = progress or (lambda line: None)
    with crew([c.label for c in contestants] + ["bandwidth"], threads) as workers:
        *racers, meter = workers
        loads = [_load(c, w, threads, say) for c, w in zip(contestants, racers, strict=True)]
        clock: Dict[str, float] = {}
        rows: List[Row] = []
        for context in lengths:
            say(f"context {context}: {len(contestants)} contestants, {rounds} rounds")
            rows += _at_context(contestants, racers, meter, context, rounds, seconds, clock)
        loaded = [_loaded(c, reply, w.ask("memory")["peak"]) for c, w, reply in zip(contestants, racers, loads, strict=True)]
    return Report(loaded, rows, threads, os.cpu_count() or 1)


def _load(contestant: Contestant, worker: Worker, threads: int, say: Progress) -> Dict[str, Any]:
    say(f"load {contestant.label}")
    return worker.ask("load", runtime=contestant.runtime, folder=str(contestant.folder), provider=contestant.provider, threads=threads)


def _loaded(contestant: Contestant, reply: Dict[str, Any], peak: int) -> Loaded:
    return Loaded(contestant.label, contestant.runtime, contestant.manifest.target, contestant.provider, reply["load"], reply["warm_up"], peak)


def _at_context(contestants: List[Contestant], racers: List[Worker], meter: Worker, context: int, rounds: int, seconds: float, clock: Dict[str, float]) -> List[Row]:
    """Prefill in turns, then decode in turns, then rows."""
    cores = os.cpu_count() or 1
    first = [_first_prefill(worker, context) for worker in racers]
    budget = seconds * (1 - DECODE_SHARE) / 2
    wanted = [0 if t > PREFILL_LIMIT else max(1, min(rounds, int(budget / t))) for t in first]
    prefills = [Samples(max(1, count // 2), cores) for count in wanted]
    for turn in range(max(wanted)):
        for worker, samples, count in zip(racers, prefills, wanted, strict=True):
            if turn < count:
                samples.take(lambda w=worker: w.ask("prefill", context=context), clock)  # type: ignore[misc]
    duration = seconds * DECODE_SHARE / rounds
    decodes = [Samples(rounds, cores) for _ in racers]
    sizes = [step_bytes(c.manifest, context) for c in contestants]
    reads = {size: Samples(rounds, cores) for size in sizes}
    for turn in range(rounds):
        for worker, samples in zip(racers, decodes, strict=True):
            fresh = iter([turn == 0])
            samples.take(lambda w=worker, f=fresh: w.ask("decode", context=context, duration=duration, fresh=next(f, False)), clock)  # type: ignore[misc]
        for size, samples in reads.items():
            samples.take(lambda s=size: meter.ask("bandwidth", bytes=s, duration=duration), clock)  # type: ignore[misc]
    return _rows(contestants, context, prefills, decodes, {size: size / spread(samples.seconds).median for size, samples in reads.items()}, sizes)


def _first_prefill(worker: Worker, context: int) -> float:
    """Seconds; asked again where it is over the limit, since torch.compile may have compiled for a new length."""
    seconds: float = worker.ask("prefill", context=context)["seconds"][0]
    return seconds if seconds <= PREFILL_LIMIT else min(seconds, worker.ask("prefill", context=context)["seconds"][0])


def _rows(contestants: List[Contestant], context: int, prefills: List[Samples], decodes: List[Samples], bandwidths: Dict[int, float], sizes: List[int]) -> List[Row]:
    """bandwidths: bytes per second, by the size of what is read."""
    rows = []
    for phase, taken in (("decode", decodes), ("prefill", prefills)):
        medians = [spread(s.seconds).median for s in taken if s.seconds]
        for contestant, samples, size in zip(contestants, taken, sizes, strict=True):
            if not samples.seconds:
                continue
            found = spread(samples.seconds)
            share = share_of_limit(size, found.median, bandwidths[size]) if phase == "decode" and contestant.provider == "cpu" else None
            moved, bandwidth = (size, bandwidths[size]) if share is not None else (None, None)
            rows.append(Row(phase, context, contestant.label, found, found.median / min(medians), moved, bandwidth, share, samples.redone, samples.left))
    return rows
