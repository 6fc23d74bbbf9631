"""Cost of encodings at decode: the time of one step of a block with the encoding, relative to the
same block without one, by number of cached keys.

    python -m bench.decode_cost [NAME ...] [--target ort] [--json bench/results/decode_cost.json]

Measured as processor time of one thread, which other processes disturb less than the
clock, all encodings in one run: in each of ROUNDS rounds, every block takes BURST steps in turn
with the block without an encoding, and a round gives one ratio of medians. Ratios therefore do not
depend on what the machine did between two encodings. Each block has a session without an encoding
of its own: one that all share would have its cached keys in the processor's caches more often.

The times of the attention operator alone, which the file of ort also holds, are kept: they were
measured by bench/attention_kernels.py of commit dc58e7a.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import numpy as np

from bench.timing import in_turn, seconds
from posenc_export import block_config
from posenc_export.benchmark.verdicts import ratio as ratio_of
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import Model, Session, load
from posenc_export.shared import json_rows

CONTEXTS = (1024, 4096)
# The first WARM steps of a burst are not timed: other blocks used the processor's caches meanwhile.
ROUNDS, BURST, WARM = 9, 20, 6
STEPS = ROUNDS * BURST
WIDTH, HEADS = 256, 8
PLAIN = "nope"
# complex_order reads token ids, which a block does not have.
BLOCKS = [name for name, cls in REGISTRY.items() if "causal" in cls.works_in]
BLOCKS.remove("complex_order")


def loaded(name: str, target: str, folder: Path) -> Model:
    """Export a block of 8 heads of size 32 with the encoding, and load it."""
    config = block_config(WIDTH, HEADS, max(CONTEXTS) + STEPS, encoding={"name": name})
    export(seeded(config), target, folder, verify=False)
    return load(folder, provider="cpu", threads=1)


def burst(sessions: Mapping[str, Session], x: np.ndarray) -> Dict[str, float]:
    """Step sessions in turn over tokens [1,BURST,E]; return the median seconds of a step."""
    places = {name: iter(range(BURST)) for name in sessions}

    def step(name: str) -> float:
        token = x[:, next(places[name])]
        return seconds(lambda: sessions[name].step(token), time.thread_time)

    calls = {name: partial(step, name) for name in sessions}
    times = in_turn(calls, BURST - WARM, warm=WARM)
    return {name: statistics.median(taken) for name, taken in times.items()}


def bursts(
    sessions: Mapping[str, Session], parts: Sequence[np.ndarray]
) -> Iterator[Dict[str, float]]:
    """Yield the seconds of bursts over consecutive tokens."""
    return (burst(sessions, part) for part in parts)


def measured(names: Sequence[str], target: str) -> Dict[str, Any]:
    """{"plain_microseconds": by context, "rows": [{"encoding", "over_plain": by context}]}."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, max(CONTEXTS) + STEPS, WIDTH), dtype=np.float32)
    ratios: Dict[str, Dict[str, List[float]]] = {name: {} for name in names}
    microseconds = {}
    with tempfile.TemporaryDirectory() as temporary:
        plain = loaded(PLAIN, target, Path(temporary) / "plain")
        models = {name: loaded(name, target, Path(temporary) / name) for name in names}
        pairs = {}
        for name, model in models.items():
            pairs[name] = {"plain": plain.session(), "own": model.session()}
    for context in CONTEXTS:
        for session in (session for pair in pairs.values() for session in pair.values()):
            session.reset()
            session.prefill(x[:, :context])
        parts = np.split(x[:, context : context + STEPS], ROUNDS, axis=1)
        times = in_turn({name: bursts(pairs[name], parts).__next__ for name in names}, ROUNDS, 0)
        for name, rounds in times.items():
            ratio = ratio_of([pair["own"] for pair in rounds], [pair["plain"] for pair in rounds])
            assert ratio is not None  # ROUNDS is above its limit
            values = (ratio.median, ratio.low, ratio.high)
            ratios[name][str(context)] = [round(value, 3) for value in values]
        alone = [pair["plain"] for rounds in times.values() for pair in rounds]
        microseconds[str(context)] = round(1e6 * statistics.median(alone), 1)
    rows = [{"encoding": name, "over_plain": values} for name, values in ratios.items()]
    return {"plain_microseconds": microseconds, "rows": rows}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = "registry keys of encodings (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=what)
    parser.add_argument("--target", default="ort", help="target of the artefacts")
    parser.add_argument("--json", type=Path, help="write the results of all encodings to this file")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BLOCKS))
    if unknown:
        parser.error(f"names are {', '.join(BLOCKS)}, got {', '.join(unknown)}")
    if options.names and options.json:
        parser.error("--json needs a run of all encodings, got names; omit one of them")
    results = measured(options.names or BLOCKS, options.target)
    for row in results["rows"]:
        steps = "  ".join(
            f"{context}: {median:.2f} ({low:.2f} .. {high:.2f})"
            for context, (median, low, high) in row["over_plain"].items()
        )
        print(f"{row['encoding']:20} {steps}", flush=True)
    if options.json:
        how = {"width": WIDTH, "heads": HEADS, "target": options.target}
        how |= {"threads": 1, "rounds": ROUNDS}
        if options.json.exists():
            before = json.loads(options.json.read_text(encoding="utf-8"))
            how |= {key: before[key] for key in ("kernels",) if key in before}
        json_rows.write(options.json, {**how, **results})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
