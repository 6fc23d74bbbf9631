"""Finding out what the inputs and outputs of a graph mean, by name, dtype and shape.

Shapes: as in inputs.py.
"""

import re
from typing import Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from posenc_export.auditing.inputs import (
    FILE,
    MEANINGS,
    UNREAD,
    WHERE,
    Cache,
    Given,
    GivenCache,
    Interface,
    Value,
)
from posenc_export.shared.refusal import refusal

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


def interface(
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


def _by_name(inputs: Sequence[Value], given: Mapping[str, str]) -> Dict[str, Value]:
    """Return the inputs whose meaning their names say, by meaning."""
    named: Dict[str, Value] = {}
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


def _add_tokens(named: Dict[str, Value], rest: List[Value], inputs: Sequence[Value]) -> None:
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


def _output(outputs: Sequence[Value], given: Optional[str]) -> Value:
    by_name = {value.name: value for value in outputs}
    for name in (given,) if given else OUTPUTS:
        if name in by_name:
            return by_name[name]
    fitting = [value for value in outputs if not value.whole and len(value.axes) == 3]
    if not given and (len(fitting) == 1 or fitting and fitting[0] is outputs[0]):
        return fitting[0]
    names = ", ".join(f"{value.name} {value}" for value in outputs) or "none"
    remedy = f'{FILE} with {{"output": NAME}}'
    raise refusal(WHERE, f"an output {given or ' or '.join(OUTPUTS)}", names, remedy)


def _caches(
    rest: Sequence[Value], outputs: Sequence[Value], given: Mapping[str, GivenCache]
) -> Tuple[Cache, ...]:
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


def _present(past: str, outputs: Mapping[str, Value]) -> Optional[str]:
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
    if rank < 3 or RECURRENT.search(past.name.lower()):
        return Cache(past, present, rows, -1)
    others = [axis for axis in range(rank) if axis != rows]
    symbolic = [axis for axis in others if not isinstance(past.axes[axis], int)]
    for words in ("past|seq|len", "cache|kv"):  # the builder of onnxruntime-genai: kv_cache_dim
        lengths = [axis for axis in symbolic if re.search(words, str(past.axes[axis]))]
        symbolic = lengths if len(lengths) == 1 else symbolic
    if len(symbolic) == 1:
        return Cache(past, present, rows, symbolic[0])
    sizes = [axis for axis in (rank - 2, rank - 3) if isinstance(past.axes[axis], int)]
    if not symbolic and rank >= 4 and len(sizes) == 2:
        larger = max(sizes, key=lambda axis: int(past.axes[axis] or 0))
        if past.axes[sizes[0]] != past.axes[sizes[1]]:
            return Cache(past, present, rows, larger)
    remedy = f'{FILE} with {{"caches": {{"{past.name}": {{"slots": AXIS}}}}}}'
    rule = "one axis of a cache to be that of the tokens"
    raise refusal(WHERE, rule, f"{past.name} {past}", remedy)
