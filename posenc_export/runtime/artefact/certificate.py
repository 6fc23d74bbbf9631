"""Certificates: errors measured on an artefact, and whether they are within tolerance."""

import itertools
from typing import Annotated, Any, Literal, Mapping, NotRequired, TypedDict

from msgspec import Meta, Struct, structs

from posenc_export.runtime.artefact.records import Finite, Text

FAILED = 1e300  # stored as the error of an output with NaN or infinity, which JSON cannot represent
FINITE = 1e299  # stored as the tolerance of a cell whose outputs only have to be finite
# Prefixes of the cells of an artefact that rounds activations: of its float32 form
# (verification/float32_form.py), and of the artefact as exported.
FORM, EXPORTED = "float32 form: ", "as exported: "
# Prefixes of the cells that are measured at export only: of the formula, and, by earlier versions,
# of a reduced model.
AT_EXPORT = ("oracle, ", "reduced model, ")
Printable = Annotated[str, Meta(pattern=r"^[ -~]{1,256}\Z")]

MOST_FAILURES = 16  # failures of a check that are stored


class Check(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the proof beside the grid, such as the comparison of all stored numbers."""

    compared: Annotated[int, Meta(ge=0, le=2**53)]  # number of values, in the unit of `unit`
    unit: Text  # what was compared, in the plural, such as "numbers" or "calls"
    worst: Finite = 0.0  # largest error relative to its bound; 0 if the comparison is exact
    # By place in the artefact, what is wrong there.
    # The first MOST_FAILURES are kept.
    failures: Annotated[dict[str, str], Meta(max_length=MOST_FAILURES)] = {}
    skipped: Annotated[dict[str, str], Meta(max_length=65536)] = {}  # by place, the reason

    def __post_init__(self) -> None:
        kept = dict(itertools.islice(self.failures.items(), MOST_FAILURES))
        structs.force_setattr(self, "failures", kept)


CHECKS = Annotated[dict[Text, Check], Meta(max_length=16)]  # by name


class Proof(TypedDict):
    """Errors measured on an artefact, as `verify` returns and a manifest stores them."""

    passed: bool  # whether all errors are within their tolerances
    # Bound of the errors, relative to the largest output; that of the float32 form if the artefact
    # rounds activations.
    tolerance: Finite
    provider: Text  # as `load` takes it, never "auto"
    # Processor or GPU, and the library that ran the graph.
    machine: Annotated[str, Meta(max_length=256)]
    # Error by name of a cell of the grid (numerics.cell_error).
    cells: Annotated[dict[str, Finite], Meta(min_length=1, max_length=65536)]
    against: NotRequired[Text]  # the oracle that the module was compared with
    # Tolerances of cells that differ from `tolerance`: of those that round, as exported.
    bounds: NotRequired[Annotated[dict[str, Finite], Meta(max_length=65536)]]
    # By name of a cell, the message of the graph that failed in it.
    failures: NotRequired[Annotated[dict[str, str], Meta(max_length=65536)]]
    # "quick" has one scenario of each kind of call (verification.scenarios.Level).
    grid: NotRequired[Literal["whole", "quick"]]
    # Edges of the model that no cell reached, with the reason.
    unreached: NotRequired[Annotated[dict[Printable, Printable], Meta(max_length=256)]]
    checks: NotRequired[dict[str, dict[str, Any]]]  # beside the grid, CHECKS as plain data


def format_worst_error(error: float) -> str:
    """Format an error with two digits; "NaN" if an output was not finite."""
    return f"{error:.1e}" if error < FAILED else "NaN"


def format_bound(certificate: Mapping[str, Any], cell: str) -> str:
    """Format the tolerance of a cell; "finite" if its outputs only have to be finite."""
    bound = bound_of(certificate, cell)
    return f"{bound:.1e}" if bound < FINITE else "finite"


def format_unreached(certificate: Mapping[str, Any]) -> str:
    """Format the edges that no cell reached, with the reasons; empty if there are none."""
    named = certificate.get("unreached", {}).items()
    return ", ".join(f"{name} ({reason})" for name, reason in named)


def bound_of(certificate: Mapping[str, Any], cell: str) -> float:
    """Return the tolerance of a cell of a certificate."""
    return float(certificate.get("bounds", {}).get(cell, certificate["tolerance"]))


def passes(certificate: Mapping[str, Any]) -> bool:
    """Whether every cell of a certificate is within its tolerance, and no check has a failure."""
    return not failed_checks(certificate) and all(
        error <= bound_of(certificate, cell) for cell, error in certificate["cells"].items()
    )


def format_unproved(certificate: Mapping[str, Any]) -> str:
    """Format the checks that compared nothing, with the first reason; empty if there are none."""
    checks = certificate.get("checks", {}).items()
    nothing = {name: check["skipped"] for name, check in checks if not check["compared"]}
    reasons = {name: next(iter(skipped.items()), None) for name, skipped in nothing.items()}
    texts = {name: f" ({': '.join(reason)})" if reason else "" for name, reason in reasons.items()}
    return ", ".join(f"{name}{text}" for name, text in texts.items())


def failed_checks(certificate: Mapping[str, Any]) -> dict[str, str]:
    """Return the first failure of each check that has one, by name of the check."""
    checks = certificate.get("checks", {}).items()
    first = {name: next(iter(check["failures"].items()), None) for name, check in checks}
    return {name: f"{item[0]}: {item[1]}" for name, item in first.items() if item is not None}


def count_cells(certificate: Mapping[str, Any]) -> int:
    """Return the number of cells that call the artefact itself. `verify` measures as many."""
    return sum(not any(part in cell for part in AT_EXPORT) for cell in certificate["cells"])


def worst_cell(certificate: Mapping[str, Any]) -> str:
    """Return the cell of a certificate with the largest error, relative to its tolerance."""
    cells = certificate["cells"]
    return max(cells, key=lambda cell: cells[cell] / (bound_of(certificate, cell) or 1.0))


def exported_error(certificate: Mapping[str, Any]) -> float | None:
    """Return the largest error as exported, of an artefact that rounds activations, or None."""
    cells = certificate["cells"].items()
    return max((error for name, error in cells if name.startswith(EXPORTED)), default=None)


def format_worst_cell(certificate: Mapping[str, Any]) -> str:
    """Format the error of the worst cell, and the largest error as exported."""
    worst, exported = worst_cell(certificate), exported_error(certificate)
    of_exported = "" if exported is None else f" ({format_worst_error(exported)} as exported)"
    return f"{format_cell(certificate, worst)}{of_exported}"


def format_cell(certificate: Mapping[str, Any], cell: str) -> str:
    """Format the error of a cell, or the message of the graph if it failed."""
    failure = certificate.get("failures", {}).get(cell)
    return str(failure or format_worst_error(certificate["cells"][cell]))
