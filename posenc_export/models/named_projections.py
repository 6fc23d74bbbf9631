"""Find the projections of one attention in a state_dict, by names of torch and common models."""

import re
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

ENCODING = "encoding."
# Last parts of names by argument of AttentionBlock.from_weights. Rows of "qkv" are those of q, then
# k, then v.
ROLES: Dict[str, Tuple[str, ...]] = {
    "q": ("q", "q_proj", "wq", "to_q", "query", "query_proj", "q_lin", "q_linear", "linear_q"),
    "k": ("k", "k_proj", "wk", "to_k", "key", "key_proj", "k_lin", "k_linear", "linear_k"),
    "v": ("v", "v_proj", "wv", "to_v", "value", "value_proj", "v_lin", "v_linear", "linear_v"),
    "qkv": ("qkv", "qkv_proj", "to_qkv", "in_proj", "c_attn", "Wqkv", "W_pack"),
    "o": (
        "o",
        "o_proj",
        "wo",
        "to_out",
        "out_proj",
        "out",
        "out_lin",
        "dense",
        "c_proj",
        "proj",
        "linear_out",
    ),
}
# Packed projections whose order of rows the name does not tell, with the models that differ.
UNDECIDED = {
    "query_key_value": "GPT-NeoX and Bloom order rows head by head, ChatGLM by q, k and v",
    "wqkv": "InternLM2 orders rows by groups of heads",
    "kv": "some models order rows by k and v, others head by head",
    "to_kv": "some models order rows by k and v, others head by head",
    "kv_proj": "some models order rows by k and v, others head by head",
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


@dataclass(frozen=True)
class Found:
    """The projections of one attention.

    Args:
        names: names in the file, by argument of AttentionBlock.from_weights.
        trained: names of trained parameters of the encoding, by their name there.
        unused: names that are no part of the attention: tables, norms around it.
        transposed: whether matrices are stored as [inputs, outputs].
    """

    names: Dict[str, str]
    trained: Dict[str, str]
    unused: List[str]
    transposed: bool = False

    def lines(self, shapes: Mapping[str, Tuple[int, ...]]) -> List[str]:
        """Describe the mapping, one line for each tensor."""
        turned = ", transposed" if self.transposed else ""
        lines = [
            f"{role} is {name} {list(shapes[name])}{'' if role.endswith('_bias') else turned}"
            for role, name in self.names.items()
        ]
        lines += [
            f"{ENCODING}{role} is {name} {list(shapes[name])}"
            for role, name in self.trained.items()
        ]
        return lines + [f"not used: {name} {list(shapes[name])}" for name in self.unused]


def find(shapes: Mapping[str, Tuple[int, ...]], prefix: str = "") -> Found:
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
    inside = {
        name.removeprefix(prefix): shape
        for name, shape in shapes.items()
        if name.startswith(prefix)
    }
    _check_prefix(shapes, inside, prefix)
    names: Dict[str, str] = {}
    trained: Dict[str, str] = {}
    unused: List[str] = []
    for name, shape in inside.items():
        if name.startswith(ENCODING):
            trained[name.removeprefix(ENCODING)] = prefix + name
            continue
        role = _role(name)
        if role is None or len(shape) > 2:
            _check_unused(name, shape)
            unused.append(prefix + name)
        elif role in names:
            raise ValueError(
                f"weights: expected each weight once, got {role} as {names[role]} and "
                f"{prefix + name}; remove one, or give a longer --prefix"
            )
        else:
            names[role] = prefix + name
    roles = [f"{name}{end}" for name in ROLES for end in ("", "_bias")]
    ordered = {role: names[role] for role in roles if role in names}
    transposed = _is_transposed({role: shapes[name] for role, name in ordered.items()})
    return Found(ordered, trained, unused, transposed)


def _check_prefix(
    shapes: Mapping[str, Tuple[int, ...]], inside: Mapping[str, Tuple[int, ...]], prefix: str
) -> None:
    """Check that the tensors inside a prefix are those of one attention."""
    places = _places(inside or shapes)
    if not inside:
        remedy = f"give one of {_some(places)}" if places else "correct it"
        remedy = "leave --prefix out: the names have none" if places == [""] else remedy
        raise ValueError(
            f"weights: expected tensors whose names begin with {prefix!r}, got none; {remedy}"
        )
    if len(places) > 1:
        several = _some([prefix + place for place in places])
        raise ValueError(
            f"weights: expected tensors of one attention, got {len(places)} of them; give "
            f"--prefix, one of {several}"
        )


def _role(name: str) -> Any:
    """Return the argument of from_weights that a name stands for, or None.

    Raises:
        ValueError: packed weights in an order that cannot be decided.
    """
    path, bias = re.sub(r"\.0(?=\.(weight|bias)$)", "", name), False
    for end, is_bias in ((".weight", False), (".bias", True), ("_weight", False), ("_bias", True)):
        if path.endswith(end):
            path, bias = path.removesuffix(end), is_bias
            break
    last = path.rpartition(".")[2]
    if last in UNDECIDED:
        raise ValueError(
            f"weights: expected a packed projection in a known order of rows, got {name}: "
            f"{UNDECIDED[last]}; split it and name the parts q, k and v"
        )
    role = OF.get(last)
    return None if role is None else f"{role}_bias" if bias else role


def _check_unused(name: str, shape: Tuple[int, ...]) -> None:
    """Check that a tensor without a role can be left out without a change of the attention.

    Raises:
        ValueError: it cannot, or it is not known.
    """
    if HEAD_NORM.search(name):
        raise ValueError(
            f"weights: expected projections only, got {name}, a norm of queries or keys; "
            "describe the block with head_norm, and use load_state_dict"
        )
    # The mask of GPT-2.
    causal = name.endswith("bias") and len(shape) == 4 and shape[-1] == shape[-2]
    if not (TABLES.search(name) or causal or (NORM.search(name) and len(shape) == 1)):
        rule = (
            "weights: expected tensors named as q, q_proj, wq, to_q or query, with .weight or "
            ".bias, likewise k, v, o and qkv, or encoding.NAME"
        )
        raise ValueError(
            f"{rule}, got {name} {list(shape)}; rename it, or give the --prefix of the "
            "attention alone"
        )


def _places(shapes: Mapping[str, Tuple[int, ...]]) -> List[str]:
    """Return the prefixes of query or packed projections with two axes, in order."""
    places: Dict[str, None] = {}
    for name, shape in shapes.items():
        path = re.sub(r"(\.weight|_weight)$", "", name)
        place, _, last = path.rpartition(".")
        if (
            len(shape) == 2
            and not name.startswith(ENCODING)
            and (OF.get(last) in ("q", "qkv") or last in UNDECIDED)
        ):
            places[f"{place}." if place else ""] = None
    return list(places)


def _is_transposed(shapes: Mapping[str, Tuple[int, ...]]) -> bool:
    """Whether a packed matrix [E,3E] shows that matrices are [inputs, outputs] as in GPT-2."""
    packed, output = shapes.get("qkv"), shapes.get("o")
    return (
        packed is not None
        and output is not None
        and len(packed) == len(output) == 2
        and packed[0] == output[1]
        and packed[1] > packed[0]
    )


def _some(names: List[str]) -> str:
    return ", ".join(names[:MOST_SHOWN]) + (
        f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    )
