"""Find the projections of one attention in a state_dict, by names of torch and common models."""

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

from posenc_export.shared.refusal import refusal

ENCODING = "encoding."
# Last parts of names by role. Rows of "qkv" are those of q, then k, then v.
ROLES: Dict[str, Tuple[str, ...]] = {
    "q": ("q", "q_proj", "wq", "to_q", "query", "query_proj", "q_lin", "q_linear", "linear_q"),
    "k": ("k", "k_proj", "wk", "to_k", "key", "key_proj", "k_lin", "k_linear", "linear_k"),
    "v": ("v", "v_proj", "wv", "to_v", "value", "value_proj", "v_lin", "v_linear", "linear_v"),
    "qkv": ("qkv", "qkv_proj", "to_qkv", "in_proj", "c_attn", "Wqkv", "W_pack"),
    "o": (
        *("o", "o_proj", "wo", "to_out", "out_proj", "out", "out_lin"),
        *("dense", "c_proj", "proj", "linear_out"),
    ),
}
# Packed projections whose order of rows the name does not tell, with the models that differ.
KEY_VALUE = "some models order rows by k and v, others head by head"
UNDECIDED = {
    "query_key_value": "GPT-NeoX and Bloom order rows head by head, ChatGLM by q, k and v",
    "wqkv": "InternLM2 orders rows by groups of heads",
    **dict.fromkeys(("kv", "to_kv", "kv_proj"), KEY_VALUE),
}
OF = {name: role for role, names in ROLES.items() for name in names}
TABLES = re.compile(
    r"(^|\.)(inv_freq|freqs|freqs_cis|cos|sin|cos_cached|sin_cached|"
    r"masked_bias|mask|causal_mask|tril)$"
)  # computed from sizes, never trained
HEAD_NORM = re.compile(
    r"(^|[._])(q|k|query|key|q_a|kv_a)_?(norm|layernorm|ln|layer_norm)([._]|$)", re.IGNORECASE
)
NORM = re.compile(r"norm|(^|[._])ln([._]|$|_)", re.IGNORECASE)
MOST_SHOWN = 6
Shapes = Mapping[str, Tuple[int, ...]]


@dataclass(frozen=True)
class Found:
    """The projections of one attention."""

    names: Dict[str, str]  # names in the file, by role; encoding.NAME for those of the encoding
    unused: List[str]  # names that are no part of the attention: tables, norms around it
    transposed: bool = False  # whether matrices are stored as [inputs, outputs]

    def lines(self, shapes: Shapes) -> List[str]:
        """Describe the mapping, one line for each tensor."""
        turned, lines = ", transposed" if self.transposed else "", []
        for role, name in self.names.items():
            end = "" if role.endswith("_bias") or role.startswith(ENCODING) else turned
            lines.append(f"{role} is {name} {list(shapes[name])}{end}")
        return lines + [f"not used: {name} {list(shapes[name])}" for name in self.unused]


def find(shapes: Shapes, prefix: str = "") -> Found:
    """Find the projections among tensors whose names begin with a prefix.

    Args:
        shapes: shapes by name.
        prefix: beginning of the names of one attention, such as "model.layers.0.self_attn."; empty
            for a file of one attention.

    Raises:
        ValueError: no tensor with the prefix, tensors of several attentions, one weight twice,
            packed weights in an unknown order, tensors that change the attention and have no place
            in the block.
    """
    starting = [name for name in shapes if name.startswith(prefix)]
    inside = {name.removeprefix(prefix): shapes[name] for name in starting}
    _check_prefix(shapes, inside, prefix)
    names: Dict[str, str] = {}
    unused: List[str] = []
    for name, shape in inside.items():
        role = name if name.startswith(ENCODING) else _role(name)
        if role is None or (len(shape) > 2 and role != name):
            _check_unused(name, shape)
            unused.append(prefix + name)
        elif role in names:
            got, remedy = f"{role} as {names[role]} and {prefix + name}", "give a longer --prefix"
            raise refusal("weights", "each weight once", got, f"remove one, or {remedy}")
        else:
            names[role] = prefix + name
    roles = [f"{name}{end}" for name in ROLES for end in ("", "_bias")]
    ordered = {role: names[role] for role in (*roles, *names) if role in names}
    transposed = _is_transposed({role: shapes[name] for role, name in ordered.items()})
    return Found(ordered, unused, transposed)


def _check_prefix(shapes: Shapes, inside: Shapes, prefix: str) -> None:
    """Check that the tensors inside a prefix are those of one attention."""
    places = _places(inside or shapes)
    if not inside:
        remedy = f"give one of {_some(places)}" if places else "correct it"
        remedy = "leave --prefix out: the names have none" if places == [""] else remedy
        raise refusal("weights", f"tensors whose names begin with {prefix!r}", "none", remedy)
    if len(places) > 1:
        remedy = f"give --prefix, one of {_some([prefix + place for place in places])}"
        raise refusal("weights", "tensors of one attention", f"{len(places)} of them", remedy)


def _role(name: str) -> Any:
    """Return the role that a name stands for, or None. ValueError: packed
    weights in an order that cannot be decided.
    """
    path, bias = re.sub(r"\.0(?=\.(weight|bias)$)", "", name), False
    for end, is_bias in ((".weight", False), (".bias", True), ("_weight", False), ("_bias", True)):
        if path.endswith(end):
            path, bias = path.removesuffix(end), is_bias
            break
    last = path.rpartition(".")[2]
    if last in UNDECIDED:
        rule, remedy = "a packed projection in a known order of rows", "name the parts q, k and v"
        raise refusal("weights", rule, f"{name}: {UNDECIDED[last]}", f"split it and {remedy}")
    role = OF.get(last)
    return None if role is None else f"{role}_bias" if bias else role


def _check_unused(name: str, shape: Tuple[int, ...]) -> None:
    """Check that the attention is the same without a tensor; ValueError otherwise."""
    if HEAD_NORM.search(name):
        got = f"{name}, a norm of queries or keys"
        remedy = "export the module that holds them, as it is (export_model)"
        raise refusal("weights", "projections only", got, remedy)
    # The mask of GPT-2.
    causal = name.endswith("bias") and len(shape) == 4 and shape[-1] == shape[-2]
    if not (TABLES.search(name) or causal or (NORM.search(name) and len(shape) == 1)):
        rule = "tensors named as q, q_proj, wq, to_q or query, with .weight or .bias, likewise k, v"
        remedy = "leave it out if it is a buffer, rename it, or give the --prefix of the attention"
        rule = f"{rule}, o and qkv, or encoding.NAME"
        raise refusal("weights", rule, f"{name} {list(shape)}", remedy)


def _places(shapes: Shapes) -> List[str]:
    """Return the prefixes of query or packed projections with two axes, in order."""
    places: Dict[str, None] = {}
    for name, shape in shapes.items():
        place, _, last = re.sub(r"(\.weight|_weight)$", "", name).rpartition(".")
        packed = OF.get(last) in ("q", "qkv") or last in UNDECIDED
        if len(shape) == 2 and not name.startswith(ENCODING) and packed:
            places[f"{place}." if place else ""] = None
    return list(places)


def _is_transposed(shapes: Shapes) -> bool:
    """Whether a packed matrix [E,3E] shows that matrices are [inputs, outputs] as in GPT-2."""
    packed, output = shapes.get("qkv", ()), shapes.get("o", ())
    if len(packed) != 2 or len(output) != 2:
        return False
    return packed[0] == output[1] and packed[1] > packed[0]


def _some(names: List[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return ", ".join(names[:MOST_SHOWN]) + more
