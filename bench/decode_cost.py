"""Cost of encodings at decode: the time of one step of a block with the encoding, divided by that of the same block without, by number of cached keys.

    python -m bench.decode_cost [NAME ...] [--json bench/results/decode_cost.json]

Measured on target ort with one thread, as medians. The two blocks step in turn, so that disturbances affect both. "growth" is the time at 4096 cached keys
divided by the time at 1024: about 4 for a cost proportional to the number of keys, 16 for its square.

The file also gets the times of the attention operator alone (bench/attention_kernels.py).
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

from bench import attention_kernels
from posenc_export import block_config
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session, load
from posenc_export.shared import json_rows

CONTEXTS = (1024, 4096)
STEPS = 64
WIDTH, HEADS = 256, 8
BLOCKS = [name for name, cls in REGISTRY.items() if "causal" in cls.works_in and name != "complex_order"]  # reads token ids, which a block does not have


def session(name: str, folder: Path) -> Session:
    """Export a block of 8 heads of size 32 with the encoding, and return a session on it."""
    config = block_config(WIDTH, HEADS, max(CONTEXTS) + 2 * STEPS, encoding={"name": name})
    export(seeded(config), "ort", folder / name, verify=False)
    return load(folder / name, provider="cpu", threads=1).session()


def stepped(sessions: Sequence[Session], context: int) -> List[List[float]]:
    """Return the seconds of steps after `context` tokens for each session; the sessions step in turn."""
    x = np.random.default_rng(0).standard_normal((1, context + 2 * STEPS, WIDTH), dtype=np.float32)
    taken: List[List[float]] = [[] for _ in sessions]
    for one in sessions:
        one.reset()
        one.prefill(x[:, :context])
        one.step(x[:, context])
    for index in range(1, STEPS):
        for number, one in enumerate(sessions):
            start = time.perf_counter()
            one.step(x[:, context + index])
            taken[number].append(time.perf_counter() - start)
    return taken


def measured(name: str) -> Dict[str, Any]:
    """Return {"encoding", "steps": {context: {"microseconds", "over_nope"}}, "growth": time at the longest context divided by time at the shortest}."""
    with tempfile.TemporaryDirectory() as temporary:
        pair = [session(each, Path(temporary) / number) for number, each in (("0", "nope"), ("1", name))]
        found = {}
        for context in CONTEXTS:
            plain, own = (statistics.median(times) for times in stepped(pair, context))
            found[context] = {"microseconds": round(own * 1e6, 1), "over_nope": round(own / plain, 2)}
    growth = found[CONTEXTS[-1]]["microseconds"] / found[CONTEXTS[0]]["microseconds"]
    return {"encoding": name, "steps": {str(context): values for context, values in found.items()}, "growth": round(growth, 2)}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="registry keys of encodings (default: all)")
    parser.add_argument("--json", type=Path, help="write the rows to this file; with names, replace only their rows")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BLOCKS))
    if unknown:
        parser.error(f"names are {', '.join(BLOCKS)}, got {', '.join(unknown)}")
    before = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.names and options.json and options.json.exists() else []
    rows: Dict[str, Dict[str, Any]] = {row["encoding"]: row for row in before}
    for name in options.names or BLOCKS:
        row = rows[name] = measured(name)
        steps = "  ".join(f"{context}: {step['microseconds']:8.1f} us, {step['over_nope']:5.2f} of nope" for context, step in row["steps"].items())
        print(f"{name:20} {steps}  growth {row['growth']:.2f}", flush=True)
    if options.json:
        how = {"width": WIDTH, "heads": HEADS, "target": "ort", "threads": 1}
        kernels = attention_kernels.measured(HEADS, WIDTH // HEADS, max(CONTEXTS))
        found = {**how, "kernels": kernels, "rows": [rows[name] for name in BLOCKS if name in rows]}
        json_rows.write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
