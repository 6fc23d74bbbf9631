"""The CUDA provider on a machine with a GPU: verify the models of the dry run, then compare decode
and prefill times of a float16 decoder with transformers and onnxruntime-genai (packages
transformers, onnxruntime-genai-cuda).

    python -m bench.gpu --json build/gpu.json [--only parity|latency] [--kinds KIND ...] [--names
    NAME ...] [--workers N] [--contestants NAME ...] [--rounds N]
        [--minutes N] [--layers N] [--rehearse]

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
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from bench.gpu_contestants import CONTESTANTS, CONTEXTS, one_round
from posenc_export.export import Sources, export
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import load, verify
from posenc_export.runtime.artefact.certificate import bound_of, format_worst_error, worst_cell
from posenc_export.shared import json_rows
from tests.cuda_dry_run.models import KINDS

TARGETS = ("ort-cuda", "onnx", "onnx-static")
# The artefacts of a model: target and dtype. The others are those of an encoding alone, which its
# decoder has on every target.
EVERY = [
    ("ort-cuda", "float16"),
    ("ort-cuda", "bfloat16"),
    ("onnx", "float32"),
    ("onnx", "float16"),
    ("onnx-static", "float32"),
]
ARTEFACTS = {
    "decoders": EVERY,
    "presets": EVERY,
    "depths": EVERY,
    "families": EVERY[:3],
    "parts": EVERY,
    "blocks": EVERY[:1],
    "variants": EVERY[:1],
}
PIECE = 240  # most seconds of one process
TOGETHER = 4  # models of one process
WORKERS = 4  # processes that verify at the same time; nothing is timed meanwhile
# The measured decoder: Llama's architecture.
LLAMA: Dict[str, Any] = {
    "vocab_size": 50257, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip


def proof(name: str) -> Iterator[Dict[str, Any]]:
    """Verify the artefacts of a model on CUDA; yield one row for each."""
    import torch  # noqa: F401  loads the CUDA libraries that the provider needs

    kind, make = models()[name]
    sources = make()
    for target, dtype in ARTEFACTS[kind]:
        row: Dict[str, Any] = {"model": name, "kind": kind, "target": target, "dtype": dtype}
        with (
            tempfile.TemporaryDirectory() as temporary,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always", RuntimeWarning)
            try:
                export(sources, target, Path(temporary) / "a", dtype=dtype, verify=False)
                certificate = verify(Path(temporary) / "a", provider="cuda", record=False)
            except (ValueError, RuntimeError) as error:
                yield {**row, "refused": " ".join(str(error).split())[:500]}
                continue
        worst, errors = worst_cell(certificate), certificate["cells"]
        failed = {
            cell: error
            for cell, error in errors.items()
            if not error <= bound_of(certificate, cell)
        }
        row |= {
            "passed": certificate["passed"],
            "worst": errors[worst],
            "tolerance": bound_of(certificate, worst),
            "at": worst,
            "cells": len(errors),
        }
        row |= (
            {
                "failed": len(failed),
                "such as": dict(list(failed.items())[:6]),
                "failures": dict(list(certificate["failures"].items())[:2]),
            }
            if failed
            else {}
        )
        warned = sorted(
            {
                str(warning.message)[:300]
                for warning in said
                if issubclass(warning.category, RuntimeWarning)
            }
        )
        yield {**row, **({"warnings": warned} if warned else {}), "machine": certificate["machine"]}


def models() -> Dict[str, Tuple[str, Callable[[], Sources]]]:
    """Return the models of the dry run by kind and name: their kinds, and functions that make
    them.
    """
    return {
        f"{kind}: {name}": (kind, make)
        for kind in ARTEFACTS
        for name, make in KINDS[kind]().items()
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
    ours = (
        load(folder / "onnx", provider="cpu").session().prefill(tokens.numpy()).astype(np.float32)
    )
    return {"difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max())}


class Results:
    """The rows that were measured so far, in a JSON file that is written after each.

    Args:
        path: the file. If it exists, its rows count as measured.
        minutes: after this time no further piece is started.
    """

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.values: Dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.exists()
            else {"parity": [], "latency": []}
        )

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
        left = self.end - time.monotonic()
        if left <= 0:
            return []
        command = [sys.executable, "-W", "ignore", "-m", "bench.gpu", f"--{task}", *arguments]
        try:
            ran = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=min(PIECE, left)
            )
        except (
            subprocess.TimeoutExpired
        ):  # the next call repeats a piece that the end of this call cut short
            return [{"error": f"no result within {PIECE} s"}] if left > PIECE else []
        rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        lines = ran.stderr.strip().splitlines()
        return (
            rows
            if not ran.returncode
            else [*rows, {"error": lines[-1][:300] if lines else f"exit status {ran.returncode}"}]
        )


def parity(results: Results, names: Sequence[str], workers: int) -> None:
    """Verify the models that the results lack."""
    known = {row["model"] for row in results.values["parity"]}
    missing = [name for name in names if name not in known]
    with ThreadPoolExecutor(workers) as pool:
        for done in as_completed(
            [
                pool.submit(_proofs, results, missing[at : at + TOGETHER])
                for at in range(0, len(missing), TOGETHER)
            ]
        ):
            results.add("parity", done.result())


def _proofs(results: Results, names: Sequence[str]) -> List[Dict[str, Any]]:
    """Return the rows of some models. A process that ends early gives an error to the model that
    it was at; the next one continues after it.
    """
    rows: List[Dict[str, Any]] = []
    while names:
        found = results.piece("proof", *names)
        if not found:
            break
        whole = [
            name
            for name in names
            if sum(row.get("model") == name for row in found)
            == len(ARTEFACTS[name.partition(":")[0]])
        ]
        rows += [
            {"model": names[len(whole)], **row}
            if "error" in row and len(whole) < len(names)
            else row
            for row in found
        ]
        names = names[len(whole) + 1 :]
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


def page(values: Dict[str, Any]) -> str:
    """Return the results as Markdown."""
    lines = ["# CUDA", "", "Written by `python -m bench.gpu`.", ""]
    lines += (
        ["A rehearsal without a GPU: no error and no time means anything.", ""]
        if values.get("rehearsal")
        else []
    )
    passed = sum(row.get("passed", False) for row in values["parity"])
    if values["parity"]:
        lines += [f"{passed} of {len(values['parity'])} artefacts passed on CUDA.", ""]
        lines += [
            "| model | target | dtype | largest error | tolerance | cell |",
            "|---|---|---|---|---|---|",
        ]
        for row in sorted(values["parity"], key=lambda row: row["model"]):
            said = row.get("refused") or row.get("error")
            cells = (
                f"{said} | | "
                if said
                else (
                    f"{format_worst_error(row['worst'])}{'' if row['passed'] else ' (failed)'} | "
                    f"{row['tolerance']:.1e} | {row['at']}"
                )
            )
            lines.append(
                f"| {row['model']} | {row.get('target', '')} | {row.get('dtype', '')} | {cells} |"
            )
    by_name: Dict[str, List[Dict[str, Any]]] = {}
    columns = [
        (what, str(context))
        for what in ("step", "prefill")
        for context in CONTEXTS[: 1 if values.get("rehearsal") else None]
    ]
    devices = sorted({row["device"] for row in values["latency"] if "device" in row})
    for row in values["latency"]:
        by_name.setdefault(row["contestant"], []).append(row)
    if by_name:
        lines += [
            "",
            f"A decoder of {values['layers']} layers of width 768, float16, one row, on "
            f"{', '.join(devices)}.",
        ]
        lines += ["Medians of the rounds, with the least and the largest.", ""]
        heads = [
            "contestant",
            *(f"{what}, {context} tokens" for what, context in columns),
            "rounds",
        ]
        lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, rows in by_name.items():
        good = [row for row in rows if "error" not in row]
        cells = (
            [_spread([row[what][context] for row in good]) for what, context in columns]
            if good
            else [rows[0]["error"][-120:]]
        )
        lines.append(f"| {' | '.join([name, *cells, str(len(good))])} |")
    return "\n".join(lines) + "\n"


def _spread(seconds: Sequence[float]) -> str:
    return (
        f"{1e6 * statistics.median(seconds):.0f} us ({1e6 * min(seconds):.0f} .. "
        f"{1e6 * max(seconds):.0f})"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("build/gpu.json"))
    parser.add_argument("--only", choices=("parity", "latency"))
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(ARTEFACTS),
        choices=list(ARTEFACTS),
        metavar="KIND",
        help=f"of models to verify: {', '.join(ARTEFACTS)}",
    )
    parser.add_argument(
        "--names",
        nargs="+",
        metavar="NAME",
        help="models to verify, such as 'decoders: rope' (default: all of --kinds)",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=CONTESTANTS,
        choices=CONTESTANTS,
        metavar="NAME",
        help=f"one or more of {', '.join(CONTESTANTS)}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="start nothing after this time (default: 8)"
    )
    parser.add_argument(
        "--layers", type=int, default=12, help="layers of the measured decoder (default: 12)"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="time wrong outputs too, for the dry run of the provider (tests/cuda_dry_run)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=WORKERS,
        help=f"processes that verify at the same time (default: {WORKERS})",
    )
    parser.add_argument("--proof", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--round", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
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
