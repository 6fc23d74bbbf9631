"""Ruin artefacts and the exporter's stages, and write which part of the proof finds each ruin.

    python -m bench.ruins [--json FILE] [--depth N ...] [--format NAME ...]

A ruin is planted twice: in a published artefact, whose digests are written anew and which
`posenc verify` then checks, and in what the exporter writes, while `export` verifies it. Every
correct artefact must pass. The table of docs/reliability.md names the parts that find a ruin.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Sequence, Set, Tuple
from unittest import mock

import numpy as np
import onnx
from msgspec.structs import replace
from onnx import helper, numpy_helper

from bench import marked
from posenc_export.export import Sources, VerificationError, export
from posenc_export.export.targets import TARGETS
from posenc_export.models.config import StackConfig
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import verify
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import bound_of
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.shared import json_rows

DEPTHS = (2, 12, 32)
FORMATS = ("float32", "float16", "int8", "int8-32", "int4", "int4-128", "cache int8")
FEW_BITS = ("int8", "int8-32", "int4", "int4-128")
RANGE, WINDOW, ORIGINAL = 1024, 512, 600
WEIGHT = "layers.1.mlp.up.weight"  # the weight that is ruined
BLOCKED = "layers.1.mlp.down.weight"  # in blocks in every format of few bits
PAGE = Path("docs/reliability.md")
Graph = Any  # onnx.GraphProto


@dataclass(frozen=True)
class Ruin:
    """A wrong artefact.

    Args:
        name: what is wrong.
        model: the decoder that it is planted in, a key of MODELS.
        plant: changes a graph in place.
        formats: formats in which it can be planted.
    """

    name: str
    model: str
    plant: Callable[[Graph], None]
    formats: Tuple[str, ...] = FORMATS


def rope(layers: int) -> StackConfig:
    """A byte-level decoder of width 64 with rotations, grouped heads and a window."""
    block = block_config(64, 4, RANGE, kv_heads=2)
    sees = {"name": "window", "size": WINDOW}
    block = replace(block, attention=replace(block.attention, sees=sees))
    return decoder_config(256, layers, 128, block, tied=False)


def alibi(layers: int) -> StackConfig:
    """The same with ALiBi, and without a window."""
    block = block_config(64, 4, RANGE, kv_heads=2, encoding={"name": "alibi"})
    return decoder_config(256, layers, 128, block, tied=False)


def longrope(layers: int) -> StackConfig:
    """The same with LongRoPE, whose keys are cached with both sets of factors."""
    factors = {
        "short_factor": ";".join(str(1 + 0.1 * n) for n in range(8)),
        "long_factor": ";".join(str(2 + 0.3 * n) for n in range(8)),
    }
    spec = {"name": "rope_longrope", **factors, "original_max_positions": ORIGINAL}
    block = block_config(64, 4, RANGE, kv_heads=2, encoding=spec)
    return decoder_config(256, layers, 128, block, tied=False)


MODELS = {"rope": rope, "alibi": alibi, "longrope": longrope}


def _constant(graph: Graph, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change the constants whose name ends with `name`."""
    changed = [tensor for tensor in graph.initializer if tensor.name.endswith(name)]
    assert changed, f"expected a constant {name}"
    for tensor in changed:
        before = numpy_helper.to_array(tensor)
        after = np.ascontiguousarray(change(before.copy())).astype(before.dtype)
        assert not np.array_equal(before, after), f"expected a change of {name}"
        tensor.CopyFrom(numpy_helper.from_array(after, tensor.name))


def _weight(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    """Change the numbers of WEIGHT, or its codes, with outputs along the first axis."""

    def plant(graph: Graph) -> None:
        names = [tensor.name for tensor in graph.initializer]
        codes = [name for name in names if name.endswith(f"{WEIGHT}.codes")]
        name = codes[0] if codes else next(name for name in names if WEIGHT in name)
        shape = next(list(t.dims) for t in graph.initializer if t.name == name)
        turned = len(shape) == 2 and shape[0] == 64
        _constant(graph, name, lambda array: change(array.T).T if turned else change(array))

    return plant


def _parts(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    return lambda graph: _constant(graph, name, change)


def _zero_output(numbers: np.ndarray) -> np.ndarray:
    numbers[5] = 136 if numbers.dtype == np.uint8 and numbers.ndim == 3 else 0
    return numbers


def _exchange_outputs(numbers: np.ndarray) -> np.ndarray:
    numbers[[5, 6]] = numbers[[6, 5]]
    return numbers


def _exchange_nibbles(codes: np.ndarray) -> np.ndarray:
    codes[5] = codes[5] >> 4 | (codes[5] & 15) << 4
    return codes


def _next_number(numbers: np.ndarray) -> np.ndarray:
    numbers[5, 7] = np.nextafter(numbers[5, 7], np.asarray(np.inf, numbers.dtype))
    return numbers


def _one_more(numbers: np.ndarray) -> np.ndarray:
    numbers.reshape(-1)[5] ^= 1
    return numbers


def _attention(name: str, change: Callable[[Any], Any]) -> Callable[[Graph], None]:
    """Change an attribute of every attention node; None removes it."""

    def plant(graph: Graph) -> None:
        nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        assert nodes
        for node in nodes:
            before = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            value = change(before[name])
            kept = [attribute for attribute in node.attribute if attribute.name != name]
            del node.attribute[:]
            node.attribute.extend(kept)
            if value is not None:
                node.attribute.append(helper.make_attribute(name, value))

    return plant


def _rows(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Graph], None]:
    return _parts("cos.rows", change)


def _hole(rows: np.ndarray) -> np.ndarray:
    rows[400:432] = 0
    return rows


def _exchange_tables(graph: Graph) -> None:
    for node in graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[7], node.input[8] = node.input[8], node.input[7]


def _halve_slope(graph: Graph) -> None:
    for tensor in graph.initializer:
        if list(tensor.dims)[1:] == [1, 1]:
            slopes = numpy_helper.to_array(tensor).copy()
            slopes[1] /= 2
            tensor.CopyFrom(numpy_helper.from_array(slopes, tensor.name))
            return
    raise AssertionError("expected slopes")


def _late_head(graph: Graph) -> None:
    """Let the first head of the second layer read the queries of the token before."""
    node = [node for node in graph.node if node.op_type == "GroupQueryAttention"][1]
    queries = node.input[0]
    sizes = {"ruin.0": 0, "ruin.1": 1, "ruin.16": 16, "ruin.-1": -1, "ruin.end": 1 << 40}
    for name, value in sizes.items():
        graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
    axis1, axis2 = "ruin.1", "ruin.2"
    graph.initializer.append(numpy_helper.from_array(np.array([2]), axis2))
    made = [
        helper.make_node("Slice", [queries, "ruin.0", "ruin.16", axis2], ["ruin.head"]),
        helper.make_node("Slice", [queries, "ruin.16", "ruin.end", axis2], ["ruin.rest"]),
        helper.make_node("Slice", ["ruin.head", "ruin.0", "ruin.1", axis1], ["ruin.first"]),
        helper.make_node("Slice", ["ruin.head", "ruin.0", "ruin.-1", axis1], ["ruin.before"]),
        helper.make_node("Concat", ["ruin.first", "ruin.before"], ["ruin.late"], axis=1),
        helper.make_node("Concat", ["ruin.late", "ruin.rest"], ["ruin.queries"], axis=2),
    ]
    _insert(graph, node, made)
    node.input[0] = "ruin.queries"


def _shift_slots(depth: int) -> Callable[[Graph], None]:
    """Let rows of more than `depth` tokens lose their last one: lengths are one less."""

    def plant(graph: Graph) -> None:
        nodes = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
        lengths = nodes[0].input[5]
        limit = np.array(depth, np.int32)
        graph.initializer.append(numpy_helper.from_array(limit, "ruin.depth"))
        made = [
            helper.make_node("Greater", [lengths, "ruin.depth"], ["ruin.deep"]),
            helper.make_node("Cast", ["ruin.deep"], ["ruin.less"], to=onnx.TensorProto.INT32),
            helper.make_node("Sub", [lengths, "ruin.less"], ["ruin.lengths"]),
        ]
        _insert(graph, nodes[0], made)
        for node in nodes:
            node.input[5] = "ruin.lengths"

    return plant


def _insert(graph: Graph, before: Any, made: Sequence[Any]) -> None:
    nodes = list(graph.node)
    at = next(index for index, node in enumerate(nodes) if node.name == before.name)
    for offset, node in enumerate(made):
        graph.node.insert(at + offset, node)


def _second_cache_unwritten(graph: Graph) -> None:
    """Keep the old content of the caches of keys with long factors, for tokens at short
    positions.
    """
    bodies = [a.g for node in graph.node for a in node.attribute if a.name == "else_branch"]
    nodes = [node for body in bodies for node in body.node if node.op_type == "TensorScatter"]
    assert nodes, "expected a node that writes the second cache"
    for node in nodes:
        node.op_type = "Identity"
        del node.input[1:]
        del node.attribute[:]


RUINS = (
    Ruin("scales rolled by one output", "rope",
         _parts(f"{WEIGHT}.scales", lambda s: np.roll(s, 1, 0)), FEW_BITS),
    Ruin("codes rolled by one output", "rope", _weight(lambda w: np.roll(w, 1, 0)), FEW_BITS),
    Ruin("one zero point off", "rope", _parts(f"{BLOCKED}.zeros", _one_more),
         ("int4", "int4-128")),
    Ruin("nibbles of one output exchanged", "rope", _weight(_exchange_nibbles),
         ("int4", "int4-128")),
    Ruin("one output zero", "rope", _weight(_zero_output)),
    Ruin("two outputs exchanged", "rope", _weight(_exchange_outputs)),
    Ruin("one weight off by one unit in the last place", "rope", _weight(_next_number),
         ("float32", "float16", "cache int8")),
    Ruin("cache scale of one channel doubled", "rope",
         _parts("past_key_values.1.key.scale", lambda s: np.where(np.arange(len(s)) == 3, 2 * s, s)),
         ("cache int8",)),
    Ruin("softmax scale 1 % off", "rope", _attention("scale", lambda scale: 1.01 * scale)),
    Ruin("one head's queries late by one token", "rope", _late_head),
    Ruin("cos and sin exchanged", "rope", _exchange_tables),
    Ruin("rows 400 to 431 of the cos table zero", "rope", _rows(_hole)),
    Ruin("slope of one head halved", "alibi", _halve_slope),
    Ruin("window one token short", "rope", _attention("local_window_size", lambda w: w - 1)),
    Ruin("window one token long", "rope", _attention("local_window_size", lambda w: w + 1)),
    Ruin("window ignored", "rope", _attention("local_window_size", lambda _: None)),
    Ruin("slots shifted from 256 cached tokens on", "rope", _shift_slots(256)),
    Ruin("slots shifted from 300 cached tokens on", "rope", _shift_slots(300)),
    Ruin(
        "second cache never written",
        "longrope",
        _second_cache_unwritten,
        ("float32", *FEW_BITS),  # others write it by another node
    ),
)  # fmt: skip


def arguments_of(format_: str, folder: Path) -> Dict[str, Any]:
    """Return the arguments of `export` for a format."""
    if format_ == "cache int8":
        sample = folder / "sample.txt"
        content = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
        sample.write_bytes(content.tobytes())
        return {"cache": "int8", "calibrate": sample}
    if format_ in FEW_BITS:
        return {"weights": format_, "max_loss": 10.0}
    return {} if format_ == "float32" else {"dtype": format_}


def target_of(format_: str) -> str:
    """Return the target of a format: half precision has one of its own."""
    return "ort-cuda" if format_ == "float16" else "ort"


def ruined(folder: Path, manifest: Manifest, plant: Callable[[Graph], None]) -> Manifest:
    """Change the graph of an artefact, and return the manifest with the digests of its files."""
    model = onnx.load(str(folder / "model.onnx"))
    plant(model.graph)
    (folder / "model.onnx.data").unlink(missing_ok=True)
    onnx.save_model(
        model,
        str(folder / "model.onnx"),
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=1024,
    )
    names = ("model.onnx", "model.onnx.data")
    listed = {name: files.entry(folder / name) for name in names if (folder / name).is_file()}
    return manifest.replace(files={**manifest.files, **listed})


@contextlib.contextmanager
def exporting(target: str, plant: Callable[[Graph], None]) -> Iterator[None]:
    """Context in which the exporter writes ruined graphs for a target."""
    kind = TARGETS[target]

    def write(source: Any, manifest: Manifest, folder: Path) -> Manifest:
        written = kind.write(source, manifest, folder)
        reduced = folder.name.endswith(".edges")  # without a ruin, so that other parts are tried
        return written if reduced else ruined(folder, written, plant)

    with mock.patch.dict(TARGETS, {target: replace_write(kind, write)}):
        yield


def replace_write(kind: Any, write: Callable[..., Manifest]) -> Any:
    """Return a target that writes graphs with another function."""
    import dataclasses

    return dataclasses.replace(kind, write=write)


def finders(certificate: Mapping[str, Any]) -> Set[str]:
    """Return the parts of the proof that found something: names of checks, and "grid"."""
    parts = {name for name, check in certificate["checks"].items() if check["failures"]}
    cells = certificate["cells"].items()
    if not all(error <= bound_of(certificate, cell) for cell, error in cells):
        parts.add("grid")
    return parts


def in_file(correct: Path, ruin: Ruin) -> Set[str]:
    """Return what `posenc verify` finds in a published artefact with a ruin."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "artefact"
        shutil.copytree(correct, folder)
        manifest = ruined(folder, manifests.read(folder), ruin.plant)
        manifests.write(manifest, folder)
        try:
            return finders(verify(folder, "cpu", record=False))
        except ValueError:
            return {"load"}


def in_export(sources: Sources, ruin: Ruin, format_: str, folder: Path) -> Set[str]:
    """Return what `export` finds if it writes a ruin; empty if it publishes the artefact."""
    target = target_of(format_)
    with exporting(target, ruin.plant):
        try:
            export(sources, target, folder / "ruined", **arguments_of(format_, folder))
        except VerificationError as error:
            return finders(error.certificate)
        except ValueError:
            return {"load"}
    shutil.rmtree(folder / "ruined")
    return set()


def rows_of(layers: int, formats: Sequence[str]) -> Iterator[Dict[str, Any]]:
    """Yield one row per format and ruin; ruin "none" is the correct artefact."""
    for name, config in MODELS.items():
        sources = Sources(seeded(config(layers)))
        for format_ in formats:
            with tempfile.TemporaryDirectory() as temporary:
                folder, row = Path(temporary), {"layers": layers, "format": format_, "model": name}
                arguments = arguments_of(format_, folder)
                export(sources, target_of(format_), folder / "correct", **arguments)
                passed = not finders(verify(folder / "correct", "cpu", record=False))
                yield {**row, "ruin": "none", "passed": passed}
                for ruin in RUINS:
                    if ruin.model == name and format_ in ruin.formats:
                        by_file = in_file(folder / "correct", ruin)
                        by_export = in_export(sources, ruin, format_, folder)
                        found = {"file": sorted(by_file), "export": sorted(by_export)}
                        yield {**row, "ruin": ruin.name, **found}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the page: per ruin and format, the parts that find it at every depth."""
    formats = [name for name in FORMATS if any(row["format"] == name for row in rows)]
    lines = ["| ruin | " + " | ".join(formats) + " |", "|---|" + "---|" * len(formats)]
    for ruin in RUINS:
        cells = []
        for format_ in formats:
            key = ruin.name, format_
            tried = [row for row in rows if (row["ruin"], row["format"]) == key]
            cells.append(_parts_of(tried))
        lines.append(f"| {ruin.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _parts_of(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    lost = sorted({row["layers"] for row in rows if not (row["file"] and row["export"])})
    if lost:
        return f"not found at {', '.join(map(str, lost))} layers"
    always = set.intersection(*({*row["file"]} & {*row["export"]} for row in rows))
    return ", ".join(sorted(always)) or "found"


def undetected(rows: Sequence[Mapping[str, Any]]) -> List[str]:
    """Return the ruins that pass, and the correct artefacts that do not."""
    wrong = []
    for row in rows:
        where = f"{row['ruin']} in {row['format']} at {row['layers']} layers ({row['model']})"
        if row["ruin"] == "none":
            wrong += [] if row["passed"] else [f"refused: {where}"]
        else:
            wrong += [f"{where}: passes {way}" for way in ("file", "export") if not row[way]]
    return wrong


def main() -> int:
    """Measure and write. Returns 1 if a ruin is not found or a correct artefact is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("bench/results/ruins.json"))
    parser.add_argument("--depth", type=int, action="append")
    parser.add_argument("--format", action="append", choices=FORMATS)
    options = parser.parse_args()
    rows: List[Dict[str, Any]] = []
    for layers in options.depth or DEPTHS:
        for row in rows_of(layers, options.format or FORMATS):
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            json_rows.write(options.json, rows)
    if options.depth is None and options.format is None:
        marked.replace(PAGE, "ruins", table(rows))
    wrong = undetected(rows)
    print("\n".join(wrong) or "every ruin was found, every correct artefact passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
