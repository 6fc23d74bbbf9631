"""Prove the claims on positions of every encoding, on each target that runs on CPUs, in both
signatures and with every visibility.

    python -m bench.claims [--only NAME ...] [--target NAME ...] [--write]

--only and --target keep the rows of others. --write keeps the results and puts the table into
docs/proof-results.md.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Iterator, Sequence

from msgspec.structs import replace

from bench import json_rows, marked
from posenc_export.encodings import REGISTRY
from posenc_export.export import TARGETS as OF_EXPORT
from posenc_export.export import Sources, export
from posenc_export.models.presets import seeded
from posenc_export.runtime import load
from posenc_export.runtime.verification import checks
from posenc_export.runtime.verification.claims import OPEN

PAGE, RESULTS = Path("docs/proof-results.md"), Path("bench/results/claims.json")
TARGETS = ("onnx", "onnx-static", "ort", "ort-native", "pt2")
SEEN = {
    "causal": {"name": "causal"},
    "window": {"name": "window", "size": 9},
    "chunk": {"name": "chunk", "size": 12},
    "both": {"name": "both"},
    "near": {"name": "near", "reach": 4},
    "sinks": {"name": "window", "size": 9},  # and a column of sinks
}
LONG = 540  # positions for which caches of windows are shorter than others


def models(name: str) -> Iterator[tuple[str, Any]]:
    """Yield what the queries of a tiny model with an encoding see, and its description."""
    from tests.tiny import decoder, encoder, works

    causal = works(name, "causal")
    for sees in ("causal", "window", "chunk", "sinks") if causal else ("both", "near"):
        config = decoder(name, max_positions=LONG) if causal else encoder(name)
        how: dict[str, Any] = {"sees": SEEN[sees], "sinks": sees == "sinks"}
        layers = config.layers.items()
        kinds = {name: replace(of, attention=replace(of.attention, **how)) for name, of in layers}
        yield sees, replace(config, layers=kinds)


def measured(name: str, targets: Sequence[str] = TARGETS) -> Iterator[dict[str, Any]]:
    """Yield one row for each artefact of an encoding."""
    for sees, config in models(name):
        try:
            sources = Sources(seeded(config))
        except ValueError as error:  # encodings that compute scores themselves take no sinks
            yield {"encoding": name, "sees": sees, "refused": str(error)}
            continue
        for target in targets:
            for signature in OF_EXPORT[target].layout:
                row = {"encoding": name, "sees": sees, "target": target, "signature": signature}
                yield row | _proved(sources, target, signature)


def _proved(sources: Sources, target: str, signature: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx warns at every export
        folder = Path(temporary) / "artefact"
        try:
            export(sources, target, folder, signature=signature, verify=False)
        except ValueError as error:
            return {"refused": str(error)}
        begin = time.process_time()
        check = checks.indices(folder, load(folder, threads=1))
    left = {place: why for place, why in check.skipped.items() if why.startswith(OPEN)}
    seconds = round(time.process_time() - begin, 3)
    return {"proved": check.compared, "open": left, "wrong": check.failures, "seconds": seconds}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table with a line for each encoding, and a column for each target."""
    targets, lines = [t for t in TARGETS if any(row.get("target") == t for row in rows)], []
    for name in dict.fromkeys(row["encoding"] for row in rows):
        own = [row for row in rows if row["encoding"] == name and "proved" in row]
        by_target = [[row for row in own if row["target"] == target] for target in targets]
        reasons = {why for row in own for why in row["open"].values()}
        texts = sorted(why.removeprefix(OPEN) for why in reasons)
        lines.append([name, *map(_cell, by_target), "; ".join(texts)])
    return marked.markdown(["encoding", *targets, "why not"], lines)


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    proved, left = sum(r["proved"] for r in rows), sum(len(r["open"]) for r in rows)
    wrong, slowest = sum(len(r["wrong"]) for r in rows), max(r["seconds"] for r in rows)
    others = f", {left} not" if left else ""
    return f"{proved}{others}{f', {wrong} wrong' if wrong else ''} ({slowest:.2f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=sorted(REGISTRY), metavar="NAME")
    parser.add_argument("--target", action="append", choices=TARGETS, metavar="NAME")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    chosen, targets = options.only or sorted(REGISTRY), options.target or TARGETS
    rows = [
        r
        for r in json_rows.read(RESULTS, [])
        if r["encoding"] not in chosen or r.get("target", targets[0]) not in targets
    ]
    for name in chosen:
        rows += measured(name, targets)
        print(table([row for row in rows if row["encoding"] == name]).splitlines()[-1], flush=True)
    rows.sort(key=lambda row: str(row["encoding"]))
    if options.write:
        json_rows.write(RESULTS, rows)
        marked.replace(PAGE, "claims", table(rows) + "\n")


if __name__ == "__main__":
    main()
