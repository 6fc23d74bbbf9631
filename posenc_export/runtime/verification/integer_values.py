"""Compare values of the integer part of a graph with their rules, call by call."""

from dataclasses import dataclass, field
from typing import Dict, Sequence, Tuple

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest
from posenc_export.runtime.verification import described, integer_rules
from posenc_export.runtime.verification.integer_calls import Places

BIAS = 1e-5  # largest error of a bias in float32, relative to 1 + |bias|
PARTLY = "holds a part of the keys"


@dataclass(frozen=True)
class Role:
    """What a value of the integer part is for."""

    place: str  # name in the certificate
    axes: integer_rules.Layout  # layout of the value
    layers: Tuple[int, ...] = ()  # layers whose mask it is; empty for an integer
    # Layer and window of attention nodes that hide keys themselves; 0 for all up to the query
    windows: Tuple[Tuple[int, int], ...] = ()
    allowed: Tuple[str, ...] = ()  # names of the rules that it may follow; empty for any
    rows: int = -1  # rows of the table that it is an index of, or -1
    in_windows: bool = False  # whether its keys are those in caches of windows


@dataclass
class Findings:
    """Count of compared values; failures and values without a rule, by place."""

    compared: int = 0
    failures: Dict[str, str] = field(default_factory=dict)
    skipped: Dict[str, str] = field(default_factory=dict)


class Tally:
    """Compares a value with its role, call by call. biases: by layer, of bias_tables.tables."""

    def __init__(self, role: Role, biases: Sequence[Tuple[np.ndarray, ...]]) -> None:
        self.role, self.fault, self.unknown = role, "", ""
        of_layers = [biases[layer] for layer in role.layers if layer < len(biases)]
        self.biases = [table for tables in of_layers for table in tables]
        self.agreed: Dict[str, Tuple[int, int]] = {}
        self.began = False

    def add(self, manifest: Manifest, value: np.ndarray, places: Places) -> None:
        """Compare the value in one call."""
        places = places.in_windows if self.role.in_windows else places
        keys = [n for n, a in zip(value.shape, self.role.axes, strict=True) if a == "t"]
        if any(count != places.keys.shape[1] for count in keys):
            self.unknown = PARTLY
        if self.fault or self.unknown == PARTLY:
            return
        if self.role.layers:
            self.fault = self._mask_fault(manifest, value, places)
        else:
            self._count(manifest, value, places)

    def _mask_fault(self, manifest: Manifest, value: np.ndarray, places: Places) -> str:
        by_head = self._by_head(value, places)
        hidden = np.isnan(by_head) | (by_head < integer_rules.HIDDEN)
        if hidden.shape[1] > 1 and (hidden != hidden[:, :1]).any():
            return "heads hide different keys"
        whole = np.broadcast_to(hidden[:, 0], (*places.queries.shape, places.keys.shape[1]))
        return self._visibility_fault(manifest, whole, places) or self._bias_fault(by_head, places)

    def _visibility_fault(self, manifest: Manifest, hidden: np.ndarray, places: Places) -> str:
        """Return which key a mask [B,S,T] wrongly shows or hides to a query that is no padding."""
        parts, windows = described.attentions(manifest), dict(self.role.windows)
        for layer in self.role.layers:
            if layer >= len(parts):
                return f"layer {layer} reads the mask, but the config describes {len(parts)} layers"
            seen = ~hidden
            if layer in windows:  # otherwise the mask alone decides
                slots = np.arange(hidden.shape[2])
                own = (places.first[:, None] + np.arange(hidden.shape[1]))[:, :, None]
                seen = seen & (slots <= own)
                if windows[layer]:
                    seen = seen & (own - slots < windows[layer])
            wrong = seen != described.visible(parts[layer], places.queries, places.keys)
            wrong &= places.queries[:, :, None] >= 0
            if wrong.any():
                row, column, key = (int(index[0]) for index in np.nonzero(wrong))
                verb = "seen" if seen[row, column, key] else "hidden"
                at = f"query at position {places.queries[row, column]}"
                of = f"key in slot {key} at position {places.keys[row, key]}"
                cached = f"{places.call.cached[row]} cached and {places.call.new[row]} new tokens"
                return f"layer {layer}, {cached}: {of} is {verb} by the {at}"
        return ""

    def _by_head(self, value: np.ndarray, places: Places) -> np.ndarray:
        """Return a mask as [B or 1,heads or 1,S or 1,T]."""
        axes = list(self.role.axes)
        heads = next((n for n, axis in enumerate(axes) if axis not in (*"bst", "1")), None)
        order = [axes.index(a) if a in axes else None for a in "b"] + [heads]
        order += [axes.index(a) if a in axes else None for a in "st"]
        shape = [1 if index is None else value.shape[index] for index in order]
        return value.transpose(
            [index for index in order if index is not None]
            + [index for index in range(value.ndim) if index not in order]
        ).reshape(shape)

    def _bias_fault(self, value: np.ndarray, places: Places) -> str:
        if not self.biases and not value.any(where=np.isfinite(value)):
            return ""
        if not self.biases:
            self.unknown = "a bias whose formula is not known here: only hidden keys are compared"
            return ""
        q, k = places.queries[:, :, None], places.keys[:, None, :]
        seen, behind = (q >= 0) & (k >= 0) & (k <= q), q - k
        most = self.biases[0].shape[1] - 1
        index = np.clip(behind, 0, most)
        for head in range(value.shape[1]):
            numbers = np.broadcast_to(value[:, head], behind.shape)
            wrong = seen & np.isfinite(numbers)
            for table in self.biases:
                expected = table[head].astype(np.float32)[index]
                wrong &= np.abs(numbers - expected) > BIAS * (1 + np.abs(expected))
            if wrong.any():
                at = tuple(int(part[0]) for part in np.nonzero(wrong))
                return f"bias of head {head} at distance {behind[at]}: got {numbers[at]:g}"
        return ""

    def _count(self, manifest: Manifest, value: np.ndarray, places: Places) -> None:
        role, counts = self.role, dict(self.agreed)
        rows = None if role.rows < 0 else role.rows
        for rule in integer_rules.integers(manifest, places, rows):
            if rule.name not in (counts if self.began else role.allowed or (rule.name,)):
                continue
            counted = integer_rules.agreement(value, rule, role.axes, places)
            if counted is not None:
                before = counts.get(rule.name, (0, 0))
                counts[rule.name] = before[0] + counted[0], before[1] + counted[1]
        exact = {name: pair for name, pair in counts.items() if pair[0] == pair[1]}
        self.agreed, self.began = exact or (counts if role.allowed else {}), True

    def finish(self, findings: Findings) -> None:
        """Record a failure, or that no rule was recognised."""
        role = self.role
        if not (self.fault or self.unknown or role.layers):
            best = max(self.agreed, key=lambda name: self.agreed[name][0], default="")
            same, counted = self.agreed.get(best, (0, 0))
            if role.allowed and (not best or same < counted):
                rule = best or " or ".join(role.allowed)
                self.fault = f"{rule}: {counted - same} of {counted} values differ"
            elif not best or same < counted:
                self.unknown = "follows no rule that is known"
        if self.fault:
            findings.failures[role.place] = self.fault
        elif self.unknown:
            findings.skipped[role.place] = self.unknown
