"""Throughput of `posenc serve` by number of clients, with requests decoded as a batch and one after
the other.

    python -m bench.serve [--json bench/results/serve.json]

Two servers run for each model, with `--rows 16` and `--rows 1`, and one thread per operator.
Clients on the loopback interface send prompts of different lengths and read streams. The servers
are measured in turn, so that disturbances affect both; results are medians over rounds.
"""

import argparse
import http.client
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import numpy as np
import onnxruntime

from bench.timing import in_turn, seconds
from posenc_export import block_config, decoder_config
from posenc_export.export import export
from posenc_export.models.presets import PRESETS, seeded
from posenc_export.shared import json_rows

CLIENTS, ROWS, ROUNDS = (1, 4, 16), (16, 1), 3
TOKENS, LONGEST = 48, 96  # tokens of a continuation, most tokens of a prompt
MODELS = {
    "tiny-rope, 1.0 M weights": PRESETS["tiny-rope"],
    "rope, 4 layers, width 512, 11 M weights": decoder_config(
        256, 4, 1408, block_config(512, 8, 2048, kv_heads=2, encoding={"name": "rope"})
    ),
}


class Answer(NamedTuple):
    """Times of one stream.

    Args:
        first: seconds from the request to the first token.
        between: mean seconds between tokens.
        tokens: number of tokens.
    """

    first: float
    between: float
    tokens: int


def ask(port: int, prompt: List[int]) -> Answer:
    """Send a request, read its stream to the end, and return the times."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    body |= {"stream": True, "return_token_ids": True}
    start, first, tokens = time.perf_counter(), 0.0, 0
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            tokens += len(json.loads(line[6:])["choices"][0]["token_ids"])
            first = first or time.perf_counter()
    connection.close()
    return Answer(first - start, (time.perf_counter() - first) / (tokens - 1), tokens)


def round_of(port: int, clients: int, seed: int) -> Dict[str, float]:
    """Run all clients once; return tokens per second, and medians of seconds as in Answer."""
    random = np.random.default_rng(seed)
    prompts = [
        random.integers(97, 123, random.integers(1, LONGEST + 1)).tolist() for _ in range(clients)
    ]
    answers: List[Answer] = []
    with ThreadPoolExecutor(clients) as pool:
        taken = seconds(lambda: answers.extend(pool.map(partial(ask, port), prompts)))
    return {
        "tokens_per_second": sum(answer.tokens for answer in answers) / taken,
        "first": statistics.median(answer.first for answer in answers),
        "between": statistics.median(answer.between for answer in answers),
    }


@contextmanager
def server(folder: Path, rows: int) -> Iterator[int]:
    """Context manager that runs a server process and returns its port."""
    command = [sys.executable, "-m", "posenc_export.commands.cli", "serve", str(folder)]
    command += f"--port 0 --rows {rows} --threads 1 --context 512 --json".split()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        yield int(json.loads(process.stdout.readline())["url"].rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()


def measured(name: str) -> List[Dict[str, Any]]:
    """Return a row for each number of clients."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export(seeded(MODELS[name]), "ort", folder, verify=False)
        with server(folder, ROWS[0]) as together, server(folder, ROWS[1]) as alone:
            for clients in CLIENTS:
                calls = {
                    "together": rounds(together, clients).__next__,
                    "alone": rounds(alone, clients).__next__,
                }
                rows.append({"model": name, "clients": clients, **_medians(in_turn(calls, ROUNDS))})
                print(rows[-1], flush=True)
    return rows


def rounds(port: int, clients: int) -> Iterator[Dict[str, float]]:
    """Yield the results of rounds, each with other prompts, which are the same for all servers."""
    return (round_of(port, clients, seed) for seed in itertools.count())


def _medians(times: Dict[str, List[Dict[str, float]]]) -> Dict[str, Any]:
    pairs = zip(times["together"], times["alone"], strict=True)
    ratios = [both["tokens_per_second"] / alone["tokens_per_second"] for both, alone in pairs]
    median = {
        key: statistics.median(turn[key] for turn in times["together"])
        for key in ("tokens_per_second", "first", "between")
    }
    return {
        "tokens_per_second": round(median["tokens_per_second"]),
        "over_one_row": round(statistics.median(ratios), 2),
        "first_token_ms": round(1e3 * median["first"], 1),
        "between_tokens_ms": round(1e3 * median["between"], 2),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    rows = [row for name in MODELS for row in measured(name)]
    if options.json:
        how = {"rows": ROWS[0], "tokens": TOKENS, "longest_prompt": LONGEST, "rounds": ROUNDS}
        how |= {"cores": os.cpu_count(), "threads": 1}
        versions = {"machine": platform.machine(), "onnxruntime": onnxruntime.__version__}
        json_rows.write(options.json, {**how, **versions, "results": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
