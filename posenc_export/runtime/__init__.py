"""Load and run artefacts. Needs numpy, msgspec and ONNX Runtime; torch only for the targets
torchscript and pt2.
"""

import contextlib
import warnings
from pathlib import Path
from typing import Callable

import numpy as np

from posenc_export.runtime import grids
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import Proof
from posenc_export.runtime.artefact.files import check as check_files
from posenc_export.runtime.artefact.files import checked, locate
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.rules import WEIGHTS, graph_file
from posenc_export.runtime.graphs import providers
from posenc_export.runtime.graphs.providers import AUTO, Threads, threads_for
from posenc_export.runtime.session.errors import GraphError
from posenc_export.runtime.session.model import Conversation, Model
from posenc_export.runtime.session.session import Session
from posenc_export.shared.refusal import refusal, short_repr

__all__ = [
    "Conversation", "GraphError", "Manifest", "Model", "Proof", "Session",
    "grids", "load", "verify",
]  # fmt: skip


def load(
    folder: str | Path,
    provider: str = "auto",
    threads: Threads = AUTO,
    digest: str | None = None,
    check: bool = True,
    capture: bool = True,
) -> Model:
    """Load an artefact folder after checking its files against its manifest.

    Args:
        folder: artefact folder, or the name of a preset if no such folder exists.
        provider: "auto", "cpu" or "cuda" for ONNX Runtime.
        threads: threads per operator, at most providers.MOST_THREADS; "auto" uses as many as the
            size of the model's products occupies, at least 2, and None all cores. torch takes all
            for "auto", and has one number for all its users, which a graph sets while it runs.
        digest: expected digest of the artefact (`posenc inspect` prints it), obtained from a source
            other than the folder itself. None skips the comparison.
        check: on a provider other than the CPU, compare a few outputs with the reference of the
            artefact. If they differ, "auto" uses the CPU with a warning, and other choices are an
            error. An artefact without a reference is not checked.
        capture: on CUDA, capture steps as CUDA graphs and replay them, if the artefact allows it
            (`posenc inspect` says so). Threads have graphs of their own, which are kept until the
            model is deleted: use False for sessions in many short-lived threads.

    Raises:
        ValueError: the folder is not an artefact, a file is altered, the digest differs, threads is
            no such number, the provider is not available, or its outputs differ from the reference
            by more than the tolerance of the artefact.
        ModuleNotFoundError: the extra that the target needs is not installed.
    """
    folder = locate(folder)
    providers.check_threads(threads)
    manifest = manifests.read_alone(folder, digest)
    providers.check_name(provider, manifest)
    count = threads_for(threads, manifest)
    model = _load(folder, manifest, provider, count, capture)
    if not check or model.provider == "cpu":
        return model
    from posenc_export.runtime.verification.measuring import check_outputs

    try:
        check_outputs(model, folder)
    except ValueError as error:
        if provider != "auto" or manifest.dtype == "bfloat16":  # in which no CPU computes here
            raise
        said = str(error).removeprefix("runtime: ").rpartition(";")[0]
        message = f"runtime: provider auto chose cpu: {said}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return _load(folder, manifest, "cpu", count, capture)
    return model


def _load(
    folder: Path, manifest: Manifest, provider: str, threads: int | None, capture: bool
) -> Model:
    if manifest.in_torch:
        check_files(folder, manifest)  # before torch reads a program
        from posenc_export.runtime.graphs.torch_graph import load_torch

        return Model(load_torch(folder, manifest, threads), folder)
    file = folder / graph_file(manifest)
    from posenc_export.runtime.graphs.ort_graph import OrtGraph
    from posenc_export.runtime.graphs.ort_options import choose_provider

    with checked(folder, manifest, meanwhile=WEIGHTS):
        name = choose_provider(provider, manifest)
        model = Model(OrtGraph(file, manifest, name, threads, capture), folder)
    if name == "cpu" and manifest.states and not manifest.encoder:
        # ONNX Runtime keeps one plan of memory for all calls whose sizes have the same XOR, that of
        # the first. With the plan of a prompt, a step of a small decoder takes 1.03 to 1.09 times.
        token = np.zeros((1, 1, *manifest.inputs[0].token_shape), manifest.inputs[0].dtype)
        with contextlib.suppress(GraphError):  # which a call with tokens reports
            model.session(capacity=1).prefill(token)
    return model


def verify(
    folder: str | Path,
    provider: str = "auto",
    threads: int | None = 1,
    digest: str | None = None,
    progress: Callable[[str], None] | None = None,
    record: bool = True,
    tolerance: float | None = None,
    quick: bool = False,
) -> Proof:
    """Verify an artefact on this machine: run every cell of the parity grid and compare with the
    reference stored in the artefact.

    Of an artefact that rounds activations or caches, the float32 form runs every cell on the CPU
    (verification/float32_form.py). As exported it runs every cell within a bound of rounding; but
    on the CPU, the errors of the quick grid are reported and have no limit if it is in few bits.

    Args:
        provider, threads, digest: as for `load`.
        progress: called with one line of text at each stage.
        record: write the proof into the manifest, unless the artefact is a preset; use False for a
            read-only folder.
        tolerance: largest error that passes, of the float32 form if the artefact has one, or of the
            provider's outputs if that is not the CPU; None for the tolerance of the export, which
            must be at most 0.1.
        quick: run one cell for each kind of call (verification.scenarios.Level) instead of all.

    Returns:
        The certificate (artefact.certificate): "passed", "tolerance", "provider", "machine",
        "cells" with the error of each, "bounds", "failures", "grid", "unreached" and "checks".

    Raises:
        ValueError: as for `load`; the artefact has no reference, or another one has replaced it
            meanwhile; the tolerance of the export is above 0.1 and `tolerance` is not given.
        ModuleNotFoundError: as for `load`.
        OSError: the proof cannot be recorded in the folder.
    """
    from posenc_export.runtime.verification import checks, measuring, proof

    folder = locate(folder)
    proof.check_tolerance(tolerance)
    if not isinstance(quick, bool):
        raise refusal("verify", "quick to be True or False", short_repr(quick))
    progress = progress or (lambda _: None)
    model = load(folder, provider, threads, digest, check=False)
    manifest = model.manifest
    expected = proof.read(manifest, folder)
    assert manifest.reference is not None  # checked by proof.read
    accuracy = proof.accuracy_on(model.provider, manifest.reference, tolerance)
    measured = measuring.measured(model, folder, expected, accuracy, progress, threads, quick)
    measured.checks |= checks.of_artefact(folder, model, progress)
    certificate = proof.certificate(model, accuracy, measured, quick)
    if record:
        manifests.add_proof(folder, manifest.digest, certificate)
    return certificate
