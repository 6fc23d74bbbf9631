"""Random configurations of the decoders that we read, compared with transformers: `python -m
tests.fuzz --configs 1000 --minutes 0 --seed N`.

A case starts from a small valid config.json and changes one to three keys. If transformers builds
the model, our model must give the outputs of its full pass for every division of rows into calls,
or refuse the configuration by name. Every third case is exported to `ort` and runs as an artefact,
the others run the module. A finding is reduced to the keys that cause it, and is repeated by
`compared(base, changes, number, target)`.
"""

import collections
import json
import multiprocessing
import random
import re
import tempfile
import time
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np
import torch
import transformers

from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.models import families
from posenc_export.models.pretrained import from_pretrained
from posenc_export.runtime import Session, load
from tests.fuzz.config_values import DELETED, HUGE, changed
from tests.models import checkpoints
from tests.models.patterns import Pairs, theirs

TOGETHER = 20  # cases that a worker runs at a time
EXPORTED = 3  # every third case is exported
SECONDS = 5.0  # longest processor time of a refusal
LENGTH, SHORT, CHUNK = 24, 9, 7  # tokens of the long and of the short row, and of a chunk
# Tokens of the first call of a decode, which may lie in another range of a rotation, and the last
# ones, which are read one at a time.
FIRST, STEPS = 3, 21
BEYOND = 280  # tokens of a long row in which bfloat16 no longer holds every position
# Size of a part above which transformers is not asked; keys that are left out have the defaults of
# real models.
LARGEST = 1024
UNBUILT = re.compile(
    r"position|window|token|theta|chunk|seq|max_length|floor_scale|factor|_base$|context"
)  # keys of which no size of a weight follows
FINDINGS = ("silent difference", "wrong error", "unexplained decode of transformers")


@dataclass
class Case:
    """One configuration and what became of it.

    Args:
        number: index of the case.
        base: name of the base model (tests/models/checkpoints.py).
        changes: new values of keys; "(deleted)" for a key that is left out.
        target: target of our artefact; "eager" for the module itself.
        outcome: "equal", "refused", "refused by the target", "refused by both", "transformers
            cannot run it", "transformers differs from its own decode" for a reason of
            `decode_defect`, or one of FINDINGS.
        said: our refusal or error, and transformers' error or its reason to differ.
        shares: for each division into calls, the largest difference relative to the tolerance.
    """

    number: int
    base: str
    changes: Dict[str, Any]
    target: str = "eager"
    outcome: str = ""
    said: List[str] = field(default_factory=list)
    shares: Dict[str, float] = field(default_factory=dict)

    def fail(self, outcome: str, error: Exception) -> None:
        """Set the outcome to that of an error of ours. One that has not the form of our messages
        is a finding.
        """
        proper = isinstance(error, ValueError) and is_proper(str(error))
        self.outcome = outcome if proper else "wrong error"
        self.said.append(f"ours: {_line(error)}")
        if not proper:
            self.said.append("".join(traceback.format_tb(error.__traceback__)[-2:]))


def is_proper(said: str) -> bool:
    """Return whether an error has one line and the form `where: expected RULE, got VALUE`."""
    return "\n" not in said and all(part in said for part in (": ", "expected ", "got "))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:400]}".replace("\n", " ")


def bases() -> List[str]:
    """Return the names of the small decoders that we read with a family of our own."""
    return list(checkpoints.OURS)


def as_saved(base: str) -> Dict[str, Any]:
    """Return the contents of config.json as transformers saves it."""
    saved: Dict[str, Any] = json.loads(checkpoints.described(base).to_json_string())
    return saved


def case(seed: int, number: int) -> Case:
    """Run one case."""
    choice = random.Random(f"{seed} {number}")
    by_type = collections.defaultdict(list)
    for name in bases():
        by_type[name.split()[0]].append(name)
    base = choice.choice(by_type[choice.choice(sorted(by_type))])
    full = json.loads(checkpoints.described(base).to_json_string(use_diff=False))
    changes = changed(as_saved(base), full, choice)
    target = "ort" if number % EXPORTED == EXPORTED - 1 else "eager"
    return reduced(base, changes, compared(base, changes, number, target))


def reduced(base: str, changes: Mapping[str, Any], found: Case) -> Case:
    """Return a finding without the target and changes that it does not need; other cases as is."""
    if found.outcome not in FINDINGS:
        return found
    fewer = [(changes, "eager")] if found.target != "eager" else []
    fewer += [
        ({key: value for key, value in changes.items() if key != name}, found.target)
        for name in changes
    ]
    for remaining, target in fewer:
        again = compared(base, remaining, found.number, target)
        if again.outcome == found.outcome:
            return reduced(base, remaining, again)
    return found


def compared(base: str, changes: Mapping[str, Any], number: int = 0, target: str = "eager") -> Case:
    """Compare our model with transformers' for a base with changed keys."""
    result = Case(number, base, _shown(changes), target)
    new = {**as_saved(base), **changes}
    config = {key: value for key, value in new.items() if value is not DELETED}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare(base, config, Path(folder), result)
    return result


def _shown(changes: Mapping[str, Any]) -> Dict[str, Any]:
    return {
        key: "(deleted)"
        if value is DELETED
        else _shown(value)
        if isinstance(value, dict)
        else value
        for key, value in changes.items()
    }


def _compare(base: str, config: Dict[str, Any], folder: Path, found: Case) -> None:
    """Set the outcome of a case. config: contents of config.json."""
    length = BEYOND if found.number % 8 == 7 else LENGTH
    try:
        peer = built(base, config)
        tokens = tokens_for(peer.config, length)
        full, alone = theirs(peer, tokens), theirs(peer, tokens[1:, -SHORT:])
        decoded = _decoded(peer, tokens)
        if not all(part.size and np.isfinite(part).all() for part in (full, alone, decoded)):
            raise ValueError("outputs that are empty or not finite")
    except Exception as error:  # transformers cannot run this configuration, whatever it raises
        found.said.append(f"transformers: {_line(error)}")
        return _refused_alone(config, found)
    peer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    noise, stage = share([(decoded, full)]), "refused"
    try:
        model = from_pretrained(folder)
        stage = "refused by the target"
        session = _opened(model, folder / "artefact", found.target)
        stage = "refused"  # such as positions beyond the range
        found.shares = {
            name: share(pairs) for name, pairs in divisions(session, tokens, full, alone)
        }
    except Exception as error:
        return found.fail(stage, error)
    defect = decode_defect(model) if noise > 1 else ""
    found.said.append(f"transformers' own decode: {noise:.3g} {defect}".strip())
    # We may exceed the rounding of its decode by 20 times.
    if max(found.shares.values()) > (max(1.0, 20 * noise) if noise <= 1 else 1.0):
        found.outcome = "silent difference"
    elif noise <= 1:
        found.outcome = "equal"
    else:
        found.outcome = "transformers differs from its own decode" if defect else FINDINGS[2]


def _refused_alone(config: Dict[str, Any], found: Case) -> None:
    """Set the outcome of a configuration that transformers cannot run: we may refuse it or not,
    but without a wrong error and at once.
    """
    found.outcome, begun = "transformers cannot run it", time.process_time()
    try:
        families.read(config)
    except Exception as error:
        found.fail("refused by both", error)
    if time.process_time() - begun > SECONDS:
        found.outcome = "wrong error"
        found.said.append(f"a refusal that takes {time.process_time() - begun:.1f} s")


def built(base: str, config: Mapping[str, Any]) -> Any:
    """Return transformers' model of a config.json, with random parameters.

    Raises:
        ValueError: a size of a real model or beyond.
    """
    torch.manual_seed(0)
    result = type(checkpoints.described(base)).from_dict(dict(config))
    for key, value in _numbers({**config, **result.to_dict()}):
        if value > LARGEST and not UNBUILT.search(key) or value >= HUGE[0]:
            raise ValueError(f"not asked for a model of real size, by {key}")
    return checkpoints.randomised(transformers.AutoModelForCausalLM.from_config(result))


def _numbers(values: Mapping[str, Any]) -> Iterator[Tuple[str, float]]:
    for key, value in values.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from _numbers(each)
            elif isinstance(each, (int, float)):
                yield str(key), abs(each)


def tokens_for(config: Any, length: int) -> np.ndarray:
    """Return two rows of token ids [2,length] without special tokens and the id of padding."""
    padding = getattr(config, "pad_token_id", None)
    most = min(58, getattr(config, "vocab_size", 58))
    ids = [index for index in range(5, most) if index != padding]
    return np.random.default_rng(0).choice(ids, (2, length))


def _decoded(peer: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the outputs of transformers' model that reads FIRST tokens, then others, and the last
    STEPS tokens one at a time, with its own cache.
    """
    parts, cache = [], None
    ends = sorted({FIRST, *range(tokens.shape[1] - STEPS, tokens.shape[1] + 1)})
    with torch.no_grad():
        for begin, end in zip([0, *ends], ends, strict=False):
            part = torch.from_numpy(tokens[:, begin:end])
            result = peer(part, use_cache=True, past_key_values=cache)
            parts.append(result.logits.numpy())
            cache = result.past_key_values
    return np.concatenate(parts, 1)


def decode_defect(model: Any) -> str:
    """Return why transformers' decode differs from its full pass; empty if no reason is known."""
    if any(kind.attention.sees.get("size") == 1 for kind in model.config.layers.values()):
        return "its cache for a window of one token keeps all keys, keys[:, :, -1 + 1 :]"
    return ""


def _opened(model: Any, folder: Path, target: str) -> Session:
    if target == "eager":
        return eager_session(model)
    export(model, target, folder, verify=False)
    return load(folder, threads=1, provider="cpu").session()


def divisions(
    session: Session, tokens: np.ndarray, full: np.ndarray, alone: np.ndarray
) -> Iterator[Tuple[str, Pairs]]:
    """Yield pairs of outputs (ours, theirs) for every division of two rows [2,S] into calls.

    Args:
        full: transformers' outputs [2,S,V].
        alone: those [1,SHORT,V] of the last SHORT tokens of the second row, as a row of its own.
    """
    yield "full", [(session.prefill(tokens), full)]
    session.reset()
    rows, mask = tokens.copy(), np.ones_like(tokens)
    rows[1, :-SHORT] = mask[1, :-SHORT] = 0
    padded = session.prefill(rows, attention_mask=mask)
    yield "left padding", [(padded[0], full[0]), (padded[1, -SHORT:], alone[0])]
    session.reset()
    yield "chunks", [(session.prefill(tokens, chunk=CHUNK), full)]
    session.reset()
    first = session.prefill(tokens[:, :-STEPS])
    steps = [session.step(tokens[:, index]) for index in range(-STEPS, 0)]
    yield "steps", [(np.concatenate((first, np.stack(steps, 1)), axis=1), full)]


def share(both: Sequence[Any]) -> float:
    """Return the largest difference relative to 2e-4 of the largest output, or of 1; infinity
    for outputs that are not finite.
    """
    if not all(np.isfinite(result).all() for result, _ in both):
        return float("inf")
    return max(
        float(np.abs(result - wanted).max() / (2e-4 * max(1.0, np.abs(wanted).max())))
        for result, wanted in both
    )


def chunk(seed: int, first: int, count: int) -> List[Case]:
    """Run some cases in a row; the work of one process."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return [case(seed, number) for number in range(first, first + count)]


def run(seed: int, count: int, jobs: int) -> Dict[str, Any]:
    """Run `count` cases. Print findings, and return the totals."""
    result: List[Case] = []
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=10
    ) as pool:
        begun = [
            pool.submit(chunk, seed, at, min(TOGETHER, count - at))
            for at in range(0, count, TOGETHER)
        ]
        for future in begun:
            result += future.result()
    findings = [asdict(each) for each in result if each.outcome in FINDINGS]
    for each in findings:
        print(json.dumps(each), flush=True)
    equal = collections.Counter(each.base.split()[0] for each in result if each.outcome == "equal")
    return {
        "seed": seed,
        "count": len(result),
        "outcomes": dict(collections.Counter(each.outcome for each in result)),
        "equal": dict(sorted(equal.items())),
        "findings": findings,
    }
