"""Cost of encodings at decode: the time of one step of a block with the encoding, relative to the
same block without one, by number of cached keys; and docs/decode.md, a chart of the results.

    python -m bench.decode_cost [NAME ...] [--target ort]

The results of all encodings on the default target are kept. Each encoding takes turns with the
block without one in a benchmark of both, on one thread each, so that its ratio does not depend on
what the machine did between two encodings.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence

from bench import json_rows, marked
from posenc_export import benchmark, block_config
from posenc_export.benchmark.ratios import ratios
from posenc_export.benchmark.worker import BURST
from posenc_export.catalogue.waves import COLOURS
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.models.presets import seeded

CONTEXTS = (1024, 4096)
ROUNDS, TARGET, RESULTS = 9, "ort", Path("bench/results/decode_cost.json")
WIDTH, HEADS = 256, 8
PLAIN = "nope"
# complex_order reads token ids, which a block does not have.
BLOCKS = [name for name, cls in REGISTRY.items() if "causal" in cls.works_in]
BLOCKS.remove("complex_order")


def exported(name: str, target: str, folder: Path) -> Path:
    """Export a block of 8 heads of size 32 with the encoding, and return its folder."""
    config = block_config(WIDTH, HEADS, max(CONTEXTS) + BURST, encoding={"name": name})
    export(seeded(config), target, folder, verify=False)
    return folder


def measured(names: Sequence[str], target: str) -> dict[str, Any]:
    """{"plain_microseconds": by context, "rows": [{"encoding", "over_plain": by context}]}."""
    alone: dict[str, list[float]] = {str(context): [] for context in CONTEXTS}
    how: dict[str, Any] = {"contexts": CONTEXTS, "prompts": (), "threads": 1, "rounds": ROUNDS}
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        plain = exported(PLAIN, target, Path(temporary) / "plain")
        for name in names:
            folders = [plain, exported(name, target, Path(temporary) / name)]
            measurement = benchmark.run(folders, baseline="plain", **how).rows
            over: dict[str, list[float]] = {}
            for row, spread in zip(measurement, ratios(measurement, "plain"), strict=True):
                if spread is None:
                    alone[str(row.tokens)].append(row.median_seconds)
                else:
                    values = (spread.median, spread.low, spread.high)
                    over[str(row.tokens)] = [round(value, 3) for value in values]
            rows.append({"encoding": name, "over_plain": over})
    medians = {context: statistics.median(taken) for context, taken in alone.items()}
    microseconds = {context: round(1e6 * median, 1) for context, median in medians.items()}
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
    rows: list[dict[str, Any]] = list(cost["rows"])
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
