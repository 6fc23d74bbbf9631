"""What an encoding costs at decode: one step of a block with it against the same block without any, by the number of cached keys.

    python -m bench.decode_cost [NAME ...] [--json bench/results/decode_cost.json]

Target ort, one thread. The two blocks step in turn, so that what disturbs the machine disturbs both; medians. A cost that grows with the square of the
cached keys would show as a step sixteen times as long at four times the keys.
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
from posenc_export.encodings import REGISTRY
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session, load

CONTEXTS = (1024, 4096)
STEPS = 64
WIDTH, HEADS = 256, 8
BLOCKS = [name for name, cls in REGISTRY.items() if "causal" in cls.works_in and name != "complex_order"]  # which acts on token ids


def session(name: str, folder: Path) -> Session:
    """A block of 8 heads of 32 with the encoding, ready to run."""
    config = block_config(WIDTH, HEADS, max(CONTEXTS) + 2 * STEPS, encoding={"name": name})
    export(seeded(config), "ort", folder / name, verify=False)
    return load(folder / name, provider="cpu", threads=1).session()


def stepped(sessions: Sequence[Session], context: int) -> List[List[float]]:
    """Seconds of each of STEPS steps behind `context` tokens, of the sessions in turn."""
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
    """{"encoding", "steps": {context: {"microseconds", "over_nope"}}, "growth": of the step from the shortest context to the longest}."""
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
    parser.add_argument("names", nargs="*", metavar="NAME", help="registry keys; all of them where none is given")
    parser.add_argument("--json", type=Path, help="write the rows there; with names, in place of those that it has of them")
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
        options.json.write_text(json.dumps({**how, "rows": [rows[name] for name in BLOCKS if name in rows]}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
