"""What the inputs and outputs of a graph mean that somebody else exported: found by name, dtype and
shape, or given in a file.

Shapes: B batch, S new tokens, P past, T = P + S, M capacity.
"""

import json
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Collection, Literal, Mapping, Sequence

import msgspec

from posenc_export.shared.refusal import refusal

Axis = int | str | None
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
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        axes = ",".join("?" if axis is None else str(axis) for axis in self.axes)
        return f"{self.dtype} [{axes}]"

    @property
    def held(self) -> str:
        """The dtype of its arrays: float32 for bfloat16, which numpy lacks."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    def wide(self) -> "Value":
        """Return it in float32 if it is in half precision."""
        return replace(self, dtype="float32") if self.dtype.endswith("float16") else self

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

DTYPES = re.compile("b?float16|float32|float64|u?int(8|16|32|64)|bool")
RECURRENT = re.compile(r"conv|ssm|recurrent")  # in names of states that every call replaces
# Of inputs of whole numbers; others have at most 2.
RANKS = {"input_ids": (2,), "position_ids": (1, 2, 3), "first_position": (1, 2)}
RANKS |= {"token_type_ids": (1, 2), "logits_index": (1, 2)}
OUTPUTS = ("logits", "last_hidden_state", "hidden_states", "output")
PRESENT = (
    ("past_key_values", "present"),
    ("past_key_values", "present_key_values"),
    ("past_", "present_"),
    ("input.", "output."),
    ("past", "present"),
    ("", "present_"),
    ("", "new_"),
    ("", "updated_"),
)
SUFFIXES = ("_out", "_output", ".out", "_new", "_present")


@dataclass(frozen=True)
class Interface:
    """How a graph is called."""

    # By meaning (MEANINGS), besides caches. Several masks have a number behind their meaning.
    inputs: dict[str, Value]
    caches: tuple[Cache, ...]  # in the order of the inputs
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

    def wide(self) -> "Interface":
        """Return it with inputs in float32 in place of half precision, as of a float32 form."""
        named = {meaning: value.wide() for meaning, value in self.inputs.items()}
        caches = tuple(replace(cache, past=cache.past.wide()) for cache in self.caches)
        return replace(self, inputs=named, caches=caches)

    def rows(self) -> list[dict[str, str]]:
        """Return the table of inputs and outputs, caches of all layers in one row."""
        rows = []
        for meaning, value in self.inputs.items():
            holds = MEANINGS[meaning.split(" ")[0]][0]
            rows.append({"name": value.name, "type": str(value), "meaning": holds})
        grouped: dict[tuple[str, int, int], list[Cache]] = {}
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

    present: str | None = None
    rows: int | None = None
    slots: int | None = None


class Given(msgspec.Struct, forbid_unknown_fields=True):
    """What a file says: meanings (MEANINGS) of inputs by name, caches by name, the output that is
    compared, and where padding is if there is a mask.
    """

    inputs: dict[str, str] = {}
    caches: dict[str, GivenCache] = {}
    output: str | None = None
    padding: Literal["left", "right"] | None = None


def given(source: str | Path | Mapping[str, Any] | None) -> Given:
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


def interface_of(
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    given: Given = Given(),
    counts_rows: bool = False,
    unread: Collection[str] = (),
) -> Interface:
    """Find out how a graph is called.

    Args:
        given: what a user says about them.
        counts_rows: whether the graph has nodes that count the tokens of each row
            (GroupQueryAttention), so that padding belongs behind them.
        unread: names of inputs that no node reads.

    Raises:
        ValueError: no tokens, no output, an input without a meaning, a cache whose output or axes
            are not clear, or something given that the graph does not have.
    """
    named = _by_name(inputs, given.inputs)
    for value in inputs:
        if value.name in unread and len(value.axes) < 2 and value not in named.values():
            named[f"{UNREAD} {value.name}"] = value
    rest = [value for value in inputs if value not in named.values()]
    if "input_ids" not in named and "hidden_states" not in named:
        _add_tokens(named, rest, inputs)
    output = _output(outputs, given.output)
    others = [value for value in outputs if value.name != output.name]
    caches = _caches(rest, others, given.caches)
    for value in (*named.values(), *(cache.past for cache in caches)):
        if not DTYPES.fullmatch(value.dtype):
            rule = "inputs of floats, whole numbers or bool"
            raise refusal(WHERE, rule, f"{value.name} {value}", "give another graph")
    if {"input_ids", "hidden_states"} <= named.keys():
        got = f"{named['input_ids'].name} and {named['hidden_states'].name}"
        raise refusal(WHERE, "token ids or hidden states", got, "export a graph with one of them")
    masked = "attention_mask" in named or "last_index" in named
    if given.padding and not masked:
        got = f"{given.padding} for a graph without attention_mask or seqlens_k"
        raise refusal(WHERE, "no padding in --inputs", got, "leave it out")
    padding = given.padding or ("right" if counts_rows else "left")
    return Interface(named, caches, output, padding if masked else "none")


def _by_name(inputs: Sequence[Value], given: Mapping[str, str]) -> dict[str, Value]:
    """Return the inputs whose meaning their names say, by meaning."""
    named: dict[str, Value] = {}
    by_name = {value.name: value for value in inputs}
    for name, meaning in given.items():
        if name not in by_name:
            rule = f"an input {name!r}, which --inputs names"
            raise refusal(WHERE, rule, f"only {', '.join(by_name)}", "correct the file")
        if meaning in named or not _fits(meaning, by_name[name]):
            rule = f"one input for {meaning} in --inputs, of its dtype and rank"
            raise refusal(WHERE, rule, f"{name} {by_name[name]}", "correct the file")
        named[meaning] = by_name[name]
    for meaning, (_, pattern) in MEANINGS.items():
        for value in inputs:
            fits = re.fullmatch(pattern, value.name.lower()) and _fits(meaning, value)
            if not fits or value in named.values():
                continue
            if meaning == "attention_mask" and meaning in named:
                named[f"{meaning} {len(named)}"] = value
            else:
                named.setdefault(meaning, value)
    return named


def _fits(meaning: str, value: Value) -> bool:
    rank = len(value.axes)
    if meaning == "hidden_states":
        return not value.whole and value.dtype != "bool" and rank == 3
    if meaning == "attention_mask":
        return rank in (2, 4)
    if meaning in ("use_cache_branch", UNREAD):
        return True
    return value.whole and rank in RANKS.get(meaning, (0, 1, 2))


def _add_tokens(named: dict[str, Value], rest: list[Value], inputs: Sequence[Value]) -> None:
    """Add the tokens: the only input of whole numbers [B,S], or the only float input [B,S,E]."""
    for meaning, fitting in (
        ("input_ids", [value for value in rest if value.whole and len(value.axes) == 2]),
        ("hidden_states", [value for value in rest if _fits("hidden_states", value)]),
    ):
        if len(fitting) == 1:
            named[meaning] = fitting[0]
            rest.remove(fitting[0])
            return
    names = ", ".join(f"{value.name} {value}" for value in inputs)
    remedy = f'{FILE} with {{"inputs": {{NAME: "input_ids"}}}} or "hidden_states"'
    raise refusal(WHERE, "an input of token ids or hidden states", names, remedy)


def _output(outputs: Sequence[Value], given: str | None) -> Value:
    by_name = {value.name: value for value in outputs}
    for name in (given,) if given else OUTPUTS:
        if name in by_name:
            return by_name[name]
    fitting = [value for value in outputs if not value.whole and len(value.axes) == 3]
    if not given and (len(fitting) == 1 or (fitting and fitting[0] is outputs[0])):
        return fitting[0]
    names = ", ".join(f"{value.name} {value}" for value in outputs) or "none"
    remedy = f'{FILE} with {{"output": NAME}}'
    raise refusal(WHERE, f"an output {given or ' or '.join(OUTPUTS)}", names, remedy)


def _caches(
    rest: Sequence[Value], outputs: Sequence[Value], given: Mapping[str, GivenCache]
) -> tuple[Cache, ...]:
    """Pair the inputs without another meaning with the outputs of the next call's caches."""
    by_name = {value.name: value for value in outputs}
    pairs = {value.name: _present(value.name, by_name) for value in rest}
    pasts, presents = [*given], [how.present for how in given.values() if how.present]
    if not pairs.keys() >= {*pasts} or not by_name.keys() >= {*presents}:
        rule = f"caches in --inputs among {', '.join(pairs) or 'none'}"
        rule += f", and present among {', '.join(by_name) or 'none'}"
        raise refusal(WHERE, rule, ", ".join(pasts + presents), "correct the file")
    for value in rest:
        if len(value.axes) < 3 and value.name not in given and not pairs[value.name]:
            remedy = f'{FILE} with {{"inputs": {{"{value.name}": MEANING}}}}, MEANING one of '
            got, remedy = f"{value.name} {value}", remedy + ", ".join(MEANINGS)
            raise refusal(WHERE, "a known input", got, remedy)
    pairs |= {name: how.present for name, how in given.items() if how.present}
    if None in pairs.values():  # names say nothing: the order does, if the shapes agree
        in_order = [value for value in outputs if len(value.axes) >= 3]
        if len(in_order) != len(rest):
            missing = next(name for name, present in pairs.items() if present is None)
            remedy = f'{FILE} with {{"caches": {{"{missing}": {{"present": OUTPUT}}}}}}'
            got = f"outputs {', '.join(by_name) or 'none'}"
            raise refusal(WHERE, f"an output for the cache {missing}", got, remedy)
        pairs = {past.name: present.name for past, present in zip(rest, in_order, strict=True)}
    known = [(value, str(pairs[value.name]), given.get(value.name, GivenCache())) for value in rest]
    return tuple(_cache(*parts) for parts in known)


def _present(past: str, outputs: Mapping[str, Value]) -> str | None:
    """Return the output for a cache by its name, or None."""
    fits = [(old, new) for old, new in PRESENT if old in past]
    names = [past.replace(old, new, 1) if old else new + past for old, new in fits]
    names += [past + suffix for suffix in SUFFIXES]
    return next((name for name in names if name in outputs and name != past), None)


def _cache(past: Value, present: str, given: GivenCache) -> Cache:
    """Return a cache with its axes, which are symbolic ones if possible."""
    rank = len(past.axes)
    # [B,H,P,D] or [B,P,H,D]; stacked [layers,B,H,P,D] or [layers,2,B,H,P,D].
    rows = max(0, rank - 4) if given.rows is None else given.rows
    if given.slots is not None and given.slots != rows and -1 <= given.slots < rank:
        return Cache(past, present, rows, given.slots)
    if not 0 <= rows < max(rank, 1) or given.slots is not None:
        got = f"{rows} and {given.slots} for {past.name} {past}"
        rule = f"rows and slots in --inputs to be two axes below {rank}, or slots -1"
        raise refusal(WHERE, rule, got, "correct the file")
    of_tokens = rank == 2 and re.search("past|seq|len", str(past.axes[1]))
    if (rank < 3 and not of_tokens) or RECURRENT.search(past.name.lower()):
        return Cache(past, present, rows, -1)
    others = [axis for axis in range(rank) if axis != rows]
    symbolic = [axis for axis in others if not isinstance(past.axes[axis], int)]
    for words in ("past|seq|len", "cache|kv"):  # the builder of onnxruntime-genai: kv_cache_dim
        lengths = [axis for axis in symbolic if re.search(words, str(past.axes[axis]))]
        symbolic = lengths if len(lengths) == 1 else symbolic
    if len(symbolic) == 1:
        return Cache(past, present, rows, symbolic[0])
    if rank == 3 and not symbolic:  # such as the last tokens of a convolution
        return Cache(past, present, rows, -1)
    sizes = [axis for axis in (rank - 2, rank - 3) if isinstance(past.axes[axis], int)]
    if not symbolic and rank >= 4 and len(sizes) == 2:
        larger = max(sizes, key=lambda axis: int(past.axes[axis] or 0))
        if past.axes[sizes[0]] != past.axes[sizes[1]]:
            return Cache(past, present, rows, larger)
    remedy = f'{FILE} with {{"caches": {{"{past.name}": {{"slots": AXIS}}}}}}'
    rule = "one axis of a cache to be that of the tokens"
    raise refusal(WHERE, rule, f"{past.name} {past}", remedy)
