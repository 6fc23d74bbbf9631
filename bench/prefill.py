"""Cost of a prompt by chunk size, and by the number of logits that are kept.

    python -m bench.prefill [--tokens 1024] [--layers 12] [--json bench/results/prefill.json]

Measured on target ort with one thread, in CPU seconds, which other processes disturb less than wall time. Chunks: a decoder of width 768 and 12 heads with a
vocabulary of 32000 (134 million parameters with 12 layers); medians, chunk sizes and encodings in turn. Logits: a decoder of width 64 with a vocabulary of
128256 and a prompt of 1500 tokens, one process per case, with the increase of the largest resident memory.
"""

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from posenc_export import block_config, decoder_config
from posenc_export.benchmark.worker import peak_bytes
from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.runtime import Session, load
from posenc_export.shared import json_rows

ENCODINGS = ("rope", "alibi", "t5", "nope")
CHUNKS = (64, 128, 256, 512, 1024)
ROUNDS = 4  # including one that is not counted
VOCABULARY, LARGE_VOCABULARY, PROMPT = 32000, 128256, 1500


def by_chunk(tokens: int, layers: int) -> List[Dict[str, Any]]:
    """Return a row for every encoding and chunk size.

    Rows are {"encoding", "chunk", "seconds", "over_rope": ratio to rope with the same chunk size, "over_best": ratio to the encoding's best chunk size}.
    """
    times: Dict[Tuple[str, int], List[float]] = {
        (name, chunk): [] for name in ENCODINGS for chunk in CHUNKS if chunk <= tokens
    }
    with tempfile.TemporaryDirectory() as folder:
        sessions = {
            name: _chunked_session(name, tokens, layers, Path(folder) / name) for name in ENCODINGS
        }
        for _ in range(ROUNDS):
            for (name, chunk), found in times.items():
                found.append(_seconds(sessions[name], VOCABULARY, tokens, chunk, 1))
    middle = {key: statistics.median(found[1:]) for key, found in times.items()}
    best = {
        name: min(seconds for (other, _), seconds in middle.items() if other == name)
        for name in ENCODINGS
    }
    rows = []
    for (name, chunk), seconds in middle.items():
        ratios = {
            "over_rope": round(seconds / middle["rope", chunk], 3),
            "over_best": round(seconds / best[name], 3),
        }
        rows.append({"encoding": name, "chunk": chunk, "seconds": round(seconds, 3), **ratios})
    return rows


def _chunked_session(name: str, tokens: int, layers: int, folder: Path) -> Session:
    block = block_config(768, 12, tokens, encoding={"name": name})
    return _opened(decoder_config(VOCABULARY, layers, 2048, block, tied=False), folder)


def by_logits() -> List[Dict[str, Any]]:
    """Return a row for all logits and one for those of the last token: {"logits_to_keep", "seconds", "bytes": increase of the largest resident memory}."""
    with tempfile.TemporaryDirectory() as folder:
        _opened(
            decoder_config(
                LARGE_VOCABULARY, 2, 176, block_config(64, 4, 2048, encoding={"name": "rope"})
            ),
            Path(folder) / "made",
        )
        rows = []
        for keep in (None, 1):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, added = pool.apply(_one_prompt, (Path(folder) / "made", keep))
            rows.append({"logits_to_keep": keep, "seconds": round(seconds, 3), "bytes": added})
        return rows


def _one_prompt(folder: Path, keep: Optional[int]) -> Tuple[float, int]:
    """Run a prompt; return its CPU seconds and the increase of the largest resident memory in bytes."""
    session = load(folder, provider="cpu", threads=1).session()
    before = peak_bytes()
    return _seconds(session, LARGE_VOCABULARY, PROMPT, None, keep), peak_bytes() - before


def _opened(config: Any, folder: Path) -> Session:
    export(seeded(config), "ort", folder, verify=False)
    return load(folder, provider="cpu", threads=1).session()


def _seconds(
    session: Session, vocabulary: int, tokens: int, chunk: Optional[int], keep: Optional[int]
) -> float:
    """Return the CPU seconds of a prompt from an empty cache."""
    prompt = np.random.default_rng(0).integers(0, vocabulary, (1, tokens))
    session.reset()
    start = time.process_time()
    session.prefill(prompt, chunk=chunk, logits_to_keep=keep)
    return time.process_time() - start


def main(arguments: Sequence[str]) -> int:
    """Print the rows, and write them to the file of --json; return exit status 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1024,
        help="tokens of the prompt for chunk sizes (default: 1024)",
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="layers of its decoder (default: 12)"
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    found = {
        "tokens": options.tokens,
        "layers": options.layers,
        "logits": by_logits(),
        "chunks": by_chunk(options.tokens, options.layers),
    }
    for row in (*found["logits"], *found["chunks"]):
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        json_rows.write(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
