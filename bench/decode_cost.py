"""Cost of encodings at decode: the time of one step of a block with the encoding, relative to the
same block without one, by number of cached keys.

    python -m bench.decode_cost [NAME ...] [--json bench/results/decode_cost.json]

Measured on target ort as processor time of one thread, which other processes disturb less than the
clock, all encodings in one run: in each of ROUNDS rounds, every block takes BURST steps in turn
with the block without an encoding, and a round gives one ratio of medians. Ratios therefore do not
depend on what the machine did between two encodings. Each block has a session without an encoding
of its own: one that all share would have its cached keys in the processor's caches more often.

The times of the attention operator alone, which the file also holds, are kept: they were measured
by bench/attention_kernels.py of commit dc58e7a.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from posenc_export import block_config
from posenc_export.benchmark.spread import ratio as ratio_of
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import Model, Session, load
from posenc_export.shared import json_rows

CONTEXTS = (1024, 4096)
# The first WARM steps of a burst are not timed: other blocks used the processor's caches meanwhile.
ROUNDS, BURST, WARM = (
    9,
    20,
    6,
)
STEPS = ROUNDS * BURST
WIDTH, HEADS = 256, 8
PLAIN = "nope"
BLOCKS = [
    name for name, cls in REGISTRY.items() if "causal" in cls.works_in and name != "complex_order"
]  # reads token ids, which a block does not have


def loaded(name: str, folder: Path) -> Model:
    """Export a block of 8 heads of size 32 with the encoding, and load it."""
    config = block_config(WIDTH, HEADS, max(CONTEXTS) + STEPS, encoding={"name": name})
    export(seeded(config), "ort", folder, verify=False)
    return load(folder, provider="cpu", threads=1)


def burst(plain: Session, own: Session, x: np.ndarray, start: int) -> List[float]:
    """Step both sessions in turn over the tokens from `start` on; return the median seconds of a
    step of each.
    """
    taken: List[List[float]] = [[], []]
    for token in range(start, start + BURST):
        for times, one in zip(taken, (plain, own), strict=True):
            begin = time.thread_time()
            one.step(x[:, token])
            times.append(time.thread_time() - begin)
    return [statistics.median(times[WARM:]) for times in taken]


def measured(names: Sequence[str]) -> Dict[str, Any]:
    """Return {"plain_microseconds": {context: time of a step without an encoding}, "rows":
    [{"encoding", "over_plain": {context: [median, low, high]}}]}.
    """
    x = np.random.default_rng(0).standard_normal(
        (1, max(CONTEXTS) + STEPS, WIDTH), dtype=np.float32
    )
    found: Dict[str, Dict[str, List[float]]] = {name: {} for name in names}
    microseconds = {}
    with tempfile.TemporaryDirectory() as temporary:
        plain, *models = (
            loaded(name, Path(temporary) / str(number))
            for number, name in enumerate((PLAIN, *names))
        )
        pairs_of = {
            name: (plain.session(), model.session())
            for name, model in zip(names, models, strict=True)
        }
        for context in CONTEXTS:
            for one in (one for pair in pairs_of.values() for one in pair):
                one.reset()
                one.prefill(x[:, :context])
            times: Dict[str, List[List[float]]] = {name: [] for name in names}
            for start in range(context, context + STEPS, BURST):
                for name, (without, own) in pairs_of.items():
                    times[name].append(burst(without, own, x, start))
            for name, pairs in times.items():
                ratio = ratio_of([own for _, own in pairs], [alone for alone, _ in pairs])
                assert ratio is not None  # ROUNDS is above its limit
                found[name][str(context)] = [
                    round(ratio.median, 3),
                    round(ratio.low, 3),
                    round(ratio.high, 3),
                ]
            microseconds[str(context)] = round(
                1e6 * statistics.median(pair[0] for pairs in times.values() for pair in pairs), 1
            )
    return {
        "plain_microseconds": microseconds,
        "rows": [{"encoding": name, "over_plain": ratios} for name, ratios in found.items()],
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="registry keys of encodings (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write the results of all encodings to this file")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BLOCKS))
    if unknown:
        parser.error(f"names are {', '.join(BLOCKS)}, got {', '.join(unknown)}")
    if options.names and options.json:
        parser.error("--json needs a run of all encodings, got names; omit one of them")
    found = measured(options.names or BLOCKS)
    for row in found["rows"]:
        steps = "  ".join(
            f"{context}: {median:.2f} ({low:.2f} .. {high:.2f})"
            for context, (median, low, high) in row["over_plain"].items()
        )
        print(f"{row['encoding']:20} {steps}", flush=True)
    if options.json:
        how = {"width": WIDTH, "heads": HEADS, "target": "ort", "threads": 1, "rounds": ROUNDS}
        kernels = json.loads(options.json.read_text(encoding="utf-8"))["kernels"]
        json_rows.write(options.json, {**how, "kernels": kernels, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
