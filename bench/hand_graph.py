"""Compare decode with a hand-written graph of MatMul, GroupQueryAttention, MatMul: the overhead of the exported graph, the session and the cache capacity.

    python -m bench.hand_graph ROPE_FOLDER [ALIBI_FOLDER] [--json FILE]

ROPE_FOLDER is a float32 block of target `ort`, width 512, 8 heads. All contestants run on ONNX Runtime in this process, in alternating bursts of calls.
Raw runs use `run_with_iobinding`, with one cache buffer bound as input and output.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import onnxruntime as ort

from posenc_export.benchmark.peers.hand_graph import block
from posenc_export.benchmark.report import duration
from posenc_export.benchmark.spread import spread
from posenc_export.runtime import Session, load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.shared import json_rows
from posenc_export.shared.tables import aligned

WIDTH, HEADS, HEAD_SIZE = 512, 8, 64
CONTEXTS = (128, 1024, 8192)
CAPACITIES = (512, 32768)
REST = 0.05  # seconds before a burst; threads of the other session spin for 10 to 30 ms after its last run (measured, ONNX Runtime 1.31.1)
STRIDE = 16  # steps between two rewinds
WARM = 5  # untimed calls after the rest
Call = Callable[[], Any]


def hand_graph(rows: int) -> bytes:
    """Return a serialised block with random weights: hidden_states [B,S,512], caches [B,8,M,64], seqlens_k [B], total_sequence_length [] to output and caches."""
    rng = np.random.default_rng(0)
    sizes = {
        "attention.projection.qkv.weight": (3 * WIDTH, WIDTH),
        "attention.projection.output.weight": (WIDTH, WIDTH),
    }
    weights = {name: rng.standard_normal(shape) * 0.04 for name, shape in sizes.items()}
    attention = {
        "heads": HEADS,
        "kv_heads": HEADS,
        "head_size": HEAD_SIZE,
        "encodings": [{"name": "rope"}],
    }
    return block({"width": WIDTH, "max_positions": rows, "attention": attention}, weights)


class Bound:
    """Callable that runs the same decode step of a graph with bound inputs and outputs.

    Args:
        model: path or bytes of the model.
        context: tokens in the cache, including the step's.
        capacity: slots of the cache buffers, which are bound as input and output.
        threads: intra-op threads.
        loaded: existing InferenceSession of the same model, to share its thread pool; None to load the model.
    """

    def __init__(
        self, model: Any, context: int, capacity: int, threads: int, loaded: Any = None
    ) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.set_denormal_as_zero", "1")  # as the runtime does
        self.session = loaded or ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"]
        )
        self.binding = self.session.io_binding()
        self.kept: List[Any] = []  # arrays and OrtValues, which do not own the arrays
        caches = []
        for value in self.session.get_inputs():
            bound = self._bind(_content(value.name, value.type, value.shape, context, capacity))
            self.binding.bind_ortvalue_input(value.name, bound)
            if len(value.shape) == 4:
                caches.append(bound)
        for value in self.session.get_outputs():
            held = (
                caches.pop(0)
                if len(value.shape) == 4
                else self._bind(np.zeros((1, 1, WIDTH), np.float32))
            )
            self.binding.bind_ortvalue_output(value.name, held)

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def _bind(self, array: np.ndarray) -> Any:
        value = ort.OrtValue.ortvalue_from_numpy(array)
        self.kept += [array, value]
        return value


def _content(name: str, kind: str, axes: Sequence[Any], context: int, capacity: int) -> np.ndarray:
    """Return the value of an input of either graph.

    Raises:
        ValueError: the graph has an unknown input.
    """
    rng = np.random.default_rng(1)
    if len(axes) == 4:
        return rng.standard_normal((1, HEADS, capacity, HEAD_SIZE)).astype(np.float32)
    if name == "hidden_states":
        return rng.standard_normal((1, 1, WIDTH)).astype(np.float32)
    known = {
        "seqlens_k": [context - 1],
        "total_sequence_length": context,
        "position_ids": [[context - 1]],
        "first_position": [[0]],
        "cache_position": [[context - 1]],
    }
    if name not in known:
        rule = f"hand_graph: expected inputs hidden_states, caches, {', '.join(known)}"
        raise ValueError(
            f"{rule}, got {name!r}; give a block of target ort with signature positions"
        )
    return np.array(known[name], np.int32 if kind == "tensor(int32)" else np.int64)


def _burst(call: Call, count: int) -> float:
    """Return the median seconds of a call. If the call returns seconds, these count instead of the measured time."""
    time.sleep(REST)
    for _ in range(WARM):
        call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        own = call()
        times.append(time.perf_counter() - start if own is None else own)
    return float(np.median(times))


def stepper(session: Session, context: int) -> Call:
    """Return a function that times session.step around `context`; every STRIDE steps it rewinds by STRIDE, which is not timed."""
    rng = np.random.default_rng(1)
    session.prefill(
        rng.standard_normal((1, context - 1 - STRIDE // 2, WIDTH)).astype(np.float32), chunk=1024
    )
    token, first = rng.standard_normal((1, WIDTH)).astype(np.float32), int(session.length[0])
    session.step(token)

    def step() -> float:
        if int(session.length[0]) >= first + STRIDE:
            session.rewind(STRIDE)
            session.step(token)
        start = time.perf_counter()
        session.step(token)
        return time.perf_counter() - start

    return step


def compare(
    title: str, first: Tuple[str, Call], second: Tuple[str, Call], options: argparse.Namespace
) -> Dict[str, Any]:
    """Measure two calls in turn. Return the spread of ratio and difference, second to first, round by round, so that drift cancels out."""
    rounds = np.array(
        [
            [_burst(call, options.burst) for _, call in (first, second)]
            for _ in range(options.rounds)
        ]
    )
    return {
        "what": title,
        "names": [first[0], second[0]],
        "seconds": [asdict(spread(seconds)) for seconds in rounds.T],
        "ratio": asdict(spread(rounds[:, 1] / rounds[:, 0])),
        "difference": asdict(spread(rounds[:, 1] - rounds[:, 0])),
    }


def cases(options: argparse.Namespace) -> List[Dict[str, Any]]:
    """Return all comparisons that are possible with the given folders."""
    folder, threads = options.rope, options.threads
    model, limit = str(folder / "model.onnx"), manifests.read(folder).max_positions
    found = []
    for context in [c for c in CONTEXTS if c <= limit]:
        capacity = min(limit, context + 64)
        raw = ("artefact", Bound(model, context, capacity, threads))
        found.append(
            compare(
                f"artefact / hand, context {context}",
                ("hand", Bound(hand_graph(capacity), context, capacity, threads)),
                raw,
                options,
            )
        )
        model_of_ours = load(folder, provider="cpu", threads=threads)
        session = model_of_ours.session(capacity=capacity)
        same = ("raw", Bound(model, context, capacity, threads, model_of_ours.graph.session))
        found.append(
            compare(
                f"session / raw, context {context}",
                same,
                ("session", stepper(session, context)),
                options,
            )
        )
        if options.alibi:
            other = ("alibi", Bound(str(options.alibi / "model.onnx"), context, capacity, threads))
            found.append(
                compare(f"alibi / rope, context {context}", ("rope", raw[1]), other, options)
            )
    small, large = CAPACITIES
    if limit >= large:
        ends = [
            (
                f"capacity {c}",
                stepper(load(folder, provider="cpu", threads=threads).session(capacity=c), 128),
            )
            for c in CAPACITIES
        ]
        found.append(compare(f"session at context 128, capacity {large} / {small}", *ends, options))
        ends = [(f"capacity {c}", Bound(model, 128, c, threads)) for c in CAPACITIES]
        found.append(compare(f"raw at context 128, capacity {large} / {small}", *ends, options))
    return found


def lines(found: Sequence[Dict[str, Any]]) -> List[str]:
    heads = ("what", "first", "second", "ratio", "p10", "p90", "difference us")
    cells = []
    for each in found:
        times = [duration(part["median"]) for part in each["seconds"]]
        ratio = [f"{each['ratio'][name]:.3f}" for name in ("median", "low", "high")]
        cells.append((each["what"], *times, *ratio, f"{1e6 * each['difference']['median']:.1f}"))
    return aligned(heads, cells)


def check(folder: Path) -> None:
    """Check that a folder holds a block like that of the hand-written graph.

    Raises:
        ValueError: it has another kind, target, dtype or size.
    """
    manifest = manifests.read(folder)
    attention = manifest.config.get("attention", {})
    sizes = (
        manifest.config.get("width"),
        *(attention.get(name) for name in ("heads", "kv_heads", "head_size")),
    )
    got = (manifest.kind, manifest.target, manifest.dtype, *sizes)
    wanted = ("block", "ort", "float32", WIDTH, HEADS, HEADS, HEAD_SIZE)
    if got != wanted:
        rule = f"hand_graph {folder}: expected kind, target, dtype, width, heads, kv_heads, head_size {wanted}"
        raise ValueError(f"{rule}, got {got}; export such a block")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rope", type=Path, help="artefact folder of a rope block")
    parser.add_argument(
        "alibi", type=Path, nargs="?", help="artefact folder of an alibi block of the same sizes"
    )
    parser.add_argument("--rounds", type=int, default=40, help="pairs of bursts per comparison")
    parser.add_argument("--burst", type=int, default=40, help="calls per burst")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    for folder in filter(None, (options.rope, options.alibi)):
        check(folder)
    found = cases(options)
    print("\n".join(lines(found)))
    result = {"threads": options.threads, "onnxruntime": ort.__version__, "results": found}
    if options.json:
        json_rows.write(options.json, result)
    else:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
