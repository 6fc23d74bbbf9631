"""Cost of encodings at decode: the time of one step of a block with the encoding, relative to the
same block without one, by number of cached keys; and docs/decode.md, a chart of the results.

    python -m bench.decode_cost [NAME ...] [--target ort]

The results of all encodings on the default target are kept.

Measured as processor time of one thread, which other processes disturb less than the clock. In
each of ROUNDS rounds, every block takes BURST steps in turn with the block without an encoding, and
gives one ratio of medians, which does not depend on what the machine did between two encodings.
Each block has a session without an encoding of its own: one that all share would have its cached
keys in the processor's caches more often.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence

import numpy as np

from bench import json_rows, marked
from bench.timing import in_turn, seconds
from posenc_export import block_config
from posenc_export.benchmark.ratios import ratio as ratio_of
from posenc_export.catalogue.waves import COLOURS
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import Model, Session, load

CONTEXTS = (1024, 4096)
# The first WARM steps of a burst are not timed: other blocks used the processor's caches meanwhile.
ROUNDS, BURST, WARM = 9, 20, 6
STEPS, TARGET, RESULTS = ROUNDS * BURST, "ort", Path("bench/results/decode_cost.json")
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


def measured(names: Sequence[str], target: str) -> Dict[str, Any]:
    """{"plain_microseconds": by context, "rows": [{"encoding", "over_plain": by context}]}."""
    random = np.random.default_rng(0)
    x = random.standard_normal((1, max(CONTEXTS) + STEPS, WIDTH), dtype=np.float32)
    ratios: Dict[str, Dict[str, List[float]]] = {name: {} for name in names}
    microseconds = {}
    with tempfile.TemporaryDirectory() as temporary:
        plain = loaded(PLAIN, target, Path(temporary) / "plain")
        models = {name: loaded(name, target, Path(temporary) / name) for name in names}
    pairs = {n: {"plain": plain.session(), "own": models[n].session()} for n in names}
    for context in CONTEXTS:
        for session in (session for pair in pairs.values() for session in pair.values()):
            session.reset()
            session.prefill(x[:, :context])
        parts = np.split(x[:, context : context + STEPS], ROUNDS, axis=1)
        bursts = {name: map(partial(burst, pairs[name]), parts).__next__ for name in names}
        times = in_turn(bursts, ROUNDS, warm=0)
        for name, rounds in times.items():
            ratio = ratio_of([pair["own"] for pair in rounds], [pair["plain"] for pair in rounds])
            assert ratio is not None  # ROUNDS is above its limit
            ratios[name][str(context)] = [
                round(v, 3) for v in (ratio.median, ratio.low, ratio.high)
            ]
        alone = [pair["plain"] for rounds in times.values() for pair in rounds]
        microseconds[str(context)] = round(1e6 * statistics.median(alone), 1)
    rows = [{"encoding": name, "over_plain": values} for name, values in ratios.items()]
    return {"plain_microseconds": microseconds, "rows": rows}


def page(cost: Mapping[str, Any]) -> str:
    """The page, as Markdown. cost: bench/results/decode_cost.json."""
    contexts, rows = list(cost["plain_microseconds"]), cost["rows"]
    plain = cost["plain_microseconds"].items()
    return marked.text("decode").format(
        **{key: cost[key] for key in ("width", "heads", "target", "threads", "rounds")},
        contexts=" and ".join(contexts),
        cheap=sum(all(median < 1.1 for median, _, _ in row["over_plain"].values()) for row in rows),
        count=len(rows),
        times=" and ".join(f"{time:.0f} us with {keys} keys" for keys, time in plain),
    )


def figure(cost: Mapping[str, Any]) -> Any:
    """A matplotlib figure: a bar with its interval for each encoding and number of keys."""
    from matplotlib.figure import Figure

    contexts = list(cost["plain_microseconds"])
    rows: List[Dict[str, Any]] = list(cost["rows"])
    rows.sort(key=lambda row: sum(row["over_plain"][context][0] for context in contexts))
    drawing = Figure(figsize=(7.2, 0.19 * len(rows) + 1), layout="constrained")
    axes = drawing.add_subplot()
    height = 0.8 / len(contexts)
    for index, context in enumerate(contexts):
        places = [number + 0.4 - height * (index + 0.5) for number in range(len(rows))]
        medians, lows, highs = zip(*(row["over_plain"][context] for row in rows), strict=True)
        label = f"{context} cached keys"
        axes.barh(places, medians, height=height, color=COLOURS[index], label=label)
        axes.hlines(places, lows, highs, color="#222222", linewidth=0.8)
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["encoding"] for row in rows], fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.tick_params(axis="x", labelsize=8, labeltop=True)
    axes.set_xlabel("time of a step, over the block without an encoding", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=BLOCKS, metavar="NAME")
    parser.add_argument("--target", default=TARGET, help="target of the artefacts")
    options = parser.parse_args()
    results = measured(options.names or BLOCKS, options.target)
    for row in results["rows"]:
        spreads = row["over_plain"].items()
        steps = (
            f"{n}: {median:.2f} ({low:.2f} .. {high:.2f})" for n, (median, low, high) in spreads
        )
        print(f"{row['encoding']:20} {'  '.join(steps)}", flush=True)
    if not options.names and options.target == TARGET:
        how = {"width": WIDTH, "heads": HEADS, "target": TARGET, "threads": 1, "rounds": ROUNDS}
        json_rows.write(RESULTS, {**how, **results})


if __name__ == "__main__":
    main()
