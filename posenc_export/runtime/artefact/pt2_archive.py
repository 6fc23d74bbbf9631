"""Check the content of model.pt2, so that loading it runs no code except the operators of its
graph.

torch.export.load unpickles sample inputs, constants, and weights with use_pickle. It evaluates
sizes with sympy, executes guards, and looks up operators as attributes of torch. An archive is
accepted if its tensors are plain bytes, and if every string of its program is a name, a size built
from symbols and whole numbers, a function of sizes, an ATen operator, or the name of a mode.
Sources: torch 2.13, torch/export/pt2_archive/_package.py, torch/_export/serde/serialize.py,
torch/export/_unlift.py.
"""

import json
import re
from typing import Annotated, Any, Callable, Literal, Mapping

import msgspec

from posenc_export.shared.foreign import FOREIGN, brief
from posenc_export.shared.refusal import expect

SAMPLES, PROGRAM = "data/sample_inputs/model.pt", "models/model.json"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
ENTRY = re.compile(r"data/weights/weight_\d+|data/constants/tensor_\d+")
OTHERS = (
    ".data/version", ".data/serialization_id", "byteorder", "archive_format", "archive_version",
)  # fmt: skip
PAYLOAD = re.compile(r"(weight|tensor)_\d+")
WORD = re.compile(r"[A-Za-z0-9_.]*")
ARGUMENT = re.compile(r"[A-Za-z_]\w*", re.ASCII)  # torch writes it into the source of a function
VERSION = re.compile(r"[A-Za-z0-9_.+-]*")
OPERATOR = re.compile(
    # from_file maps a file that it may create, save writes one.
    r"torch\.ops\.aten\.(?!(?:from_file|save)\b)(?:_?[a-z]\w*|__(?:and|or|xor)__)\.[A-Za-z]\w*"
    # The modes in which a part runs, and arithmetic of sizes.
    r"|torch\.ops\.higher_order\.wrap_with_(?:set_grad_enabled|autocast)|torch\.sym_[a-z]+"
    r"|_operator\.(?:add|mul|sub|neg|floordiv|mod|eq|ne|lt|le|gt|ge|and_|or_)"
    r"|math\.(?:ceil|floor|trunc)",
    re.ASCII,
)
TEXT = re.compile(r"[\w .,>:-]{0,200}")  # of arguments, such as modes of operators
EMPTY = (
    "guards_code", "metadata", "custom_obj_values", "as_custom_obj", "as_operator",
    "treespec_namedtuple_fields",
)  # fmt: skip
SYMBOL = r"Symbol\('[su]\d{1,9}'(?:, [a-z_]+=(?:True|False))*\)"
NUMBER = r"Integer\((?:0|-?[1-9]\d{0,17})\)"
# Powers of numbers are not allowed: evaluating a large one would not end.
TERM = re.compile(rf"Pow\({SYMBOL}, Integer\([1-8]\)\)|{SYMBOL}|{NUMBER}", re.ASCII)
FUNCTION = re.compile(
    r"(?:Add|Mul|Max|Min|FloorDiv|CleanDiv|Mod|PythonMod|Equality|Unequality|And|Or|Not"
    r"|(?:Strict)?(?:Less|Greater)Than)\(#(?:, #)*\)"
)
LONGEST = 4096  # characters of a size expression
DEEPEST = 64  # levels of nested JSON and of nested functions
CONTEXT = r'\A(null|\[("[\w.]*"(, "[\w.]*")*)?\])\Z'  # none, or keys of a dict


class Nesting(msgspec.Struct, forbid_unknown_fields=True):
    """A tree of tuples, lists and empty dicts as torch.utils._pytree writes it."""

    type: Literal[None, "builtins.tuple", "builtins.list", "builtins.dict"]
    context: Annotated[str, msgspec.Meta(pattern=CONTEXT)] | None
    children_spec: list["Nesting"]


def without_places(entries: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return an archive without what running it does not need: sample inputs and guards, which
    loading would unpickle and execute, places in source files, and files that were packed with it.
    Raise ValueError unless `check` accepts it.
    """
    root = _root(entries)
    program = _parsed(PROGRAM, entries.get(root + PROGRAM, b""), _without_metadata)
    if isinstance(program, dict):
        program["guards_code"] = []
    kept = {n: part for n, part in entries.items() if not n.startswith(f"{root}extra/")}
    kept |= {root + SAMPLES: b"", root + PROGRAM: json.dumps(program).encode()}
    check(kept)
    return kept


def _without_metadata(part: dict[str, Any]) -> dict[str, Any]:
    """Remove the metadata of a node and of the program."""
    return {**part, "metadata": {}} if {"target", "module_call_graph"} & part.keys() else part


def is_tensor(name: str) -> bool:
    """Whether an entry holds the bytes of a tensor, which nothing parses."""
    return ENTRY.fullmatch(name.partition("/")[2]) is not None


def check(entries: Mapping[str, bytes]) -> None:
    """Raise ValueError unless an archive holds tensors and a graph of ATen operators alone."""
    root = _root(entries)
    inside = {name[len(root) :]: part for name, part in entries.items() if name.startswith(root)}
    known = {SAMPLES, PROGRAM, *CONFIGS, *OTHERS, *filter(ENTRY.fullmatch, inside)}
    for name in sorted(entries):
        holds = name.startswith(root) and name[len(root) :] in known
        expect(holds, "only entries for a program and its tensors", repr(name)[:80])
    for name in (SAMPLES, PROGRAM, *CONFIGS):
        expect(name in inside, f"an entry {name}", "none")
    got = f"{len(inside[SAMPLES])} bytes, which torch would unpickle"
    expect(not inside[SAMPLES], f"{SAMPLES} to be empty", got)
    for name in CONFIGS:
        _check_payloads(name, _parsed(name, inside[name]), inside)
    _check_program("program", "", _parsed(PROGRAM, inside[PROGRAM]))


def _root(entries: Mapping[str, bytes]) -> str:
    return next(iter(entries), "").split("/")[0] + "/"


def _parsed(name: str, content: bytes, hook: Any = None) -> Any:
    try:
        return json.loads(content, object_hook=hook)
    except FOREIGN as error:
        raise ValueError(f"expected {name} to be JSON, got {brief(error)}") from None


def _check_payloads(name: str, content: Any, entries: Mapping[str, bytes]) -> None:
    """Check that every tensor is stored as plain bytes in an entry of the archive."""
    payloads: Any = content.get("config") if isinstance(content, dict) else None
    expect(isinstance(payloads, dict), f"a table of tensors in {name}", "none")
    for key, payload in payloads.items():
        path = payload.get("path_name") if isinstance(payload, dict) else None
        stored = f"{name.rsplit('/', 1)[0]}/{path}"
        named = isinstance(path, str) and PAYLOAD.fullmatch(path) is not None
        rule = f"{name} to name an entry of the archive for each tensor"
        expect(named and stored in entries, rule, repr(path)[:80])
        meta = payload.get("tensor_meta")
        plain = payload.get("use_pickle") is False and isinstance(meta, dict)
        rule = f"tensors as plain bytes, described in {name}"
        expect(plain, rule, f"a pickle for {key!r}"[:120])
        sizes = meta.get("sizes")
        empty = isinstance(sizes, list) and {"as_int": 0} in sizes
        got = f"an empty entry for {key!r}, which torch would fill with zeros"
        expect(empty or bool(entries[stored]), f"the bytes of each tensor in {name}", got[:120])
        _check_program(name, "", payload)


def _check_program(where: str, key: str, node: Any, depth: int = 0) -> None:
    """Check every string of a JSON value, by the rule for the key of the object that holds it."""
    expect(depth <= DEEPEST, f"at most {DEEPEST} nested levels in {where}", "more")
    if node and key in EMPTY:
        raise ValueError(f"expected {key} of {where} to be empty, got {node!r:.80}")
    if isinstance(node, dict):
        for name, value in node.items():
            _check_text(where, "name", name)
            _check_program(where, name, value, depth + 1)
    elif isinstance(node, list):
        for value in node:
            _check_program(where, key, value, depth + 1)
    elif isinstance(node, str):
        _check_text(where, key, node)


def _check_text(where: str, key: str, text: str) -> None:
    if not RULES.get(key, WORD.fullmatch)(text):
        rule = f"{key or 'a string'} of {where} to be a name, a size or an ATen operator"
        raise ValueError(f"expected {rule}, got {text!r:.120}")


def _is_size(text: str) -> bool:
    """Whether sympy.srepr writes a symbol, a whole number or a function of these as this text."""
    if len(text) > LONGEST or "#" in text:
        return False
    text = TERM.sub("#", text)
    for _ in range(DEEPEST):
        text = FUNCTION.sub("#", text)
    return text == "#"


def _is_nesting(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=tuple[Literal[1], Nesting])
    except (ValueError, RecursionError):
        return False
    return True


# By key of the object that holds it, whether a string passes.
RULES: dict[str, Callable[[str], Any]] = {
    "expr_str": _is_size,
    "target": OPERATOR.fullmatch,
    "forward_arg_names": ARGUMENT.fullmatch,
    "torch_version": VERSION.fullmatch,
    **dict.fromkeys(("in_spec", "out_spec"), _is_nesting),
    **dict.fromkeys(("as_string", "as_strings", "as_float", "as_floats"), TEXT.fullmatch),
}
