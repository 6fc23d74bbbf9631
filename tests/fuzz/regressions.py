"""Sequences of calls that once went wrong, as plain data: {"spec", "options", "calls"}, replayed by test_sessions."""

from typing import Any, Dict

FOUND: Dict[str, Dict[str, Any]] = {}
