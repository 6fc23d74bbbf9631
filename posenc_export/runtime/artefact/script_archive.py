"""Check the content of a TorchScript archive, so that loading and calling it runs no code except
operators that compute.

torch.jit.load compiles the code of the archive. Its own unpickler makes tensors and objects of the
archive's classes, and calls the `__setstate__` of these classes and of those that C++ defines.
Sources: torch 2.13, torch/csrc/jit/serialization/import.cpp and unpickler.cpp,
torch/csrc/jit/runtime/register_prim_ops.cpp.
"""

import pickletools
import re
from typing import Any, Dict, Iterator, Mapping

from posenc_export.runtime.artefact import pt2_archive
from posenc_export.shared.foreign import FOREIGN

TENSOR = re.compile(r"[^/]+/(?:data|constants)/\d+")
CODE = re.compile(r"[^/]+/code/[^\0]+\.py")
OTHERS = ("data.pkl", "constants.pkl", "version", "byteorder", ".data/version")
# Classes that pickles may name: those of the archive, and what torch builds tensors and lists with.
CLASS = re.compile(
    r"__torch__\.(?!torch\.classes)[\w.]+|torch\._utils\._rebuild_tensor_v2|torch\.device"
    r"|collections\.OrderedDict|torch\.jit\._pickle\.(?:build_\w+list|restore_type_tag)"
    r"|torch\.\w+Storage",
)
# What code may not contain: methods that run while it is loaded, classes of C++, and an operator
# that a graph lacks where nothing reads its result.
RUNS = re.compile(rb"__setstate__|torch\.classes|\bfrom_file\b")
# Operators that read or write files or start threads, or that run what was not inlined.
REFUSED = re.compile(
    r"aten::(?:from_file|save)|(?!aten::|prim::).*"
    r"|prim::(?:fork|rpc_\w+|awaitable\w*|Python\w*|Call\w+|Closure|bailout\w*|Print)",
    re.IGNORECASE,
)


def is_tensor(name: str) -> bool:
    """Whether an entry of a file of torch holds the bytes of a tensor, which nothing parses."""
    return TENSOR.fullmatch(name) is not None or pt2_archive.is_tensor(name)


def checked(entries: Mapping[str, bytes]) -> Dict[str, bytes]:
    """Return the entries that running it needs. Raise ValueError unless they hold a program."""
    root = next(iter(entries), "").split("/")[0] + "/"
    known = {root + name for name in OTHERS}
    kept = {n: p for n, p in entries.items() if n in known or CODE.fullmatch(n) or is_tensor(n)}
    if root + "data.pkl" not in kept or root + "constants.pkl" not in kept:
        got = "an archive without code, such as pickled weights or a pickled module"
        raise ValueError(f"expected a program of torch.export or TorchScript, got {got}")
    for name, content in kept.items():
        if name.endswith(".pkl"):
            _check_pickle(name, content)
        elif CODE.fullmatch(name) and (runs := RUNS.search(content)):
            got = f"{runs[0].decode()} in {name[:80]!r}"
            raise ValueError(f"expected code that computes, in calls alone, got {got}")
    return kept


def _check_pickle(name: str, content: bytes) -> None:
    try:
        for code, argument, _ in pickletools.genops(content):
            if code.name in ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
                raise ValueError(code.name)
            if code.name == "GLOBAL" and not CLASS.fullmatch(str(argument).replace(" ", ".")):
                raise ValueError(argument)
    except FOREIGN as error:
        got = f"{str(error)[:120]!r} in {name[:80]!r}"
        raise ValueError(f"expected classes of TorchScript, got {got}") from None


def check_graph(graph: Any) -> None:
    """Raise ValueError unless a graph, with all that it calls inlined, computes alone."""
    for kind in _kinds(graph):
        if REFUSED.fullmatch(kind):
            rule = "operators of torch that compute"
            raise ValueError(f"expected {rule}, got {kind}, which does something else")


def _kinds(block: Any) -> Iterator[str]:
    for node in block.nodes():
        yield node.kind()
        for inner in node.blocks():
            yield from _kinds(inner)
