"""Restoring a saved session beside reading its tokens again.

    python -m bench.saved ARTEFACT [--tokens 1000] [--capacity 2048] [--rounds 3] [--threads 2]

The file is read from the memory of the operating system. Both take turns; the ratio is the median of their quotients. A larger capacity takes longer: where numpy asks
for huge pages, the first tokens of each head touch 2 MB.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Sequence

import numpy as np

from posenc_export.runtime import load


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="ARTEFACT")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    model = load(options.folder, provider="cpu", threads=options.threads)
    ids = np.random.default_rng(0).integers(0, model.manifest.vocabulary, (1, options.tokens))
    read, restored = [], []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "saved"
        for _ in range(options.rounds):
            begun = time.perf_counter()
            session = model.session(capacity=options.capacity)
            session.prefill(ids, logits_to_keep=1)
            read.append(time.perf_counter() - begun)
            session.save(file, ids)
            begun = time.perf_counter()
            model.restore(file, capacity=options.capacity)
            restored.append(time.perf_counter() - begun)
        size = file.stat().st_size
    ratios = [one / other for one, other in zip(restored, read, strict=True)]
    milliseconds = (
        f"{statistics.median(restored) * 1e3:.0f} ms against {statistics.median(read) * 1e3:.0f} ms"
    )
    print(
        f"{options.tokens} tokens, {size / 1e6:.1f} MB: {milliseconds}, ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
