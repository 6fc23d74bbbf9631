"""What the inputs and outputs of a graph mean that somebody else exported: found by name, dtype and
shape, or given in a file.

Shapes: B batch, S new tokens, P past, T = P + S, M capacity.
"""

import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, Union

import msgspec

from posenc_export.shared.refusal import refusal

Axis = Union[int, str, None]
WHERE = "audit"
FILE = "give --inputs FILE"


class NotPossible(Exception):
    """Raised for a call that the inputs or the operators of a graph cannot express."""


class NotUnrounded(Exception):
    """Raised for a graph whose float32 form is not known, with the reason."""


@dataclass(frozen=True)
class Value:
    """An input or output: name, numpy's name of the dtype, and axes, symbolic ones as strings."""

    name: str
    dtype: str
    axes: Tuple[Axis, ...]

    def __str__(self) -> str:
        axes = ",".join("?" if axis is None else str(axis) for axis in self.axes)
        return f"{self.dtype} [{axes}]"

    @property
    def held(self) -> str:
        """The dtype of its arrays: float32 for bfloat16, which numpy lacks."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def whole(self) -> bool:
        """Whether it holds whole numbers."""
        return self.dtype.startswith(("int", "uint"))


@dataclass(frozen=True)
class Cache:
    """A cache: the input that holds it, and the output that a call returns for the next."""

    past: Value
    present: str
    rows: int  # axis of the batch
    slots: int  # axis of the tokens; -1 for a state that every call replaces

    @property
    def capacity(self) -> int:
        """Number of slots of a static cache; 0 if the cache grows."""
        size = self.past.axes[self.slots] if self.slots >= 0 else 0
        return size if isinstance(size, int) else 0


UNREAD = "unread"
# Meanings, by the name that transformers uses if it has one: what the input holds, and a regular
# expression of the names that exporters give it.
MEANINGS = {
    "input_ids": ("token ids [B,S]", r"(decoder_)?input_ids|tokens?|token_ids|ids"),
    "hidden_states": ("hidden states [B,S,E]", r"inputs_embeds|hidden_states?|embed(ding)?s|x"),
    "attention_mask": (
        "1 at tokens, 0 at padding",
        r"(decoder_)?attention_mask|(\w+_)?mask(_\w+)?",
    ),
    "position_ids": ("positions of the tokens", r"(decoder_)?pos(ition)?s?(_ids)?|input_pos\w*"),
    "cache_position": ("slots of the new tokens in the cache", r"cache_positions?|write_index"),
    "past_length": ("number of cached tokens", r"past_(sequence|seq|key_values|kv)?_?len(gth)?s?"),
    "last_index": ("number of valid tokens of each row, less 1", "seqlens_k"),
    "first_position": ("position of the first token of each row", "first_position"),
    "total_length": ("number of cached and new tokens", r"total_(sequence|seq)_len(gth)?"),
    "use_cache_branch": ("whether the cache is read", "use_cache_branch"),
    "token_type_ids": ("segments, 0 everywhere", "token_type_ids|segment_ids|token_types"),
    "logits_to_keep": ("0 for the outputs of all tokens", "(num_)?logits_to_keep"),
    "logits_index": ("columns of the tokens whose outputs are returned: all", "logits_index"),
    UNREAD: ("anything: an output repeats it, and nothing else reads it", "$."),
}


@dataclass(frozen=True)
class Interface:
    """How a graph is called."""

    # By meaning (MEANINGS), besides caches. Several masks have a number behind their meaning.
    inputs: Dict[str, Value]
    caches: Tuple[Cache, ...]  # in the order of the inputs
    output: Value  # the output that is compared
    # "left" if rows of different lengths are aligned at their ends, as transformers does; "right"
    # if the graph counts the tokens of a row (GroupQueryAttention); "none" without a mask.
    padding: str = "none"

    @property
    def tokens(self) -> Value:
        """The input of token ids or hidden states."""
        return self.inputs.get("input_ids") or self.inputs["hidden_states"]

    @property
    def batch(self) -> int:
        """Number of rows, if it is fixed; otherwise 0."""
        rows = self.tokens.axes[0]
        return rows if isinstance(rows, int) else 0

    @property
    def length(self) -> int:
        """Number of new tokens of a call, if it is fixed; otherwise 0."""
        length = self.tokens.axes[1]
        return length if isinstance(length, int) else 0

    @property
    def capacity(self) -> int:
        """Number of slots of static caches; 0 if they grow or there are none."""
        return min((cache.capacity for cache in self.caches if cache.capacity), default=0)

    def of(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> "Interface":
        """Return it with the dtypes of another graph of the same inputs and outputs."""
        known = {value.name: value.dtype for value in (*inputs, *outputs)}

        def typed(value: Value) -> Value:
            return replace(value, dtype=known[value.name])

        named = {meaning: typed(value) for meaning, value in self.inputs.items()}
        caches = tuple(replace(cache, past=typed(cache.past)) for cache in self.caches)
        return replace(self, inputs=named, caches=caches, output=typed(self.output))

    def rows(self) -> List[Dict[str, str]]:
        """Return the table of inputs and outputs, caches of all layers in one row."""
        rows = []
        for meaning, value in self.inputs.items():
            holds = MEANINGS[meaning.split(" ")[0]][0]
            rows.append({"name": value.name, "type": str(value), "meaning": holds})
        grouped: Dict[Tuple[str, int, int], List[Cache]] = {}
        for cache in self.caches:
            grouped.setdefault((str(cache.past), cache.rows, cache.slots), []).append(cache)
        for caches in grouped.values():
            first, count = caches[0], f"{len(caches)} caches, " if len(caches) > 1 else ""
            kind = f"tokens on axis {first.slots}"
            if first.slots < 0:
                kind = "replaced by every call"
            elif first.capacity:
                kind += f", of fixed size {first.capacity}"
            names = f"{first.past.name} -> {first.present}"
            rows.append({"name": names, "type": str(first.past), "meaning": f"{count}{kind}"})
        output = self.output
        rows.append({"name": output.name, "type": str(output), "meaning": "compared output"})
        return rows


class GivenCache(msgspec.Struct, forbid_unknown_fields=True):
    """What a file says about a cache: the output for the next call, the axis of the batch, and that
    of the tokens, -1 for a state that every call replaces.
    """

    present: Optional[str] = None
    rows: Optional[int] = None
    slots: Optional[int] = None


class Given(msgspec.Struct, forbid_unknown_fields=True):
    """What a file says: meanings (MEANINGS) of inputs by name, caches by name, the output that is
    compared, and where padding is if there is a mask.
    """

    inputs: Dict[str, str] = {}
    caches: Dict[str, GivenCache] = {}
    output: Optional[str] = None
    padding: Optional[Literal["left", "right"]] = None


def given(source: Union[str, Path, Mapping[str, Any], None]) -> Given:
    """Return what a JSON or TOML file of inputs says, or its content. Raise ValueError for another
    key or type, or an unknown meaning.
    """
    content, place = source, "inputs" if isinstance(source, Mapping) else str(source)
    try:
        if source is not None and not isinstance(source, Mapping):
            text = Path(source).read_text("utf-8")
            content = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        said = msgspec.convert(content or {}, Given)
    except ValueError as error:  # msgspec's, too
        rule = "a JSON or TOML file of inputs, caches, output and padding"
        raise refusal(WHERE, rule, f"{place} ({error})", "correct it") from None
    for name, meaning in said.inputs.items():
        if meaning not in MEANINGS:
            rule = f"the meaning of {name} in {place} to be one of {', '.join(MEANINGS)}"
            raise refusal(WHERE, rule, meaning, "correct it")
    return said
