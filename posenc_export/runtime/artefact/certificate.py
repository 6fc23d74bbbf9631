"""Certificates: the errors measured on an artefact, and whether they are within their tolerances."""

from typing import Annotated, Any, Dict, Literal, Mapping, TypedDict

import msgspec
from msgspec import Meta, Struct

from posenc_export.runtime.artefact.schema import Finite, Text

FAILED = 1e300  # stored as the error of an output with NaN or infinity, which JSON cannot represent

Printable = Annotated[str, Meta(pattern=r"^[ -~]{1,256}\Z")]


class Certificate(Struct, frozen=True, forbid_unknown_fields=True):
    """Errors measured on an artefact.

    Args:
        passed: whether all errors are within `tolerance`.
        tolerance: bound of the errors, relative to the largest output.
        provider: as `load` takes it, never "auto".
        machine: processor or GPU, and the library that ran the graph.
        cells: error by name of a cell of the grid (numerics.cell_error).
        against: the oracle that the module was compared with.
        bounds: tolerance of the cells whose tolerance is not `tolerance`: divisions into calls that are compared with the artefact's own full pass, and cells that
            compare the module with its oracle.
        failures: by name of a cell, the message of the graph that failed in it.
        unreached: edges of the model that no cell reached, with the reason.
        grid: "whole", or "quick" for one scenario of each kind of call (verification.cells.QUICK).
    """

    passed: bool
    tolerance: Finite
    provider: Text
    machine: Annotated[str, Meta(max_length=256)]
    cells: Annotated[Dict[str, Finite], Meta(min_length=1, max_length=65536)]
    against: Text = ""
    bounds: Annotated[Dict[str, Finite], Meta(max_length=65536)] = msgspec.field(
        default_factory=dict
    )
    failures: Annotated[Dict[str, str], Meta(max_length=65536)] = msgspec.field(
        default_factory=dict
    )
    grid: Literal["whole", "quick"] = "whole"
    unreached: Annotated[Dict[Printable, Printable], Meta(max_length=256)] = msgspec.field(default_factory=dict)


class Proof(TypedDict):
    """A certificate as returned by `verify`; see Certificate for the fields."""

    passed: bool
    tolerance: float
    provider: str
    machine: str
    cells: Dict[str, float]
    bounds: Dict[str, float]
    failures: Dict[str, str]
    grid: str
    unreached: Dict[str, str]


def format_worst_error(error: float) -> str:
    """Format an error with two digits; "NaN" if an output was not finite."""
    return f"{error:.1e}" if error < FAILED else "NaN"


def format_unreached(certificate: Mapping[str, Any]) -> str:
    """Format the edges that no cell reached, with the reasons, in one line; empty if there are none."""
    named = certificate.get("unreached", {}).items()
    return ", ".join(f"{name} ({reason})" for name, reason in named)


def bound_of(certificate: Mapping[str, Any], cell: str) -> float:
    """Return the tolerance of a cell of a certificate."""
    return float(certificate.get("bounds", {}).get(cell, certificate["tolerance"]))


def passes(certificate: Mapping[str, Any]) -> bool:
    """Whether every cell of a certificate is within its tolerance."""
    return all(error <= bound_of(certificate, cell) for cell, error in certificate["cells"].items())


def worst_cell(certificate: Mapping[str, Any]) -> str:
    """Return the cell of a certificate with the largest error, relative to its tolerance."""
    return max(
        certificate["cells"],
        key=lambda cell: certificate["cells"][cell] / (bound_of(certificate, cell) or 1.0),
    )


def format_cell(certificate: Mapping[str, Any], cell: str) -> str:
    """Format the error of a cell: the message of the graph if it failed, otherwise as format_worst_error."""
    return str(
        certificate.get("failures", {}).get(cell) or format_worst_error(certificate["cells"][cell])
    )
