"""Audit a graph that others exported: compare it with a reference in every kind of call."""

from posenc_export.auditing.auditor import Audit, AuditedCell, audit

__all__ = ["Audit", "AuditedCell", "audit"]
