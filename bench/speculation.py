"""Speculative decoding beside plain decoding: seconds for the same ids, on texts that repeat and on
texts that do not.

    python -m bench.speculation ARTEFACT ... [--draft ARTEFACT] [--tokens 96] [--rounds 3]
    [--passes] [--processor-time] [--json bench/results/speculation.json]

The texts are parts of Python's standard library, with the tokenizer of the artefact. Each task
reads its prompt once; then decoding with and without drafts takes turns, so that disturbances
affect both. Times are those from the first id to the last. A ratio above 1 means that drafts are
faster. `repeat` completes a function that stands in the prompt twice, `edit` repeats one with other
names, `quote` quotes one, `document` continues its documentation, and `new` samples at temperature
1 after a text without repetition.

`equal` is the number of ids before the first that differs, `accepted` the share of drafted tokens
that were kept. With --passes, the file also gets the cost of one pass of 2, 4, 8 and 16 tokens
relative to a step; with --draft too, that of a step of the draft model, and by number of drafted
tokens how many times plain decoding they would give if all were kept, and the share of right ones
that gives 1.4. bench/draft.py of commit dc58e7a trained a draft model. --processor-time measures
the time of the processor, with one thread, where other programs use the cores.
"""

import argparse
import inspect
import pydoc_data.topics
import statistics
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np

from posenc_export.runtime import load
from posenc_export.runtime.artefact.tokenizer import codec
from posenc_export.runtime.session.draft_length import PassCosts
from posenc_export.shared import json_rows

WIDTHS = (2, 4, 8, 16)
GOAL = 1.4  # times plain decoding with a draft model of a tenth of the size
CLOCK = [time.perf_counter]
Task = Tuple[str, str, Dict[str, Any]]  # name, prompt, arguments of generate


def tasks() -> List[Task]:
    """Return the tasks: name, prompt and sampling."""
    source, other = (
        inspect.getsource(one).split('"""')[0] + inspect.getsource(one).split('"""')[2]
        for one in (textwrap.indent, textwrap.dedent)
    )
    edited = source.replace("prefix", "margin").replace("line", "row")
    half = len(edited.splitlines()) // 2
    begun = ["".join(text.splitlines(keepends=True)[:half]) for text in (source, edited)]
    return [
        ("repeat", f"{source}\n{source}\n{begun[0]}", {}),
        (
            "edit",
            f"{source}\n# The same with other names\n{edited}\n{source}\n# The same with "
            f"other names\n{begun[1]}",
            {},
        ),
        ("quote", f"{other}\nThe function above says:\n\n{other[: len(other) // 4]}", {}),
        ("document", pydoc_data.topics.topics["while"], {}),
        (
            "new",
            "The history of the lighthouse on the northern coast begins with a storm. In the "
            "winter of 1824,",
            {"temperature": 1.0, "seed": 1},
        ),
    ]


class Counted(PassCosts):
    """Costs that count the passes, and the drafted tokens in them."""

    passes = drafted = 0

    def record(self, widths: Sequence[int], seconds: float) -> None:
        self.passes, self.drafted = self.passes + 1, self.drafted + sum(widths) - len(widths)
        super().record(widths, seconds)


def decoded(
    session: Any, prompt: List[int], tokens: int, given: Dict[str, Any]
) -> Tuple[float, List[int]]:
    """Return the seconds per id, and the ids, after a prompt whose tokens but the last one are
    in the cache.
    """
    base = int(session.length[0])
    ids, stamps = [], []
    for (one,) in session.generate([prompt[-1:]], tokens, stop=(), before=[prompt[:-1]], **given):
        ids.append(int(one))
        stamps.append(CLOCK[0]())
    session.rewind(int(session.length[0]) - base)
    return (stamps[-1] - stamps[0]) / (len(ids) - 1), ids


def measured(
    model: Any,
    folder: Path,
    name: str,
    text: str,
    given: Dict[str, Any],
    speculate: Any,
    tokens: int,
    rounds: int,
) -> Dict[str, Any]:
    """Return {"task", "prompt", "tokens", "equal", "tokens_per_pass", "accepted", "ratio",
    "ratios", "milliseconds": of plain decoding per token}.
    """
    prompt = codec(folder, model.manifest).encode(text)
    session = model.session()
    session.pass_costs = Counted(separate=False)
    session.prefill(np.array([prompt[:-1]]), logits_to_keep=1)
    ways: List[Dict[str, Any]] = [given, {**given, "speculate": speculate}]
    for way in ways:
        decoded(session, prompt, min(tokens, 24), way)
    session.pass_costs.passes = session.pass_costs.drafted = 0
    pairs = [[decoded(session, prompt, tokens, way) for way in ways] for _ in range(rounds)]
    ratios = sorted(plain[0] / drafted[0] for plain, drafted in pairs)
    one, other = pairs[0][0][1], pairs[0][1][1]
    equal = next((index for index in range(tokens) if one[index] != other[index]), tokens)
    plain = statistics.median(pair[0][0] for pair in pairs)
    passes, made = session.pass_costs.passes, rounds * (tokens - 1)
    shares = {
        "tokens_per_pass": round(made / passes, 2),
        "accepted": round((made - passes) / max(session.pass_costs.drafted, 1), 2),
    }
    found = {
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "milliseconds": round(plain * 1e3, 2),
    }
    return {
        "task": name,
        "prompt": len(prompt),
        "tokens": tokens,
        "equal": equal,
        **shares,
        **found,
    }


def passes(model: Any, cached: int, rounds: int) -> Dict[str, Any]:
    """Return the time of a pass of several tokens after `cached` tokens, relative to that of a
    step: {"cached", "step": milliseconds, "ratios": {width: median}}.
    """
    session, random = model.session(), np.random.default_rng(0)
    ids = random.integers(0, model.manifest.vocabulary, (1, cached))
    session.prefill(ids, logits_to_keep=1)
    steps: List[float] = []
    taken: Dict[int, List[float]] = {width: [] for width in WIDTHS}
    for turn in range(rounds + 1):
        begun = CLOCK[0]()
        session.step(ids[:, turn])
        steps.append(CLOCK[0]() - begun)
        for width in WIDTHS:
            begun = CLOCK[0]()
            session.prefill(ids[:, :width])
            taken[width].append((CLOCK[0]() - begun) / steps[-1])
        session.rewind(1 + sum(WIDTHS))
    ratios = {str(width): round(statistics.median(times[1:]), 2) for width, times in taken.items()}
    return {
        "cached": cached,
        "step": round(statistics.median(steps[1:]) * 1e3, 2),
        "ratios": ratios,
    }


def needed(ratios: Dict[str, float], drafting: float) -> Dict[str, Dict[str, float]]:
    """Return by number of drafted tokens the times plain decoding if all are kept, and the share
    that must be kept for GOAL; 1 or more if it is out of reach.

    Args:
        ratios: cost of a pass by its number of tokens, relative to a step.
        drafting: cost of drafting a token.
    """
    found = {}
    for width, ratio in ratios.items():
        count, cost = int(width) - 1, ratio + drafting * (int(width) - 1)
        shares = np.linspace(0, 1, 1001)
        tokens = sum(shares**power for power in range(count + 1))
        enough = shares[tokens >= GOAL * cost]
        found[str(count)] = {
            "at_most": round((count + 1) / cost, 2),
            "share": round(float(enough[0]), 2) if len(enough) else 1.0,
        }
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="ARTEFACT")
    parser.add_argument("--draft", type=Path, help="draft with this decoder instead of a look-up")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--passes", action="store_true", help="measure passes of several tokens too"
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure processor time of the calling thread; needs --threads 1",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    if options.processor_time:
        CLOCK[0] = time.thread_time
    rows = []
    for folder in options.folders:
        model = load(folder, provider="cpu", threads=options.threads)
        speculate = (
            load(options.draft, provider="cpu", threads=options.threads)
            if options.draft
            else "lookup"
        )
        weights = model.manifest.weights.format if model.manifest.weights else model.manifest.dtype
        row = {"weights": weights, "draft": "a model" if options.draft else "lookup", "tasks": []}
        for name, text, given in tasks():
            row["tasks"].append(
                measured(
                    model, folder, name, text, given, speculate, options.tokens, options.rounds
                )
            )
            print(weights, row["tasks"][-1], flush=True)
        if options.passes:
            row["passes"] = passes(model, 256, 5 * options.rounds)
            if options.draft:
                drafting = (
                    passes(speculate, 256, 5 * options.rounds)["step"] / row["passes"]["step"]
                )
                row["passes"].update(
                    drafting=round(drafting, 3), needed=needed(row["passes"]["ratios"], drafting)
                )
            print(weights, row["passes"], flush=True)
        rows.append(row)
    if options.json:
        json_rows.write(
            options.json, {"threads": options.threads, "rounds": options.rounds, "rows": rows}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
