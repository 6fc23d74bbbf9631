"""Random configurations of every model type that we read, compared with transformers: `python -m
tests.fuzz.configs --seed N --count 1000 --jobs 2`.

A case starts from a small valid config.json, of encoders with or without a task head, and changes
one to three keys. If transformers builds the model, our model must give the outputs of its full
pass for every division of rows into calls, or refuse the configuration by name. Every third case is
exported to `ort` and runs as an artefact, the others run the module. A finding is reduced to the
keys that cause it. Case i of seed N is repeated with `--seed N --first i --count 1`.
"""

import argparse
import collections
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

import torch

from posenc_export.models import families
from tests.fuzz.config_case import (
    FINDINGS,
    Case,
    is_proper,
    largest,
    line,
    outcome_of,
    set_outcome,
    share,
    shown,
)
from tests.fuzz.config_values import DELETED, HUGE, changed

TOGETHER = 20  # cases that a worker runs at a time
EXPORTED = 3  # every third case is exported
SECONDS = 5.0  # longest processor time of a refusal


def case(seed: int, number: int) -> Case:
    """Run one case."""
    from tests.fuzz.config_peers import as_saved, bases, config_of

    choice = random.Random(f"{seed} {number}")
    known = bases()
    base = choice.choice(known[choice.choice(sorted(known))])
    result = config_of(base)
    config, full = as_saved(result), json.loads(result.to_json_string(use_diff=False))
    changes = changed(config, full, choice)
    target = "ort" if number % EXPORTED == EXPORTED - 1 else "eager"
    return reduced(base, changes, compared(base, changes, number, target))


def reduced(base: Any, changes: Mapping[str, Any], found: Case) -> Case:
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


def compared(base: Any, changes: Mapping[str, Any], number: int = 0, target: str = "eager") -> Case:
    """Compare our model with transformers' for a base with changed keys."""
    from tests.fuzz.config_peers import as_saved, config_of

    kind = base.task or base.kind
    result = Case(number, f"{kind} {base.model_type}: {base.name}", shown(changes), target)
    config = merged(as_saved(config_of(base)), changes)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare(base, config, Path(folder), result)
    return result


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> Dict[str, Any]:
    """Return a config.json with changed keys."""
    new = {**config, **changes}
    return {key: value for key, value in new.items() if value is not DELETED}


def _compare(base: Any, config: Dict[str, Any], folder: Path, found: Case) -> None:
    """Set the outcome of a case. config: contents of config.json."""
    from tests.fuzz import config_calls as calls
    from tests.fuzz import config_peers as peers

    try:
        if largest(found.changes) >= HUGE[0]:
            raise ValueError("not asked for sizes that do not fit in memory")
        peer = calls.Theirs(base, peers.built(base, config))
        length = calls.BEYOND if found.number % 8 == 7 else calls.LENGTH
        wanted = calls.expected(peer, peers.tokens_for(base, peer.config, length))
    except (
        Exception
    ) as error:  # whatever transformers raises means that it cannot run this configuration
        found.said.append(f"transformers: {line(error)}")
        return _refused_alone(config, found)
    (peer.peer.model if base.kind == "pair" else peer.peer).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    noise, refused = share([(wanted.decoded, wanted.full)]), "refused"
    try:
        models = peers.loaded(base, folder, length)
        refused = "refused by the target"
        session = peers.opened(base, models, folder, found.target)
        refused = "refused"  # such as positions beyond the range
        if calls.SHORT <= peers.trained(models[-1]) < length:
            wanted.alone = None  # transformers has LongRoPE's other factors for a short row
        both = calls.divisions(base, session, wanted)
        found.shares = {name: share(pairs) for name, pairs in both.items()}
    except ValueError as error:
        return set_outcome(found, refused if is_proper(error) else "wrong error", error)
    except Exception as error:  # every other error is a finding
        return set_outcome(found, "wrong error", error)
    defect = peers.decode_defect(models) if noise > 1 else ""
    found.outcome = outcome_of(max(found.shares.values()), noise, defect)
    found.said.append(f"transformers' own decode: {noise:.3g} {defect}".strip())


def _refused_alone(config: Dict[str, Any], found: Case) -> None:
    """Set the outcome of a configuration that transformers cannot run: we may refuse it or not,
    but without a wrong error and at once.
    """
    from tests.models.encoders import WITHOUT_RANGE

    name = config.get("model_type")
    parts = families.parts_of(name) if isinstance(name, str) and name in families.FILES else ()
    found.outcome, begun = "transformers cannot run it", time.process_time()
    for part in parts or (None,):
        try:
            families.read(config, 512 if name in WITHOUT_RANGE else None, part)
        except ValueError as error:
            set_outcome(found, "refused by both" if is_proper(error) else "wrong error", error)
        except Exception as error:  # every other error is a finding
            return set_outcome(found, "wrong error", error)
    if time.process_time() - begun > SECONDS:
        set_outcome(
            found,
            "wrong error",
            ValueError(f"a refusal that takes {time.process_time() - begun:.1f} s"),
        )


def chunk(seed: int, first: int, count: int) -> List[Case]:
    """Run some cases in a row; the work of one process."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return [case(seed, number) for number in range(first, first + count)]


def run(seed: int, count: int, jobs: int, first: int = 0) -> Dict[str, Any]:
    """Run `count` cases. Print findings, and return the totals."""
    result: List[Case] = []
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=10
    ) as pool:
        begun = [
            pool.submit(chunk, seed, at, min(TOGETHER, first + count - at))
            for at in range(first, first + count, TOGETHER)
        ]
        for future in begun:
            for each in future.result():
                result.append(each)
                if each.outcome in FINDINGS:
                    print(json.dumps(asdict(each)), flush=True)
    outcomes = collections.Counter(each.outcome for each in result)
    by_type = collections.Counter(
        each.base.split(": ")[0] for each in result if each.outcome == "equal"
    )
    findings = [asdict(each) for each in result if each.outcome in FINDINGS]
    return {
        "seed": seed,
        "first": first,
        "count": len(result),
        "outcomes": dict(outcomes),
        "equal": dict(sorted(by_type.items())),
        "findings": findings,
    }


def main(arguments: Optional[List[str]] = None) -> int:
    """Run the search. Returns the exit status: 0, or 1 if there is a finding."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="print every case")
    options = parser.parse_args(arguments)
    begun = time.time()
    if options.all:
        for number in range(options.first, options.first + options.count):
            print(json.dumps(asdict(chunk(options.seed, number, 1)[0])), flush=True)
        return 0
    totals = run(options.seed, options.count, options.jobs, options.first)
    print({name: value for name, value in totals.items() if name != "findings"})
    print(f"{len(totals['findings'])} findings, {time.time() - begun:.0f} s")
    return 1 if totals["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
