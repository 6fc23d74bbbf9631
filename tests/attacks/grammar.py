"""Attacks as payload x place x format: every payload, put in every place of a file where a library
reads that kind of payload. Payloads: pickles that run a command, Python and sympy that would, paths
out of the folder, sizes, and text in every string.
"""

import functools
import io
import itertools
import json
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import onnx
import torch

from posenc_export.runtime.artefact.archive import packed, read_entries
from tests.attacks.folders import Command
from tests.fuzz.edits import reseal
from tests.tiny import block
from tests.traces import exported

PATHS = (
    "/etc/hostname",
    "../../../../etc/hostname",
    "/dev/zero",
    "link",
    "a/../../x",
    "~/x",
    "C:\\x",
)
SIZES = (2**31, 2**40, 2**63, -1)
Change = Callable[[str], bytes]  # the content of a file, given a command in Python


@dataclass(frozen=True)
class Attack:
    """One file: format, payload and place; `content` makes it, given the path of the trace."""

    format: str
    payload: str
    place: str
    content: Callable[[Path], bytes]

    def __str__(self) -> str:
        return f"{self.format}: {self.payload} in {self.place}"

    def write(self, folder: Path, trace: Path) -> Path:
        """Write the file, and what a path of it may lead to."""
        (folder / "link").symlink_to("/etc/hostname")
        path = folder / f"model.{self.format}"
        path.write_bytes(self.content(trace))
        return path

    def write_artefact(self, folder: Path, trace: Path) -> Path:
        """Write an artefact with this file as its graph, and digests that agree."""
        target = {"onnx": "ort", "pt2": "pt2"}[self.format]
        place = exported(folder / "artefact", block("rope", max_positions=64), target)
        (place / f"model.{self.format}").write_bytes(self.content(trace))
        reseal(place)
        return place


def pickled(trace: Path, protocol: int = 2) -> bytes:
    """Return a pickle that makes the file `trace`, within an archive as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(Command(trace), buffer, pickle_protocol=protocol)
    return buffer.getvalue()


PICKLES: dict[str, Callable[[Path], bytes]] = {
    **{f"pickle {n}": lambda t, n=n: pickle.dumps(Command(t), n) for n in (0, 2, 4)},  # type: ignore[misc]
    "torch.save": pickled,
    "torch.save 4": lambda trace: pickled(trace, 4),
    "nested torch.save": lambda trace: packed({"a/b.pt": pickled(trace), "a/data.pkl": b"N."}),
}


def python(trace: Path) -> dict[str, str]:
    """Return texts that make the file `trace` where they are evaluated."""
    call = f"__import__('os').system('touch {trace}')"
    enum = '{"__enum__": true, "fqn": "antigravity:x", "name": "a"}'
    factory = {"default_factory_module": "stolen", "default_factory_name": "x", "dict_context": []}
    nested = {"type": "collections.defaultdict", "children_spec": []}
    return {
        "python": call,
        "sympy": f"Symbol('x').__class__.__base__ and {call}",
        "lambda": f"(lambda: {call})()",
        "operator": "torch.hub.load",
        "file operator": "torch.ops.aten.save.default",
        "enum": json.dumps([1, {"type": "builtins.tuple", "context": enum, "children_spec": []}]),
        "defaultdict": json.dumps([1, {**nested, "context": json.dumps(factory)}]),
        "nested": "Add(" * 3000,
        "power": "Pow(Integer(9), Pow(Integer(9), Integer(99999999)))",
        "terminal": "\x1b[2J\r\n" + "x" * 5000,
    }


class Decoder(torch.nn.Module):
    """Logits of tokens, with one weight and one constant."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Embedding(61, 61)
        self.scale = torch.tensor([1.0])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(input_ids) * self.scale


@functools.cache
def _program() -> dict[str, bytes]:
    """Return the entries of a program of torch.export, without the name of the archive."""
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    ids = torch.zeros(2, 3, dtype=torch.int64)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Decoder(), (ids,), dynamic_shapes=(axes,)), buffer)
    return {n.partition("/")[2]: c for n, c in read_entries(buffer.getvalue()).items()}


@functools.cache
def _script() -> dict[str, bytes]:
    """Return the entries of a module of TorchScript."""
    return {n.partition("/")[2]: c for n, c in read_entries(scripted(Decoder())).items()}


def scripted(module: torch.nn.Module) -> bytes:
    """Return a file of TorchScript."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(module), buffer)
    return buffer.getvalue()


def pt2(changes: Mapping[str, bytes]) -> bytes:
    """Return a program of torch.export with other content of some entries, or further ones."""
    return packed({f"a/{name}": part for name, part in {**_program(), **changes}.items()})


def script(changes: Mapping[str, bytes]) -> bytes:
    """Return a module of TorchScript with other content of some entries."""
    return packed({f"a/{name}": part for name, part in {**_script(), **changes}.items()})


def _leaves(node: Any, kinds: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of values of some types in JSON."""
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, kinds, (*path, key))
    elif isinstance(node, kinds) and not isinstance(node, bool):
        yield path


def _put(content: bytes, path: tuple[Any, ...], value: Any) -> bytes:
    whole = json.loads(content)
    node = whole
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(whole).encode()


def _unlike(paths: Iterator[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return one place for each sequence of keys."""
    kept: dict[Any, tuple[Any, ...]] = {}
    for path in paths:
        kept.setdefault(tuple(key for key in path if isinstance(key, str)), path)
    return [*kept.values()]


CONFIG = {kind: f"data/{kind}s/model_{kind}s_config.json" for kind in ("weight", "constant")}
PROGRAM = "models/model.json"


def of_export() -> Iterator[Attack]:
    """Yield the attacks on readers of torch.export's archives."""
    whole = ("data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt")
    for (name, make), place in itertools.product(PICKLES.items(), (*whole, "extra/a", "data.pkl")):
        yield Attack("pt2", name, place, lambda t, make=make, place=place: pt2({place: make(t)}))  # type: ignore[misc]
    for (name, make), kind in itertools.product(PICKLES.items(), CONFIG):
        for file in ("weight_0", "tensor_0", "custom_obj_0", "opaque_obj_0"):

            def content(trace: Path, make: Any = make, kind: str = kind, file: str = file) -> bytes:
                config = json.loads(_program()[CONFIG[kind]])
                for part in config["config"].values():
                    part.update(path_name=file, use_pickle=True)
                place = f"data/{kind}s/{file}"
                return pt2({CONFIG[kind]: json.dumps(config).encode(), place: make(trace)})

            yield Attack("pt2", name, f"{kind}s, {file}", content)
    for place in (PROGRAM, *CONFIG.values()):
        values = json.loads(_program()[place])
        for path, name in itertools.product(_unlike(_leaves(values, str)), python(Path("x"))):

            def put(trace: Path, place: str = place, path: Any = path, name: str = name) -> bytes:
                return pt2({place: _put(_program()[place], path, python(trace)[name])})

            yield Attack("pt2", name, f"{place} {'.'.join(map(str, path))}", put)
        for path, size in itertools.product(_unlike(_leaves(values, int)), SIZES):

            def sized(_: Path, place: str = place, path: Any = path, size: int = size) -> bytes:
                return pt2({place: _put(_program()[place], path, size)})

            yield Attack("pt2", f"size {size}", f"{place} {'.'.join(map(str, path))}", sized)


CODE = {
    "from_file": "    _0 = torch.from_file({trace!r}, True, 8)\n",
    "save": "    torch.save(input_ids, {trace!r})\n",
    "method save": "    input_ids.save({trace!r})\n",
    "ops save": "    ops.aten.save(input_ids, {trace!r})\n",
    "allocation": "    _0 = torch.zeros([1099511627776, 1048576])\n",
    "endless": "    while True:\n      pass\n",
    "import": "    import os\n",
}


def of_script() -> Iterator[Attack]:
    """Yield the attacks on readers of TorchScript."""
    for (name, make), place in itertools.product(PICKLES.items(), ("data.pkl", "constants.pkl")):
        yield Attack("pt", name, place, lambda t, make=make, place=place: script({place: make(t)}))  # type: ignore[misc]
    for name, make in PICKLES.items():
        yield Attack("pt", name, "the whole file", make)
    code = next(n for n in _script() if n.startswith("code/") and n.endswith(".py"))
    text = _script()[code].decode()
    head = next(line for line in text.splitlines(True) if "def forward" in line)
    for name, line in CODE.items():
        body = lambda t, line=line: line.format(trace=str(t))  # type: ignore[misc]  # noqa: E731
        for method in ("forward", "__setstate__"):

            def content(trace: Path, body: Any = body, method: str = method) -> bytes:
                at = text.index(":\n", text.index(head)) + 2 if method == "forward" else 0
                added = text[:at] + body(trace) + text[at:]
                if method != "forward":
                    start = text.index("  def forward")
                    setting = "  def __setstate__(self, input_ids: Tensor) -> NoneType:\n"
                    added = (
                        text[:start] + setting + body(trace) + "    return None\n" + text[start:]
                    )
                return script({code: added.encode()})

            yield Attack("pt", name, method, content)


def _onnx() -> Any:
    """Return a decoder in ONNX."""
    helper, kinds = onnx.helper, onnx.TensorProto
    weights = helper.make_tensor("w", kinds.FLOAT, [61, 61], bytes(61 * 61 * 4), raw=True)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "input_ids"], ["logits"], axis=0)],
        "g",
        [helper.make_tensor_value_info("input_ids", kinds.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("logits", kinds.FLOAT, ["b", "s", 61])],
        [weights],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _messages(message: Any, path: str = "model") -> Iterator[tuple[str, Any, Any]]:
    """Yield name, message and field of every string and number of a message of protobuf."""
    for field, value in message.ListFields():
        name = f"{path}.{field.name}"
        parts = value if hasattr(value, "append") or hasattr(value, "add") else [value]
        if field.message_type:
            for number, part in enumerate(parts):
                yield from _messages(part, f"{name}[{number}]")
        elif field.name != "raw_data" and field.type != field.TYPE_ENUM:
            yield name, message, field


def of_onnx() -> Iterator[Attack]:
    """Yield the attacks on readers of ONNX."""
    for name, make in PICKLES.items():
        yield Attack("onnx", name, "the whole file", make)
    for path in PATHS:

        def external(_: Path, path: str = path) -> bytes:
            model = _onnx()
            tensor = model.graph.initializer[0]
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=path)
            return bytes(model.SerializeToString())

        yield Attack("onnx", "path", path, external)
    for place, (name, _, field) in enumerate(_messages(_onnx())):
        texts = field.cpp_type in (field.CPPTYPE_STRING,)
        values = [*python(Path("x"))] if texts else [f"size {size}" for size in SIZES]
        for number, value in enumerate(values):

            def content(
                trace: Path, place: int = place, value: Any = value, n: int = number
            ) -> bytes:
                model = _onnx()
                _, message, field = [*_messages(model)][place]
                put = python(trace).get(value, SIZES[n % len(SIZES)])
                put = put.encode() if field.type == field.TYPE_BYTES else put
                if isinstance(put, int):
                    put = (put + 2**31) % 2**32 - 2**31 if "32" in str(field.cpp_type) else put
                    put = min(put, 2**63 - 1) if field.type == field.TYPE_INT64 else put % 2**31
                whole = getattr(message, field.name)
                if hasattr(whole, "append"):
                    whole[0] = put
                else:
                    setattr(message, field.name, put)
                return bytes(model.SerializeToString())

            yield Attack("onnx", str(value), name, content)


def attacks() -> list[Attack]:
    """Return all attacks."""
    return [*of_export(), *of_script(), *of_onnx()]


def right(format: str) -> bytes:
    """Return a file of a format without an attack."""
    if format == "onnx":
        return bytes(_onnx().SerializeToString())
    return pt2({}) if format == "pt2" else script({})
