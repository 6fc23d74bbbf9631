"""docs/decode.md: a chart of the results of bench/decode_cost.py."""

from typing import Any, Dict, List, Mapping

from bench.marked import text
from posenc_export.catalogue.waves import COLOURS


def page(cost: Mapping[str, Any]) -> str:
    """The page, as Markdown. cost: bench/results/decode_cost.json."""
    contexts, rows = list(cost["plain_microseconds"]), cost["rows"]
    plain = cost["plain_microseconds"].items()
    return text("decode").format(
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
