"""Export a GGUF file in each format of weights; measure its loss on text, and how often its answers
to questions begin as those in float32, beside llama.cpp on the file.

    python -m bench.bits model.gguf [--write]

Needs llama-cpp-python. --write keeps the results and puts the table into docs/fewer-bits.md.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from bench import json_rows, marked
from posenc_export.benchmark.peers.llama_cpp import LlamaCppSession
from posenc_export.commands.cli import main as posenc
from posenc_export.runtime import load

PAGE, RESULTS = Path("docs/fewer-bits.md"), Path("bench/results/bits.json")
FORMATS = ("float32", "int8", "int8-32", "int4", "int4-128", "keep")
LLAMA_CPP = "llama.cpp on the file"
WORDS = 8  # tokens of an answer that are compared
CONTEXT = 512  # positions of a session in which a question is answered
ABOUT = {
    """Argentina Australia Austria Belgium Brazil Canada Chile China Cuba Denmark Egypt Finland
    France Germany Greece Hungary India Iran Iraq Ireland Israel Italy Japan Kenya Mexico Nepal
    Norway Peru Poland Portugal Romania Russia Spain Sweden Switzerland Thailand Turkey Ukraine
    Uruguay Vietnam""": ("What is the capital of {}?", "On which continent is {}?"),
    """apple banana bear bird book bridge car cat chair clock cloud computer cow dog door egg fish
    flower forest garden horse house island lamp lemon lion moon mountain mouse ocean orange piano
    river salt ship snow sun table tree window""": (
        "What is a {}?", "Translate the word '{}' into French.", "Write a sentence about a {}."
    ),
}  # fmt: skip
QUESTIONS = [
    text.format(word) for words, texts in ABOUT.items() for text in texts for word in words.split()
]
HEADS = (
    "weights", "MB", "relative perplexity", "same next token", "same first token of an answer",
    f"same first {WORDS} tokens",
)  # fmt: skip


def answers(session: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the first tokens of each answer, the most probable ones."""
    results = []
    for ids in prompts:
        session.reset()
        logits = session.prefill(np.array([ids]), logits_to_keep=1)[:, -1]
        results.append([int(logits.argmax())])
        while len(results[-1]) < WORDS:
            logits = session.step(logits.argmax(-1))
            results[-1].append(int(logits.argmax()))
    return results


def measured(path: Path, place: Path) -> list[dict[str, Any]]:
    """Return a row for each format, and one for llama.cpp."""
    rows: list[dict[str, Any]] = []
    replies: dict[str, list[list[int]]] = {}
    prompts: list[list[int]] = []
    folders = {name: place / name for name in FORMATS}
    for name, folder in folders.items():
        weights = [] if name == "float32" else ["--weights", name]
        command = [str(path), "--target", "ort", "--verify", "quick", "--max-loss", "9", *weights]
        if posenc(["export", *command, "-o", str(folder)]):
            raise SystemExit(f"bench.bits: expected an export of {name} to succeed")
        model = load(folder, provider="cpu")
        prompts = prompts or [model.chat_ids(text) for text in QUESTIONS]
        replies[name] = answers(model.session(capacity=CONTEXT), prompts)
        quality = model.manifest.quality
        rows.append({
            "weights": name,
            "bytes": sum(file.stat().st_size for file in folder.glob("model*")),
            "perplexity": quality.ratio if quality else 1.0,
            "next": quality.agreement if quality else 1.0,
        })  # fmt: skip
    replies[LLAMA_CPP] = answers(LlamaCppSession(path, model.manifest, 2, 1), prompts)
    rows += [{"weights": LLAMA_CPP, "bytes": path.stat().st_size}]
    for row in rows:
        same = np.array(replies[row["weights"]]) == np.array(replies["float32"])
        row["first"], row["all"] = float(same[:, 0].mean()), float(same.all(1).mean())
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        shares = [f"{row[key]:.1%}" if key in row else "" for key in ("next", "first", "all")]
        loss = f"{row['perplexity']:.3f}" if "perplexity" in row else ""
        lines.append([row["weights"], f"{row['bytes'] / 1e6:.0f}", loss, *shares])
    return marked.markdown(HEADS, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = measured(options.model, Path(place))
    print(text := table(rows))
    if options.write:
        json_rows.write(RESULTS, {"model": options.model.name, "rows": rows})
        marked.replace(PAGE, "bits", text + "\n")


if __name__ == "__main__":
    main()
