"""Audit a graph that others exported: compare it with a reference in every kind of call.

Public names are imported on first use: the process that runs a graph needs no torch for it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posenc_export.auditing.answer import Audit, AuditedCell
    from posenc_export.auditing.auditor import audit

__all__ = ["Audit", "AuditedCell", "audit"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module posenc_export.auditing has no attribute {name!r}")
    from posenc_export.auditing import auditor

    return getattr(auditor, name)
