"""The long fuzzing run: the whole registry on all targets and signatures, with random seeds, for
a given time.
"""

import contextlib
import dataclasses
import io
import json
import random
import time
import warnings
from typing import Any, Iterator, Sequence

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from posenc_export.encodings import REGISTRY
from posenc_export.export.targets import runnable
from posenc_export.runtime.artefact.cache_formats import CACHE_FORMATS, SCALED
from posenc_export.runtime.artefact.schema import TARGETS
from posenc_export.runtime.graphs import cuda
from tests.fuzz.machine import COUNTED, machine_of
from tests.fuzz.subjects import CALIBRATED, FORMS, OWN, Spec, subject
from tests.reading.own_modules import MODULES, READING
from tests.tiny import VARIANTS, works

# Encodings without bidirectional models: one needs a token table of another width, LayerNorm
# removes the digits of the other (tests/export/test_parity.py).
NO_ENCODER = ("complex_order", "integer")
WAYS = ("causal", "bidirectional")
LINEAR = ("rope", "learned", "nope", "input_rnn", "sinusoidal")
WINDOWS = ("rope", "nope", "xpos", "alibi", "input_rnn", "conditional_conv", "rope-partial")
BYTES = ("rope", "alibi", "learned", "rope-partial")
LONG = 600  # number of positions with which caches grow past a bucket
SHORT = 40  # number of positions otherwise
SEQUENCES, CALLS = 12, 30  # sequences of a unit, and calls of a sequence
# Specs of other formats and providers of each module, and formats among them, each of which is
# traced.
DRAWN, FORMATS = (10, 2)


@dataclasses.dataclass
class Unit:
    """The result of fuzzing one spec.

    Args:
        spec: the artefact.
        seed: seed of hypothesis.
        outcome: "passed", "finding", or the reason why the target cannot represent the module.
        seconds: duration.
        total: Machine.total.
        finding: the error, the smallest sequence of calls that gives it, and hypothesis's blob for
            reproduction.
    """

    spec: Spec
    seed: int
    outcome: str
    seconds: float
    total: dict[str, Any] = dataclasses.field(default_factory=dict)
    finding: dict[str, Any] = dataclasses.field(default_factory=dict)


def groups(chosen: random.Random, only: Sequence[str] = ()) -> Iterator[list[Spec]]:
    """Yield groups of specs endlessly. A group shares one module, which is traced once; each round
    over the registry has a random order.

    A module is fuzzed in float32 on every target and signature, and in some of the other formats
    and on some of the other providers.

    Args:
        only: providers; if given, the specs of others are left out.
    """
    present = available()
    while True:
        causal, both = ([v for v in VARIANTS if works(v, way)] for way in WAYS)
        modules = [(variant, kind) for variant in causal for kind in ("decoder", "block")]
        modules += [(v, "encoder") for v in both if VARIANTS[v]["name"] not in NO_ENCODER]
        modules += [(name, "bidirectional") for name in both if name in REGISTRY]
        modules += [(variant, "linear") for variant in LINEAR]
        modules += [(variant, "bytes") for variant in BYTES]
        modules += [(variant, kind) for variant in WINDOWS for kind in ("windows", "chunks")]
        modules += [(variant, kind) for variant in (*MODULES, READING) for kind in OWN]
        chosen.shuffle(modules)
        for variant, kind in modules:
            short = kind in ("encoder", "bidirectional", *OWN) or chosen.random() < 0.7
            # Caches of a window are shorter than others in a long range only.
            size = LONG if kind in ("windows", "chunks") or not short else SHORT
            plain, others = _specs(variant, kind, size, present)
            forms = sorted({spec.form for spec in others} - {"float32"})
            forms = ["float32", *chosen.sample(forms, min(FORMATS, len(forms)))]
            others = [spec for spec in others if spec.form in forms]
            if only:
                plain, others = ([s for s in of if s.provider in only] for of in (plain, others))
            drawn = chosen.sample(others, min(DRAWN, len(others)))
            yield [*plain, *sorted(drawn, key=lambda spec: (spec.form, spec.signature))]


def available() -> list[str]:
    """Return the providers of ONNX graphs besides cpu that this machine has."""
    return ["cuda"] if cuda.obstacle() is None else []


def _specs(
    variant: str, kind: str, size: int, present: Sequence[str]
) -> tuple[list[Spec], list[Spec]]:
    """Return the specs of a module in float32 on the processor, and those in other formats and
    on other providers.
    """
    every = [
        Spec(variant, kind, target, signature, size, form, provider)
        for form, how in FORMS.items()
        for signature in ("positions", "mask")
        for target, able in TARGETS.items()
        if target in runnable()
        for provider in ("cpu", *(present if able.file == "model.onnx" else ()))
        if (target != "ort-cuda" or provider == "cuda") and signature in able.layout
        if provider != "cuda"
        or not ("weights" in how or "cache" in how)  # which run on the CPU only
        if how.get("dtype", "float32") in able.dtypes
        and ("weights" not in how or able.formats)
        and ("cache" not in how or target in CACHE_FORMATS[how["cache"]].targets)
        and (how.get("cache") not in SCALED or kind in CALIBRATED)
        and (kind not in OWN or form == "float32")
    ]
    plain = [spec for spec in every if (spec.form, spec.provider) == ("float32", "cpu")]
    return plain, [spec for spec in every if spec not in plain]


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
        max_examples=SEQUENCES, stateful_step_count=CALLS, deadline=None, database=None,
        print_blob=True, report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()) as said, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            run_state_machine_as_test(machine, settings=how)  # type: ignore[no-untyped-call]
        except Exception as error:
            noted = " ".join([said.getvalue(), *getattr(error, "__notes__", [])])
            _, marker, rest = noted.partition("@reproduce_failure")
            blob = marker + rest.split(" as a decorator")[0]
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            results = {"error": text, **machine.record, "blob": blob}
            return Unit(spec, number, "finding", time.monotonic() - begun, machine.total, results)
        finally:
            subject.cache_clear()
    return Unit(spec, number, "passed", time.monotonic() - begun, machine.total)


def run_group(specs: list[Spec], number: int, end: float) -> list[Unit]:
    """Run the specs of one module, as far as they start before `end` (time.time)."""
    done: list[Unit] = []
    for spec in specs:
        if time.time() >= end:
            break
        done.append(run_unit(spec, number))
    return done


def line(unit: Unit) -> str:
    """Format a unit as one line, followed by the data to replay a finding."""
    shown = f"{unit.spec}: seed {unit.seed}, {unit.seconds:.1f} s, {unit.outcome}"
    if total := unit.total:
        counts = ", ".join(f"{total[name]} {name}" for name in ("sequences", "calls", "steps"))
        shown += f" {counts}, worst {_worst([unit])}"
    if not unit.finding:
        return shown
    names = ("spec", "options", "calls")
    replayed = {name: unit.finding[name] for name in names if name in unit.finding}
    return "\n  ".join((shown, unit.finding["error"], json.dumps(replayed), unit.finding["blob"]))


def summary(units: list[Unit]) -> dict[str, Any]:
    """Return the totals of all units."""
    driven = [unit for unit in units if unit.total]
    total = {name: sum(unit.total[name] for unit in driven) for name in ("sequences", *COUNTED)}
    passed: dict[str, list[Unit]] = {}
    for unit in driven:
        passed.setdefault(unit.spec.form, []).extend([unit] * (unit.outcome == "passed"))
    axes = ("target", "signature", "form", "provider", "kind")
    return {
        **total,
        "worst": {form: _worst(units) for form, units in sorted(passed.items())},
        "artefacts": len({unit.spec for unit in driven}),
        "variants": len({unit.spec.variant for unit in driven}),
        **{f"by_{name}": _calls(driven, name) for name in axes},
        "cannot_be_exported": sorted({f"{u.spec}: {u.outcome}" for u in units if not u.total}),
        "findings": [unit.finding for unit in units if unit.finding],
    }


def _worst(units: list[Unit]) -> dict[str, float]:
    """Return the worst errors of some units relative to their bounds, by reference."""
    names = sorted({name for unit in units for name in unit.total["worst"]})
    return {
        name: round(max(unit.total["worst"].get(name, 0.0) for unit in units), 2) for name in names
    }


def _calls(units: list[Unit], name: str) -> dict[str, int]:
    """Return the number of calls by value of a field of Spec."""
    result: dict[str, int] = {}
    for unit in units:
        value = str(getattr(unit.spec, name))
        result[value] = result.get(value, 0) + unit.total["calls"]
    return dict(sorted(result.items()))
