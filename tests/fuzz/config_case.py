"""One case of the random search over configurations: what was changed, and what became of it."""

import traceback
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping

import numpy as np

from tests.fuzz.config_values import DELETED

FINDINGS = ("silent difference", "wrong error", "unexplained decode of transformers")


@dataclass
class Case:
    """One configuration and what became of it.

    Args:
        number: index of the case.
        base: name of the base model, with its type and kind or task.
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


def set_outcome(found: Case, outcome: str, error: Exception) -> None:
    """Set the outcome of a case to that of an error of ours."""
    found.outcome = outcome
    found.said.append(f"ours: {line(error)}")
    if outcome == "wrong error":
        found.said.append("".join(traceback.format_tb(error.__traceback__)[-2:]))


def outcome_of(worst: float, noise: float, defect: str) -> str:
    """Return the outcome of a configuration that both sides run.

    Args:
        worst: largest difference from transformers' full pass, relative to the tolerance.
        noise: the same of transformers' own decode, whose rounding we may exceed by 20 times.
        defect: why that decode may differ.
    """
    if worst > (max(1.0, 20 * noise) if noise <= 1 else 1.0):
        return "silent difference"
    if noise <= 1:
        return "equal"
    return "transformers differs from its own decode" if defect else FINDINGS[2]


def is_proper(error: Exception) -> bool:
    """Return whether an error has one line and the form `where: expected RULE, got VALUE`."""
    said = str(error)
    return "\n" not in said and ": " in said and "expected " in said and "got " in said


def share(both: Any) -> float:
    """Return the largest difference relative to 2e-4 of the largest output, or of 1; infinity
    for outputs that are not finite.
    """
    worst = 0.0
    for result, wanted in both:
        if not np.isfinite(result).all():
            return float("inf")
        worst = max(
            worst,
            float(np.abs(result - wanted).max()) / (2e-4 * max(1.0, float(np.abs(wanted).max()))),
        )
    return worst


def largest(values: Any) -> float:
    """Return the largest number in nested values."""
    if isinstance(values, dict):
        return max((largest(value) for value in values.values()), default=0)
    if isinstance(values, list):
        return max((largest(value) for value in values), default=0)
    return abs(values) if isinstance(values, (int, float)) else 0


def shown(changes: Mapping[str, Any]) -> Dict[str, Any]:
    """Return changed values as they are printed."""
    return {
        key: "(deleted)" if value is DELETED else shown(value) if isinstance(value, dict) else value
        for key, value in changes.items()
    }


def line(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {str(error).strip()[:400]}".replace("\n", " ")
