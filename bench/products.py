"""Products with weights in few bits: MatMulNBits of packages/kernels beside that of ONNX Runtime.

    python -m bench.products [--threads 2] [--write]

Both take turns in one process; each reads WEIGHTS bytes of weights in copies, as a step does, whose
layers have weights of their own. Times are the shortest of the rounds, which other programs disturb
least. --write keeps the results and puts the table into docs/runtimes/native.md.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from bench import json_rows, marked
from bench.native import session_of
from bench.timing import CLOCKS, in_turn, seconds
from posenc_export.runtime.graphs.kernel_library import DOMAIN, PRODUCT
from posenc_export.runtime.graphs.onnx_nodes import Nodes
from posenc_export.runtime.graphs.onnx_parts import constant, new_node, serialised

PAGE, RESULTS = Path("docs/runtimes/native.md"), Path("bench/results/products.json")
DOMAINS = ("com.microsoft", DOMAIN)
SIZES = ((576, 1536), (1536, 576), (2048, 5632))  # inputs and outputs: SmolLM2-135M, a 1 B model
FORMATS = ((4, 32), (4, 128), (8, 32))  # bits, inputs of a block
ROWS, ROUNDS, WEIGHTS = (1, 4, 16, 128), 15, 6e7


def opened(domain: str, size: tuple[int, int], bits: int, block: int, threads: int) -> Any:
    """Return a session with copies of a product, each with weights of its own."""
    inputs, outputs = size
    copies = max(2, int(WEIGHTS * 8 / bits / inputs / outputs))
    random, graph = np.random.default_rng(0), Nodes(opsets={"": 21, domain: 1})
    nodes = []
    for copy in range(copies):
        codes = random.integers(
            0, 256, (outputs, -(-inputs // block), block * bits // 8), dtype=np.uint8
        )
        named = {f"w{copy}": codes, f"s{copy}": np.full(codes.shape[:2], 0.01, np.float32)}
        graph.constants |= {name: constant(name, array) for name, array in named.items()}
        known = {"K": inputs, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": 4}
        nodes.append(new_node(PRODUCT, ["x", *named], [f"y{copy}"], known, domain))
    results = [node.outputs[0] for node in nodes]
    return copies, session_of(serialised(graph, nodes, results, free={"x": "float"}), threads)


def measured(size: tuple[int, int], bits: int, block: int, threads: int) -> list[dict[str, Any]]:
    """Return a row for each number of rows of activations."""
    sessions = [opened(domain, size, bits, block, threads) for domain in DOMAINS]
    rows = []
    for count in ROWS:
        x, calls = np.random.default_rng(count).standard_normal((count, size[0]), np.float32), {}
        for domain, (_, session) in zip(DOMAINS, sessions, strict=True):
            run = partial(session.run, None, {"x": x})
            calls[domain] = partial(seconds, run, CLOCKS[threads > 1])
        times = in_turn(calls, ROUNDS if count < 128 else 5)
        us = {name: round(min(t) / sessions[0][0] * 1e6, 1) for name, t in times.items()}
        rows.append({"size": size, "bits": bits, "block": block, "rows": count, "microseconds": us})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return ratios of times, and those of several rows to one row."""
    lines, heads = [], ["1 row", *(f"{n} rows" for n in ROWS[1:])]
    for at in range(0, len(rows), len(ROWS)):
        part = rows[at : at + len(ROWS)]
        shipped, own = ([row["microseconds"][name] for row in part] for name in DOMAINS)
        ratios = [f"{b / a:.2f}" for a, b in zip(shipped, own, strict=True)]
        steps = ", ".join(f"{time / own[0]:.1f}" for time in own[1:])
        name = f"{part[0]['size'][0]} to {part[0]['size'][1]}, {part[0]['bits']} bits"
        lines.append([f"{name} in blocks of {part[0]['block']}", f"{own[0]:.0f}", *ratios, steps])
    more = ", ".join(map(str, ROWS[1:]))
    return marked.markdown(["product", "us, 1 row", *heads, f"{more} rows over 1"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        for bits, block in FORMATS:
            rows += measured(size, bits, block, options.threads)
            print(table(rows).splitlines()[-1], flush=True)
    if options.write:
        json_rows.write(RESULTS, rows)
        marked.replace(PAGE, "products", table(rows) + "\n")


if __name__ == "__main__":
    main()
