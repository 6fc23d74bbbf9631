"""Size, loss on text and speed of a checkpoint in each format of few bits, beside onnxruntime-genai
and llama.cpp with the same weights.

    python -m bench.bits MODEL.gguf [--folder build/bits] [--tokens 16000] [--only NAME]

The text is documentation of Python (pydoc_data.topics), in windows of 256 tokens that are spread
over it; weights are calibrated with the text of the package. Perplexity and agreement are relative
to the float32 artefact. All contestants are measured in one run, in turn. Artefacts, environments
of other runtimes and the model that onnxruntime-genai builds are kept in --folder and used again.
Writes bench/results/bits.json and the table of docs/fewer-bits.md.
"""

import argparse
import functools
import pydoc_data.topics
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from bench import marked
from bench.bits_contestants import OTHERS, Contestant, Own, peer
from bench.timing import in_turn, spread
from posenc_export.export import Sources, export
from posenc_export.export.quality import Loss
from posenc_export.export.quantization import samples
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime.artefact.machine import processor
from posenc_export.shared import json_rows

RESULTS = Path(__file__).parent / "results" / "bits.json"
PAGE = Path(__file__).parents[1] / "docs" / "fewer-bits.md"
OWN: Dict[str, Dict[str, Any]] = {
    "float32": {},
    "int8": {"weights": "int8"},
    "int8-32": {"weights": "int8-32"},
    "int4": {"weights": "int4"},
    "int4-128": {"weights": "int4-128"},
    "keep": {"weights": "keep"},
    "--size 100": {"size": 100.0},
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
    text = samples.of_text(content, from_pretrained(str(model))).windows
    count = min(len(text), -(-tokens // text.shape[1]))
    return text[np.linspace(0, len(text) - 1, count).astype(int)]


def losses(
    contestants: Dict[str, Contestant], plain: Contestant, text: np.ndarray
) -> Dict[str, Loss]:
    """Return the loss of each contestant that gives logits."""
    loss: Dict[str, Loss] = {}
    for index, window in enumerate(text):
        expected = plain.logits(window)
        assert expected is not None
        for name, contestant in contestants.items():
            actual = expected if contestant is plain else contestant.logits(window)
            if actual is not None:
                pair = actual[None, :-1], expected[None, :-1]
                loss.setdefault(name, Loss(1.0)).add(*pair, window[None, 1:])
        print(f"window {index + 1} of {len(text)}", flush=True)
    return loss


def times_of(contestant: Contestant, ids: Sequence[int]) -> Dict[str, float]:
    """Return the seconds of a prompt and of a step."""
    return {
        "prefill": contestant.times(ids[:PROMPT], 1)["prefill"],
        "step": contestant.times(ids[:CACHED], STEPS)["step"],
    }


def rows(
    contestants: Dict[str, Contestant],
    loss: Dict[str, Loss],
    times: Dict[str, List[Dict[str, float]]],
) -> List[Dict[str, Any]]:
    """Return the figures of each contestant. Times are relative to float32 in the same round."""
    lines = []
    for name, contestant in contestants.items():
        row: Dict[str, Any] = {"weights": name, "bytes": contestant.bytes}
        if name in loss:
            row |= {
                "perplexity": round(loss[name].ratio, 4),
                "agreement": round(loss[name].same / loss[name].tokens, 4),
                "tokens": loss[name].tokens,
            }
        for key in ("prefill", "step"):
            seconds, plain = ([turn[key] for turn in times[who]] for who in (name, "float32"))
            row[key] = {"seconds": float(f"{np.median(seconds):.4g}"), **spread(seconds, plain)}
        lines.append(row)
    return lines


def table(results: Dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results["rows"]:
        cells = [f"`{row['weights']}`" if row["weights"] in OWN else row["weights"]]
        cells += [f"{row['bytes'] / 1e6:.0f}", "not measured", ""]
        if "perplexity" in row:
            cells[2:] = [f"{row['perplexity']:.3f}", f"{row['agreement']:.1%}"]
        for key in ("prefill", "step"):
            cells += [f"{row[key]['median']:.2f}", "{low:.2f} .. {high:.2f}".format(**row[key])]
        lines.append(f"| {' | '.join(cells)} |")
    plain = results["rows"][0]
    seconds = (
        f"{1000 * plain['prefill']['seconds']:.0f} ms for the prompt and "
        f"{1000 * plain['step']['seconds']:.1f} ms for a step"
    )
    note = (
        f"{results['model']} on `ort`, {results['tokens']} tokens of text; {results['processor']}, "
        f"{results['threads']} threads, {ROUNDS} rounds in which all took turns."
    )
    note += f" Times are relative to those of `float32` in the same round, {seconds}."
    return "\n".join([*textwrap.wrap(note, 170, break_long_words=False), "", *lines]) + "\n"


def options_of(arguments: Optional[List[str]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
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
    return parser.parse_args(arguments)


def main(arguments: Optional[List[str]] = None) -> None:
    """Measure the contestants and write the results."""
    options = options_of(arguments)
    wanted = {"float32", *(options.only or (*OWN, *OTHERS))}
    folder, threads = options.folder.resolve(), options.threads
    folder.mkdir(parents=True, exist_ok=True)
    own = [name for name in OWN if name in wanted]
    exported(options.model, folder, own)
    contestants: Dict[str, Contestant] = {name: Own(place(folder, name), threads) for name in own}
    for name in OTHERS:
        if name in wanted:
            contestants[name] = peer(name, options.model, folder, threads)
    text = windows(options.model, options.tokens)
    ids = text[: -(-PROMPT // text.shape[1])].ravel().tolist()
    calls = {name: functools.partial(times_of, who, ids) for name, who in contestants.items()}
    times = in_turn(calls, ROUNDS)
    loss = losses(contestants, contestants["float32"], text)
    results = {
        "model": options.model.name,
        "tokens": int(text.size),
        "processor": processor(),
        "threads": threads,
        "rows": rows(contestants, loss, times),
    }
    print(table(results))
    if not options.no_write:
        marked.replace(PAGE, "bits", table(results))
        json_rows.write(RESULTS, results)


if __name__ == "__main__":
    main(sys.argv[1:])
