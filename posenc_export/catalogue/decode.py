"""docs/decode.md: a chart and a table of the results of bench/decode_cost.py."""

from typing import Any, Dict, List, Mapping, Sequence

from posenc_export.catalogue.waves import COLOURS

HOW = """## How it was measured

A block of width {width} with {heads} heads on target `{target}`, as processor time of {threads} thread. All encodings are measured in one run: in each of
{rounds} rounds, every block takes steps in turn with the block without an encoding, which gives one ratio. The table has medians of these ratios, with the
95 % confidence interval of a bootstrap over the rounds. `nope` compares the block without an encoding with itself: its interval shows what other processes do to
a ratio. A step of that block took {times}.
Written by `python -m bench.decode_cost` and `python -m posenc_export.catalogue.pages`.
"""
WHY = """## What the attention operator costs

An encoding can need more of the attention operator. These are times of GroupQueryAttention alone, as a graph with one node, at {keys} keys
(`bench/attention_kernels.py` of commit dc58e7a), measured in another run.

- `deberta`, `transformer_xl`, `cope`, `fox` and `fox_pair` need a bias.
- `shaw` needs a bias and the softmax as an output.
- `pope` needs heads of twice the size.
- `rope_dynamic` rotates all cached keys at each step beyond its trained length, 2048, and attends with standard operators.

| GroupQueryAttention | time | over the operator alone |
|---|---|---|
"""


def page(cost: Mapping[str, Any]) -> str:
    """The page, as Markdown; it shows the figure decode.svg of the same folder. cost is
    bench/results/decode_cost.json.
    """
    contexts = list(cost["plain_microseconds"])
    rows = _sorted(cost["rows"], contexts)
    cheap = sum(all(row["over_plain"][context][0] < 1.1 for context in contexts) for row in rows)
    lines = [
        "# Cost at decode",
        "",
        "Time of one decode step of a block, relative to the same block without an encoding, "
        "by number of cached keys.",
    ]
    lines += [
        f"{cheap} of {len(rows)} encodings add less than 10 %.",
        "",
        "![time of a step over that without an encoding](decode.svg)",
        "",
    ]
    heads = " | ".join(f"{context} keys | interval" for context in contexts)
    lines += [f"| encoding | {heads} |", "|---|" + "---|---|" * len(contexts)]
    for row in reversed(rows):
        cells = (
            f"{median:.2f} | {low:.2f} .. {high:.2f}"
            for median, low, high in (row["over_plain"][context] for context in contexts)
        )
        lines.append(
            f"| [{row['encoding']}](encodings/{row['encoding']}.md) | {' | '.join(cells)} |"
        )
    times = " and ".join(
        f"{microseconds:.0f} us with {context} keys"
        for context, microseconds in cost["plain_microseconds"].items()
    )
    kernels = (
        f"| {row['use']} | {row['microseconds']:.0f} us | {row['over_alone']:.2f} |"
        for row in cost["kernels"]
    )
    return "\n".join(
        [
            *lines,
            "",
            WHY.format(keys=contexts[-1]) + "\n".join(kernels),
            "",
            HOW.format(**cost, times=times),
        ]
    )


def _sorted(rows: Sequence[Dict[str, Any]], contexts: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the rows by their ratios, cheapest first."""
    return sorted(rows, key=lambda row: sum(row["over_plain"][context][0] for context in contexts))


def figure(cost: Mapping[str, Any]) -> Any:
    """A matplotlib figure: a bar for each encoding and number of keys, most expensive at the
    top, with its interval as a line.
    """
    from matplotlib.figure import Figure

    contexts = list(cost["plain_microseconds"])
    rows = _sorted(cost["rows"], contexts)
    drawing = Figure(figsize=(7.2, 0.19 * len(rows) + 1), layout="constrained")
    axes = drawing.add_subplot()
    for index, context in enumerate(contexts):
        places = [
            number + (0.5 - (index + 0.5) / len(contexts)) * 0.8 for number in range(len(rows))
        ]
        medians, lows, highs = zip(*(row["over_plain"][context] for row in rows), strict=True)
        axes.barh(
            places,
            medians,
            height=0.8 / len(contexts),
            color=COLOURS[index],
            label=f"{context} cached keys",
        )
        axes.hlines(places, lows, highs, color="#222222", linewidth=0.8)
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["encoding"] for row in rows], fontsize=7)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.tick_params(axis="x", labelsize=8, labeltop=True)
    axes.set_xlabel("time of a step, over the block without an encoding", fontsize=8)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    return drawing
