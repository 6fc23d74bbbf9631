"""The long fuzzing run: the whole registry on all targets and signatures, with random seeds, for a given time."""

import contextlib
import dataclasses
import io
import json
import random
import time
import warnings
from typing import Any, Dict, Iterator, List

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from posenc_export.encodings import REGISTRY
from posenc_export.export import TARGETS
from tests.fuzz.machine import machine_of
from tests.fuzz.subjects import Spec, subject
from tests.tiny import VARIANTS, works

# Encodings without bidirectional models: one needs a token table of another width, LayerNorm removes the digits of the other (tests/export/test_parity.py).
NO_ENCODER = ("complex_order", "integer")
LINEAR = ("rope", "learned", "nope", "input_rnn", "sinusoidal")
READING = ("rope", "t5", "learned", "input_rnn")
LONG = 600  # number of positions with which caches grow past a bucket
SHORT = 40  # number of positions otherwise
SEQUENCES, CALLS = 12, 30  # sequences of a unit, and calls of a sequence


@dataclasses.dataclass
class Unit:
    """The result of fuzzing one spec.

    Args:
        spec: the artefact.
        seed: seed of hypothesis.
        outcome: "passed", "finding", or the reason why the target cannot represent the module.
        seconds: duration.
        total: Machine.total.
        finding: the error, the smallest sequence of calls that gives it, and hypothesis's blob for reproduction.
    """

    spec: Spec
    seed: int
    outcome: str
    seconds: float
    total: Dict[str, Any] = dataclasses.field(default_factory=dict)
    finding: Dict[str, Any] = dataclasses.field(default_factory=dict)


def groups(chosen: random.Random) -> Iterator[List[Spec]]:
    """Yield groups of specs endlessly. A group shares one module, which is traced once; each round over the registry has a random order."""
    targets = [name for name in TARGETS if name != "ort-cuda"]
    while True:
        modules = [(variant, kind) for variant in VARIANTS for kind in ("decoder", "block") if works(variant, "causal")]
        modules += [(v, "encoder") for v, what in VARIANTS.items() if works(v, "bidirectional") and what["name"] not in NO_ENCODER]
        modules += [(name, "bidirectional") for name in REGISTRY if works(name, "bidirectional")] + [(variant, "linear") for variant in LINEAR]
        modules += [(variant, "reading") for variant in READING]
        chosen.shuffle(modules)
        for variant, kind in modules:
            size = SHORT if kind in ("encoder", "bidirectional") or chosen.random() < 0.7 else LONG
            yield [Spec(variant, kind, t, s, size) for s in ("positions", "mask") for t in targets if s in TARGETS[t].layout]


def run_unit(spec: Spec, number: int) -> Unit:
    """Export an artefact, fuzz its sessions, and shrink a finding."""
    begun = time.monotonic()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of torch and other libraries during export
            machine = machine_of(subject(spec))
    except (ValueError, RuntimeError) as refusal:
        return Unit(spec, number, " ".join(str(refusal).split())[:160], time.monotonic() - begun)
    seed(number)(machine)
    how = settings(
        max_examples=SEQUENCES, stateful_step_count=CALLS, deadline=None, database=None, print_blob=True, report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            run_state_machine_as_test(machine, settings=how)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001  any exception is a finding
            noted = " ".join([said.getvalue(), *getattr(error, "__notes__", [])])
            blob = noted[noted.find("@reproduce_failure") :].split(" as a decorator")[0] if "@reproduce_failure" in noted else ""
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", **machine.record, "blob": blob}
            return Unit(spec, number, "finding", time.monotonic() - begun, machine.total, found)
        finally:
            subject.cache_clear()
    return Unit(spec, number, "passed", time.monotonic() - begun, machine.total)


def run_group(specs: List[Spec], number: int, end: float) -> List[Unit]:
    """Run the specs of one module, as far as they start before `end` (time.time)."""
    done: List[Unit] = []
    for spec in specs:
        if time.time() >= end:
            break
        done.append(run_unit(spec, number))
    return done


def line(unit: Unit) -> str:
    """Format a unit as one line, followed by the data to replay a finding."""
    total = unit.total
    counts = f"{total['sequences']} sequences, {total['calls']} calls, {total['steps']} steps, worst {total['worst']:.2f}" if total else ""
    shown = f"{unit.spec}: seed {unit.seed}, {unit.seconds:.1f} s, {unit.outcome} {counts}".rstrip()
    if not unit.finding:
        return shown
    replayed = {name: unit.finding[name] for name in ("spec", "options", "calls") if name in unit.finding}
    return "\n  ".join((shown, unit.finding["error"], json.dumps(replayed), unit.finding["blob"]))


def summary(units: List[Unit]) -> Dict[str, Any]:
    """Return the totals of all units."""
    driven = [unit for unit in units if unit.total]
    total = {name: sum(unit.total[name] for unit in driven) for name in ("sequences", "calls", "steps", "refused")}
    return {
        **total,
        "worst": max((unit.total["worst"] for unit in driven if unit.outcome == "passed"), default=0.0),
        "artefacts": len({unit.spec for unit in driven}),
        "variants": len({unit.spec.variant for unit in driven}),
        "by_target": {t: sum(unit.total["calls"] for unit in driven if unit.spec.target == t) for t in sorted({u.spec.target for u in driven})},
        "by_signature": {s: sum(unit.total["calls"] for unit in driven if unit.spec.signature == s) for s in sorted({u.spec.signature for u in driven})},
        "cannot_be_exported": sorted({f"{unit.spec}: {unit.outcome}" for unit in units if not unit.total}),
        "findings": [unit.finding for unit in units if unit.finding],
    }
