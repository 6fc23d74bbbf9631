"""Capture of CUDA graphs by sessions: prompts run uncaptured, steps are captured once for each
set of addresses and shapes, and then replayed without a launch.
"""

import warnings
from pathlib import Path
from typing import Any, Callable

import onnxruntime

from posenc_export.runtime import load
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.graphs import cuda
from posenc_export.runtime.graphs.onnx_files import load_errors
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.verification import grid_inputs
from tests.cuda_dry_run.inputs import tokens
from tests.cuda_dry_run.record import Record, recording

CAPACITY = 256
BATCHES = (1, 3)
PROMPT = 8
CALLS = (
    ("prompt", 1), ("first step", 1), ("step", 1), ("prompt", 3), ("first step", 3), ("step", 1),
    ("step", 3), ("prompt", 1), ("step", 1), ("step", 3),
)  # fmt: skip


def captured(
    folder: Path, manifest: Manifest, least_us: Callable[[Callable[[], Any]], float]
) -> dict[str, Any]:
    """Return {"capture": "captured", "replayed_us": host time of a step} if all steps but the
    first of each batch size replay, otherwise {"capture": why not}.
    """
    if any(state.update == "append" for state in manifest.states):
        return {"capture": "the caches grow"}
    with warnings.catch_warnings(record=True) as warned:
        model = load(folder, provider="cuda", check=False)
        if not model.graph.steps.most:
            return {
                "capture": _refusal(folder, str(warned[0].message) if warned else "load does not")
            }
        sessions = {
            batch: model.session(batch=batch, capacity=min(CAPACITY, manifest.max_positions))
            for batch in BATCHES
        }
        for number, (kind, batch) in enumerate(CALLS):
            try:
                with recording() as record:
                    _call(sessions[batch], manifest, kind, batch)
            except GraphError as error:
                return {"capture": f"call {number}: {error}"[-300:]}
            if wrong := str(warned[0].message) if warned else _wrong(record, kind):
                return {"capture": f"call {number}, {kind} of batch {batch}: {wrong}"}
        one, session = tokens(manifest, 1, 1)[:, 0], sessions[1]
        return {
            "capture": "captured",
            "replayed_us": round(least_us(lambda: session.step(one, copy=False))),
        }


def _call(session: Any, manifest: Manifest, kind: str, batch: int) -> None:
    if kind == "prompt":
        session.reset()
        session.prefill(
            tokens(manifest, batch, PROMPT), encoder=grid_inputs.encoder_rows(manifest, batch)
        )
        return
    exchanged = any(state.update == "replace" for state in manifest.states)  # have two graphs
    for _ in range(2 if kind == "first step" and exchanged else 1):
        session.step(tokens(manifest, batch, 1)[:, 0], copy=False)


def _wrong(record: Record, kind: str) -> str:
    """Return what a call did that it should not do; empty if all is right."""
    illegal = [name for name in record.counts if name.startswith("CAPTURE_ILLEGAL")]
    if illegal or record.counts["CAPTURED_COPY"]:
        return ", ".join(illegal) or (
            f"{record.counts['CAPTURED_COPY']} copies from the host, which a replay repeats "
            "with what is there then"
        )
    replays, launches = record.counts["GRAPH_LAUNCH"], record.launches
    right = {
        "prompt": not replays,
        "first step": record.counts["CAPTURE_END"] > 0,
        "step": replays == 1 and not launches,
    }[kind]
    captures = record.counts["CAPTURE_END"]
    return "" if right else f"{replays} replays, {launches} launches, {captures} captures"


def _refusal(folder: Path, said: str) -> str:
    """Return why ONNX Runtime refuses to capture a graph; "captured" if it does not, although
    the static check says so.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    providers: tuple[Any, ...] = ((cuda.NAME, {**cuda.OPTIONS, "enable_cuda_graph": "1"}),)
    try:
        onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=list(providers), enable_fallback=0
        )
    except load_errors() as error:
        return " ".join(str(error).split())[-300:]
    return f"ONNX Runtime would capture it, but {said}"
