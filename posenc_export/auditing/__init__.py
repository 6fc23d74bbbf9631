"""Audit a graph that others exported: compare it with a reference in every kind of call."""

from posenc_export.auditing.auditor import audit
from posenc_export.auditing.result import Audit, AuditedCell

__all__ = ["Audit", "AuditedCell", "audit"]
