"""Size, loss on text and speed of a checkpoint in each format of few bits, beside onnxruntime-genai
and llama.cpp with the same weights.

    python -m bench.bits MODEL.gguf [--folder build/bits] [--tokens 16000] [--threads 2] [--only
    NAME]

The text is documentation of Python (pydoc_data.topics), in windows of 256 tokens that are spread
over it; weights are calibrated with the text of the package. Perplexity and agreement are relative
to the float32 artefact. All contestants are measured in one run, in turn. Artefacts, environments
of other runtimes and the model that onnxruntime-genai builds are kept in --folder and used again.
Writes bench/results/bits.json and the table of docs/fewer-bits.md.
"""

import argparse
import json
import math
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from pathlib import Path
from typing import Any, Dict, List, Optional, Protocol, Sequence

import numpy as np

from bench import marked
from posenc_export.export import Sources, export
from posenc_export.export.quality import Loss
from posenc_export.export.quantization import calibration
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import load
from posenc_export.runtime.artefact.machine import processor
from posenc_export.shared import json_rows

RESULTS, PAGE = (
    Path(__file__).parent / "results" / "bits.json",
    Path(__file__).parents[1] / "docs" / "fewer-bits.md",
)
PEERS = Path(__file__).with_name("bits_peers.py")
OWN: Dict[str, Dict[str, Any]] = {
    "float32": {},
    "int8": {"weights": "int8"},
    "int8-32": {"weights": "int8-32"},
    "int4": {"weights": "int4"},
    "int4-128": {"weights": "int4-128"},
    "keep": {"weights": "keep"},
    "--size 100": {"size": 100.0},
}
OTHERS = {
    "onnxruntime-genai int4": ("genai", ("onnxruntime-genai==0.18.0", "accelerate")),
    "llama.cpp": ("llama.cpp", ("xllamacpp==2026.10.11549",)),
}
COLUMNS = (
    "weights",
    "MB",
    "relative perplexity",
    "same most probable token",
    "prompt of 1024 tokens",
    "spread",
    "step, 128 cached tokens",
    "spread",
)
PROMPT, CACHED, STEPS, ROUNDS = 1024, 128, 24, 7


class Contestant(Protocol):
    """A model in one runtime."""

    bytes: int

    def logits(self, ids: np.ndarray) -> Optional[np.ndarray]:
        """Return logits [S,V] of ids [S], or None."""

    def times(self, ids: Sequence[int], steps: int) -> Dict[str, float]:
        """Return the seconds of a prompt, as prefill, and of a step after it."""


class Own:
    """An artefact."""

    def __init__(self, folder: Path, threads: int) -> None:
        self.session = load(folder, provider="cpu", threads=threads).session()
        self.bytes = sum(
            (folder / name).stat().st_size for name in ("model.onnx", "model.onnx.data")
        )

    def logits(self, ids: np.ndarray) -> Optional[np.ndarray]:
        self.session.reset()
        return np.asarray(self.session.prefill(ids[None], chunk=len(ids))[0])

    def times(self, ids: Sequence[int], steps: int) -> Dict[str, float]:
        self.session.reset()
        start = time.perf_counter()
        self.session.prefill(np.array([ids], np.int64), logits_to_keep=1)
        prefill, each = time.perf_counter() - start, []
        for token in ids[:steps]:
            start = time.perf_counter()
            self.session.step(np.array([token], np.int64))
            each.append(time.perf_counter() - start)
        return {"prefill": prefill, "step": statistics.median(each)}


class Peer:
    """Another runtime in a process of its own (bits_peers.py), for calls of at most `rows` rows."""

    def __init__(self, python: Path, name: str, place: Path, threads: int, rows: int = 1) -> None:
        files = (
            [place]
            if place.is_file()
            else [path for path in place.iterdir() if ".onnx" in path.name]
        )
        self.bytes = sum(path.stat().st_size for path in files)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [
            str(python),
            str(PEERS),
            name,
            str(place),
            str(threads),
            *([str(rows)] if rows > 1 else []),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )

    def _ask(self, request: Dict[str, Any]) -> Any:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():  # libraries print lines of their own
            if line.startswith(b"answer "):
                return json.loads(line.removeprefix(b"answer "))
        raise RuntimeError(
            f"bench.bits: expected an answer of {self.process.args}, got none; run it alone "
            "to see why"
        )

    def logits(self, ids: np.ndarray) -> Optional[np.ndarray]:
        found = self._ask({"logits": ids.tolist()})
        if found is None:
            return None
        assert self.process.stdout
        shape = found["shape"]
        return np.frombuffer(self.process.stdout.read(4 * math.prod(shape)), "<f4").reshape(shape)

    def times(self, ids: Sequence[int], steps: int) -> Dict[str, float]:
        found: Dict[str, float] = self._ask({"ids": list(ids), "steps": steps})
        return found

    def step_of_rows(self, ids: Sequence[int], rows: int, steps: int, clock: str) -> float:
        """Return the seconds of a step of several rows that have read ids. clock: a function of
        `time`.
        """
        return float(self._ask({"ids": list(ids), "rows": rows, "steps": steps, "clock": clock}))


def place(folder: Path, name: str) -> Path:
    """Return the folder of an artefact."""
    return folder / name.strip("-").replace(" ", "-")


def exported(model: Path, folder: Path, names: Sequence[str]) -> None:
    """Export the artefacts that the folder does not hold yet, without verification."""
    missing = [name for name in names if not place(folder, name).is_dir()]
    if not missing:
        return
    read = from_pretrained(str(model))
    for name in missing:
        print(f"export {name}", flush=True)
        export(Sources(read), "ort", place(folder, name), verify=False, **OWN[name])


def windows(model: Path, tokens: int) -> np.ndarray:
    """Return windows [n,256] of the text, about `tokens` tokens together."""
    topics = pydoc_data.topics.topics
    content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    every = calibration.of_text(content, from_pretrained(str(model))).windows
    return every[
        np.linspace(0, len(every) - 1, min(len(every), -(-tokens // every.shape[1]))).astype(int)
    ]


def peer(label: str, model: Path, folder: Path, threads: int) -> Peer:
    """Open another runtime in its own environment."""
    name, python = OTHERS[label][0], environment(label, folder)
    if name == "llama.cpp":
        return Peer(python, name, model, threads)
    built = folder / "genai-int4"
    if not built.is_dir():
        build(python, model, folder, built)
    return Peer(python, name, built, threads)


def environment(label: str, folder: Path) -> Path:
    """Return the Python of another runtime's own environment, which also sees the packages of
    this one.
    """
    name, packages = OTHERS[label]
    python = folder / f"env-{name}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
        site = next(python.parents[1].glob("lib/python*/site-packages"))
        (site / "base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return python


def checkpoint(python: Path, model: Path, folder: Path) -> Path:
    """Return the folder of the file as a checkpoint of transformers in float32; convert it if it
    is missing.
    """
    place = folder / "checkpoint"
    if not place.is_dir():
        subprocess.run(
            [str(python), str(PEERS), "checkpoint", str(model), str(place)],
            check=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    return place


def build(python: Path, model: Path, folder: Path, built: Path) -> None:
    """Build the model of onnxruntime-genai in 4 bits with the builder's defaults."""
    place = checkpoint(python, model, folder)
    command = [
        str(python),
        "-m",
        "onnxruntime_genai.models.builder",
        "-i",
        str(place),
        "-o",
        str(built),
        "-p",
        "int4",
        "-e",
        "cpu",
    ]
    subprocess.run(
        [*command, "-c", str(folder / "cache")],
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def losses(
    contestants: Dict[str, Contestant], plain: Contestant, text: np.ndarray
) -> Dict[str, Loss]:
    """Return the loss of each contestant that gives logits."""
    found: Dict[str, Loss] = {}
    for index, window in enumerate(text):
        expected = plain.logits(window)
        assert expected is not None
        for name, contestant in contestants.items():
            actual = expected if contestant is plain else contestant.logits(window)
            if actual is not None:
                found.setdefault(name, Loss(1.0)).add(
                    actual[None, :-1], expected[None, :-1], window[None, 1:]
                )
        print(f"window {index + 1} of {len(text)}", flush=True)
    return found


def timed(
    contestants: Dict[str, Contestant], ids: Sequence[int]
) -> Dict[str, Dict[str, List[float]]]:
    """Measure prompts and steps in turn; return the seconds of each round."""
    found: Dict[str, Dict[str, List[float]]] = {
        name: {"prefill": [], "step": []} for name in contestants
    }
    for number in range(ROUNDS + 1):  # the first round warms up
        for name, contestant in contestants.items():
            seconds = {
                "prefill": contestant.times(ids[:PROMPT], 1)["prefill"],
                "step": contestant.times(ids[:CACHED], STEPS)["step"],
            }
            if number:
                for key, one in seconds.items():
                    found[name][key].append(one)
    return found


def rows(
    contestants: Dict[str, Contestant],
    loss: Dict[str, Loss],
    times: Dict[str, Dict[str, List[float]]],
) -> List[Dict[str, Any]]:
    """Return the figures of each contestant. Times are relative to float32 in the same round."""
    made = []
    for name, contestant in contestants.items():
        row: Dict[str, Any] = {"weights": name, "bytes": contestant.bytes}
        if name in loss:
            row |= {
                "perplexity": round(loss[name].ratio, 4),
                "agreement": round(loss[name].same / loss[name].tokens, 4),
                "tokens": loss[name].tokens,
            }
        for key, seconds in times[name].items():
            ratios = np.array(seconds) / np.array(times["float32"][key])
            low, median, high = np.quantile(ratios, (0.1, 0.5, 0.9)).round(3).tolist()
            row[key] = {
                "seconds": float(f"{np.median(seconds):.4g}"),
                "low": low,
                "median": median,
                "high": high,
            }
        made.append(row)
    return made


def table(found: Dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in found["rows"]:
        quality = (
            [f"{row['perplexity']:.3f}", f"{row['agreement']:.1%}"]
            if "perplexity" in row
            else ["not measured", ""]
        )
        speed = [
            text
            for key in ("prefill", "step")
            for text in (
                f"{row[key]['median']:.2f}",
                f"{row[key]['low']:.2f} .. {row[key]['high']:.2f}",
            )
        ]
        name = f"`{row['weights']}`" if row["weights"] in OWN else row["weights"]
        lines.append(
            f"| {' | '.join([name, format(row['bytes'] / 1e6, '.0f'), *quality, *speed])} |"
        )
    plain = found["rows"][0]
    seconds = (
        f"{1000 * plain['prefill']['seconds']:.0f} ms for the prompt and "
        f"{1000 * plain['step']['seconds']:.1f} ms for a step"
    )
    note = (
        f"{found['model']} on `ort`, {found['tokens']} tokens of text; {found['processor']}, "
        f"{found['threads']} threads, {ROUNDS} rounds in which all took turns."
    )
    note += f" Times are relative to those of `float32` in the same round, {seconds}."
    return "\n".join([*textwrap.wrap(note, 170, break_long_words=False), "", *lines]) + "\n"


def main(given: Optional[List[str]] = None) -> None:
    """Measure the contestants and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/bits"),
        help="of artefacts and environments (default: build/bits)",
    )
    parser.add_argument(
        "--tokens", type=int, default=16000, help="of text to measure the loss on (default: 16000)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each contestant (default: 2)")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*OWN, *OTHERS],
        help="measure only this contestant and float32; may be given several times (default: all)",
    )
    parser.add_argument(
        "--no-write", action="store_true", help="print the table, and keep results and page"
    )
    options = parser.parse_args(given)
    chosen = [
        "float32",
        *(
            name
            for name in (*OWN, *OTHERS)
            if name != "float32" and name in (options.only or (*OWN, *OTHERS))
        ),
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    exported(options.model, options.folder, [name for name in chosen if name in OWN])
    contestants: Dict[str, Contestant] = {
        name: Own(place(options.folder, name), options.threads) for name in chosen if name in OWN
    }
    contestants |= {
        name: peer(name, options.model, options.folder.resolve(), options.threads)
        for name in chosen
        if name in OTHERS
    }
    text = windows(options.model, options.tokens)
    times = timed(contestants, text[: -(-PROMPT // text.shape[1])].ravel().tolist())
    loss = losses(contestants, contestants["float32"], text)
    found = {
        "model": options.model.name,
        "tokens": int(text.size),
        "processor": processor(),
        "threads": options.threads,
        "rows": rows(contestants, loss, times),
    }
    print(table(found))
    if not options.no_write:
        write(found)


def write(found: Dict[str, Any]) -> None:
    """Write the results and the table of the page."""
    marked.replace(PAGE, "bits", table(found))
    json_rows.write(RESULTS, found)


if __name__ == "__main__":
    main(sys.argv[1:])
