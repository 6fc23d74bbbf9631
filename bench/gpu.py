"""The CUDA provider on a machine with a GPU: verify the models of the dry run, then compare decode
and prefill times of a float16 decoder with transformers and onnxruntime-genai (packages
transformers, onnxruntime-genai-cuda).

    python -m bench.gpu --json build/gpu.json [--only parity|latency] [--kinds KIND ...]
    [--names NAME ...] [--contestants NAME ...] [--rounds N] [--minutes N] [--rehearse]

Results are written to the JSON file as they come, and to a page beside it with the suffix .md. A
call ends after --minutes; the same command again continues with what is missing. A few models, and
each round of a contestant, run in a process of their own, so that a crash or a hang ends one row.
--rehearse tries the command on the dry run of the provider (tests/cuda_dry_run), with torch on the
CPU; its times and its errors mean nothing.

Latency is measured in turn: every contestant once in each round. Results are the median of the
rounds' medians, with minimum and maximum. All contestants run the same decoder with one row: layers
of width 768 (12 of them: 124 million parameters) in float16. A step includes copying the token to
the device and the logits to the host.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np

from bench.gpu_contestants import CONTESTANTS, one_round
from bench.gpu_page import page
from bench.gpu_proofs import ARTEFACTS, models, proof
from posenc_export.export import Sources, export
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import load
from posenc_export.shared import json_rows
from posenc_export.shared.numerics import worst_error

TARGETS = ("ort-cuda", "onnx", "onnx-static")
PIECE = 240  # most seconds of one process
TOGETHER = 4  # models of one process
WORKERS = 4  # processes that verify at the same time; nothing is timed meanwhile
# The measured decoder: Llama's architecture.
LLAMA: Dict[str, Any] = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def prepare(folder: Path, layers: int) -> Dict[str, float]:
    """Write the artefacts, and a Llama checkpoint with the same weights.

    Args:
        layers: number of layers of the decoder.

    Returns:
        {"difference": largest difference between logits of the float16 onnx artefact and of the
        float32 Llama model, relative to the largest logit}.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=layers)).eval()
    llama.save_pretrained(folder / "float32")
    sources = Sources(from_pretrained(folder / "float32"))
    for target in TARGETS:
        export(sources, target, folder / target, dtype="float16", verify=False)
    tokens = torch.arange(24)[None] * 37 % LLAMA["vocab_size"]
    with torch.inference_mode():
        theirs = llama(tokens).logits.numpy()
    llama.half().save_pretrained(folder / "llama")
    ours = load(folder / "onnx", provider="cpu").session().prefill(tokens.numpy())
    return {"difference": worst_error(ours.astype(np.float32), theirs)}


class Results:
    """The rows that were measured so far, in a JSON file that is written after each.

    Args:
        path: the file. If it exists, its rows count as measured.
        minutes: after this time no further piece is started.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.values: Dict[str, Any] = {"parity": [], "latency": []}
        if path.exists():
            self.values = json.loads(path.read_text(encoding="utf-8"))

    def add(self, part: str, rows: Sequence[Dict[str, Any]]) -> None:
        """Add rows and write the file and its page."""
        self.values[part] += rows
        json_rows.write(self.path, self.values)
        self.path.with_suffix(".md").write_text(page(self.values), encoding="utf-8")
        for row in rows:
            print(json.dumps(row), file=sys.stderr, flush=True)

    def piece(self, task: str, *arguments: str) -> List[Dict[str, Any]]:
        """Run a piece in a process of its own, and return the rows that it printed; a row
        {"error"} if it failed. No rows if the time is over before it ends.
        """
        remaining = self.end - time.monotonic()
        if remaining <= 0:
            return []
        command = [sys.executable, "-W", "ignore", "-m", "bench.gpu", f"--{task}", *arguments]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, timeout=min(PIECE, remaining)
            )
        except subprocess.TimeoutExpired:
            # The next call repeats a piece that the end of this call cut short.
            return [{"error": f"no result within {PIECE} s"}] if remaining > PIECE else []
        rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        if ran.returncode:
            lines = ran.stderr.strip().splitlines()
            rows.append({"error": lines[-1][:300] if lines else f"exit status {ran.returncode}"})
        return rows


def parity(results: Results, names: Sequence[str], workers: int) -> None:
    """Verify the models that the results lack."""
    known = {row["model"] for row in results.values["parity"]}
    missing = [name for name in names if name not in known]
    groups = [missing[at : at + TOGETHER] for at in range(0, len(missing), TOGETHER)]
    with ThreadPoolExecutor(workers) as pool:
        for proofs in as_completed([pool.submit(_proofs, results, group) for group in groups]):
            results.add("parity", proofs.result())


def _proofs(results: Results, names: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the rows of some models. A process that ends early gives an error to the model that
    it was at; the next one continues after it.
    """
    rows: List[Dict[str, Any]] = []
    while names and (piece := results.piece("proof", *names)):
        counts = Counter(row.get("model") for row in piece)
        done = [name for name in names if counts[name] == len(ARTEFACTS[name.partition(":")[0]])]
        ended = names[len(done)] if len(done) < len(names) else ""
        rows += [{"model": ended, **row} if ended and "error" in row else row for row in piece]
        names = names[len(done) + 1 :]
    return rows


def latency(
    results: Results, contestants: Sequence[str], rounds: int, layers: int, rehearse: bool
) -> None:
    """Measure the rounds of contestants that the results lack."""
    wanted = [(number, name) for number in range(rounds) for name in contestants]
    known = {(row["round"], row["contestant"]) for row in results.values["latency"]}
    if known.issuperset(wanted):
        return
    folder = results.path.parent / f"gpu-{layers}-layers"
    if not (folder / "prepared.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prepared.json").write_text(json.dumps(prepare(folder, layers)), encoding="utf-8")
    results.values |= json.loads((folder / "prepared.json").read_text(encoding="utf-8")) | {
        "layers": layers
    }
    for number, name in wanted:
        if (number, name) not in known:
            rows = results.piece("round", name, str(folder), *(["--rehearse"] if rehearse else []))
            results.add("latency", [{"round": number, "contestant": name, **row} for row in rows])


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, default=Path("build/gpu.json"))
    add("--only", choices=("parity", "latency"))
    several: Dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    kinds, contestants = ", ".join(ARTEFACTS), ", ".join(CONTESTANTS)
    add("--kinds", default=list(ARTEFACTS), choices=list(ARTEFACTS), help=kinds, **several)
    add("--names", help="models, such as 'decoders: rope' (default: all of --kinds)", **several)
    add("--contestants", default=CONTESTANTS, choices=CONTESTANTS, help=contestants, **several)
    add("--rounds", type=int, default=5)
    add("--minutes", type=float, default=8.0, help="start nothing after this time (default: 8)")
    add("--layers", type=int, default=12, help="layers of the measured decoder (default: 12)")
    add("--rehearse", action="store_true", help="time wrong outputs too, for the dry run")
    add("--workers", type=int, default=WORKERS, help="processes that verify at the same time")
    add("--proof", nargs="+", help=argparse.SUPPRESS)
    add("--round", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    if options.proof:
        for row in itertools.chain.from_iterable(map(proof, options.proof)):
            print(json.dumps(row), flush=True)
        return 0
    if options.round:
        print(json.dumps(one_round(options.round[0], Path(options.round[1]), options.rehearse)))
        return 0
    options.json.parent.mkdir(parents=True, exist_ok=True)
    results = Results(options.json, options.minutes)
    results.values |= {"rehearsal": True} if options.rehearse else {}
    if options.only != "latency":
        of_kinds = [name for name, (kind, _) in models().items() if kind in options.kinds]
        parity(results, options.names or of_kinds, options.workers)
    if options.only != "parity":
        latency(results, options.contestants, options.rounds, options.layers, options.rehearse)
    if time.monotonic() > results.end:
        print("The time is over. Run the same command again to continue.", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
