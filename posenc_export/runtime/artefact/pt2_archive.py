"""Check the content of model.pt2, so that loading it runs no code except the operators of its
graph.

torch.export.load unpickles sample inputs, constants, and weights with use_pickle. It evaluates
sizes with sympy, executes guards, and looks up operators as attributes of torch. An archive is
accepted if its tensors are plain bytes, and if every string of its program is a name, a size built
from symbols and whole numbers, a difference of sizes, or an ATen operator. Sources: torch 2.13,
torch/export/pt2_archive/_package.py, torch/_export/serde/serialize.py, torch/export/_unlift.py.
"""

import ast
import json
import re
from typing import Any, Dict, Mapping, NoReturn

from posenc_export.runtime.artefact.archive import Entry
from posenc_export.shared.foreign import FOREIGN, brief

SAMPLES, PROGRAM = "data/sample_inputs/model.pt", "models/model.json"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
ENTRY = re.compile(r"data/weights/weight_\d+|data/constants/tensor_\d+")
OTHERS = (
    ".data/version", ".data/serialization_id", "byteorder", "archive_format", "archive_version",
)  # fmt: skip
PAYLOAD = re.compile(r"(weight|tensor)_\d+")
WORD = re.compile(r"[A-Za-z0-9_.]*")
VERSION = re.compile(r"[A-Za-z0-9_.+-]*")
OPERATOR = re.compile(
    r"torch\.ops\.aten\.(?!from_file)(?:_?[a-z]\w*|__(?:and|or|xor)__)\.[A-Za-z]\w*|_operator\.sub",
    re.ASCII,
)  # or a difference of sizes
# Modes of operators, and floats that JSON cannot represent.
CHOICES = (
    "floor", "trunc", "none", "tanh", "constant", "Infinity", "-Infinity", "NaN",
)  # fmt: skip
EMPTY = (
    "guards_code", "metadata", "custom_obj_values", "as_custom_obj", "as_operator", "as_graph",
    "treespec_namedtuple_fields",
)  # fmt: skip
FUNCTIONS = ("Add", "Mul", "Max", "Min", "FloorDiv", "CleanDiv", "Mod", "PythonMod")
LONGEST = 4096  # characters of a size expression
DEEPEST = 64  # levels of nested JSON


def stripped(entries: Dict[str, bytes]) -> Dict[str, bytes]:
    """Remove sample inputs and guards, which loading would unpickle and execute, from the
    entries that torch.export.save wrote.
    """
    root = _root(entries)
    program = json.loads(entries[root + PROGRAM])
    program["guards_code"] = []
    return {**entries, root + SAMPLES: b"", root + PROGRAM: json.dumps(program).encode()}


def is_tensor(name: str) -> bool:
    """Whether an entry holds the bytes of a tensor. No part of it is parsed, so that its content
    can stay in the file.
    """
    return ENTRY.fullmatch(name.partition("/")[2]) is not None


def check(entries: Mapping[str, Entry]) -> None:
    """Raise ValueError unless an archive holds only tensors and a graph of ATen operators; the
    message gives the first entry or string that is not allowed.
    """
    root = _root(entries)
    sizes = {
        name.removeprefix(root): len(content)
        for name, content in entries.items()
        if name.startswith(root)
    }
    for name in sorted({*sizes, *(name for name in entries if not name.startswith(root))}):
        if name not in sizes or not (
            name in (SAMPLES, PROGRAM, *CONFIGS, *OTHERS) or ENTRY.fullmatch(name)
        ):
            _refuse("only entries for a program and its tensors", repr(name)[:80])
    for name in (SAMPLES, PROGRAM, *CONFIGS):
        if name not in sizes:
            _refuse(f"an entry {name}", "none")
    if entries[root + SAMPLES]:
        _refuse(
            f"{SAMPLES} to be empty",
            f"{len(entries[root + SAMPLES])} bytes, which torch would unpickle",
        )
    for name in CONFIGS:
        _check_payloads(name, _parsed(name, entries[root + name]), sizes)
    _check_program("program", "", _parsed(PROGRAM, entries[root + PROGRAM]), 0)


def _root(entries: Mapping[str, Entry]) -> str:
    return next(iter(entries), "").split("/")[0] + "/"


def _refuse(rule: str, got: str) -> NoReturn:
    raise ValueError(f"expected {rule}, got {got}")


def _parsed(name: str, content: Entry) -> Any:
    try:
        return json.loads(content)  # type: ignore[arg-type]  # only tensors stay in the file
    except FOREIGN as error:
        raise ValueError(f"expected {name} to be JSON, got {brief(error)}") from None


def _check_payloads(name: str, content: Any, sizes: Dict[str, int]) -> None:
    """Check that every tensor is stored as plain bytes in an entry of the archive.

    Args:
        sizes: bytes of each entry.
    """
    payloads = content.get("config") if isinstance(content, dict) else None
    if not isinstance(payloads, dict):
        _refuse(f"a table of tensors in {name}", "none")
    for key, payload in payloads.items():
        path = payload.get("path_name") if isinstance(payload, dict) else None
        stored = f"{name.rsplit('/', 1)[0]}/{path}"
        if not isinstance(path, str) or not PAYLOAD.fullmatch(path) or stored not in sizes:
            _refuse(f"{name} to name an entry of the archive for each tensor", repr(path)[:80])
        meta = payload.get("tensor_meta")
        if payload.get("use_pickle") is not False or not isinstance(meta, dict):
            _refuse(f"tensors as plain bytes, described in {name}", f"a pickle for {key!r}"[:120])
        if not sizes[stored] and {"as_int": 0} not in meta.get("sizes", ()):
            _refuse(
                f"the bytes of each tensor in {name}",
                f"an empty entry for {key!r}, which torch would fill with zeros"[:120],
            )
        _check_program(name, "", payload, 0)


def _check_program(where: str, key: str, node: Any, depth: int) -> None:
    """Check every string of a JSON value, by the rule for the key of the object that holds it."""
    if depth > DEEPEST:
        _refuse(f"at most {DEEPEST} nested levels in {where}", "more")
    if node and key in EMPTY:
        _refuse(f"{key} of {where} to be empty", repr(node)[:80])
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
    if key == "expr_str":
        passes = _is_size_text(text)
    elif key in ("in_spec", "out_spec"):
        passes = _is_spec(_parsed(key, text.encode()), 0)
    elif key == "target":
        passes = OPERATOR.fullmatch(text) is not None
    elif key in ("as_string", "as_strings", "as_float", "as_floats"):
        passes = text in CHOICES
    else:
        passes = (VERSION if key == "torch_version" else WORD).fullmatch(text) is not None
    if not passes:
        _refuse(
            f"{key or 'a string'} of {where} to be a name, a size or an ATen operator",
            repr(text)[:120],
        )


def _is_size_text(text: str) -> bool:
    if len(text) > LONGEST:
        return False
    try:
        return _is_size(ast.parse(text, mode="eval").body)
    except (
        FOREIGN
    ):  # raised by the parser for text that is not an expression or is nested too deeply
        return False


def _is_size(node: ast.AST) -> bool:
    """Whether an expression is Symbol('s0', positive=True), Integer(3), a small power of a
    symbol, or a function of these.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    name, arguments = node.func.id, node.args
    if name == "Symbol":
        flags = all(
            keyword.arg
            and isinstance(keyword.value, ast.Constant)
            and isinstance(keyword.value.value, bool)
            for keyword in node.keywords
        )
        return (
            flags
            and len(arguments) == 1
            and isinstance(arguments[0], ast.Constant)
            and re.fullmatch(r"[su]\d{1,9}", str(arguments[0].value)) is not None
        )
    if node.keywords:
        return False
    if name == "Integer":
        return (
            len(arguments) == 1
            and re.fullmatch(r"-?\d{1,18}", ast.unparse(arguments[0])) is not None
        )
    if name == "Pow":  # powers of numbers are not allowed: evaluating a large one would not end
        if (
            len(arguments) != 2
            or re.fullmatch(r"Integer\([1-8]\)", ast.unparse(arguments[1])) is None
        ):
            return False
        return ast.unparse(arguments[0]).startswith("Symbol(") and _is_size(arguments[0])
    return name in FUNCTIONS and all(map(_is_size, arguments))


def _is_spec(node: Any, depth: int) -> bool:
    """Whether a value is a tree of tuples, lists and empty dicts as torch.utils._pytree writes
    it: [1, {"type", "context", "children_spec"}].
    """
    if depth == 0:
        return isinstance(node, list) and len(node) == 2 and node[0] == 1 and _is_spec(node[1], 1)
    if (
        depth > DEEPEST
        or not isinstance(node, dict)
        or set(node) != {"type", "context", "children_spec"}
        or not isinstance(node["children_spec"], list)
    ):
        return False
    known = node["type"] in (None, "builtins.tuple", "builtins.list", "builtins.dict") and node[
        "context"
    ] in (None, "null", "[]")
    return known and all(_is_spec(child, depth + 1) for child in node["children_spec"])
