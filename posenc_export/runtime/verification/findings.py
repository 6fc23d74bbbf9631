"""What a check of the integer part of a graph has found."""

from dataclasses import dataclass, field
from typing import Dict


@dataclass
class Findings:
    """Count of comparisons and proved claims; failures and values without a rule, by place."""

    compared: int = 0
    failures: Dict[str, str] = field(default_factory=dict)
    skipped: Dict[str, str] = field(default_factory=dict)
