"""Other runtimes of the benchmark compute the same outputs as the artefact. Runtimes that are
not installed are skipped.
"""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from msgspec.structs import replace

from posenc_export.benchmark import contestants, run
from posenc_export.benchmark.runtimes import RUNTIMES
from posenc_export.runtime import load
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import choice
from tests.tiny import block, decoder
from tests.traces import artefact

# One worker, so that these models are traced once.
pytestmark = pytest.mark.xdist_group("plain runtimes")
ROPE = decoder("rope")
MODELS = {
    "block-rope": block("rope"),
    "decoder-rope": ROPE,
    "decoder-nope": decoder("nope"),
    "decoder-untied": replace(ROPE, head=replace(ROPE.head, tied=False)),
}
TARGET = {"openvino": "onnx"}  # target of the loaded artefact; ort for other runtimes
QUICK = [("eager", "block-rope", 2), ("transformers", "decoder-rope", 1)]
OTHERS = [
    ("transformers", "decoder-untied", 2),
    ("eager", "decoder-rope", 2),
    ("genai", "decoder-rope", 1),
    ("llama.cpp", "decoder-rope", 2),
    ("llama.cpp", "decoder-untied", 1),
    ("openvino", "decoder-untied", 2),
]


@pytest.fixture(scope="module")
def folders() -> Callable[..., Path]:
    """Return a function of model, target and signature that returns the folder of an artefact."""

    def of(model: str, target: str = "ort", signature: str = "positions") -> Path:
        return artefact(MODELS[model], target, signature=signature)

    return of


def answers(session: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the outputs of a prompt, of steps, of steps after a rewind, and for a single row of
    a step after a prompt in two calls.
    """
    results = [np.asarray(session.prefill(tokens[:, :16], logits_to_keep=1))[:, -1]]
    results += [np.array(session.step(tokens[:, index])) for index in range(16, 20)]
    session.rewind(3)
    results += [np.array(session.step(tokens[:, index])) for index in range(17, 24)]
    session.reset()
    for part in np.split(tokens[:, :20], [12] if len(tokens) == 1 else [], axis=1):
        session.prefill(part, logits_to_keep=1)
    return np.stack([*results, np.array(session.step(tokens[:, 20]))])


@pytest.mark.filterwarnings("ignore")  # the libraries warn
@pytest.mark.parametrize(("runtime", "model", "batch"), choice([*QUICK, *OTHERS], QUICK))
def test_a_runtime_computes_the_outputs_of_the_artefact(
    runtime: str, model: str, batch: int, folders: Callable[..., Path]
) -> None:
    missing = RUNTIMES[runtime].missing()
    if missing:
        pytest.skip(f"{' and '.join(missing)} is not installed")
    known = RUNTIMES[runtime]
    signature = "positions" if known.builds else "mask"
    folder = folders(model, TARGET.get(runtime, "ort"), signature)
    manifest, rng = manifests.read(folder), np.random.default_rng(0)
    assert known.supports(folder, manifest)
    tokens = rng.integers(0, 61, (batch, 24))
    if not manifest.vocabulary:
        tokens = rng.standard_normal((batch, 24, 48)).astype(np.float32)
    peer = importlib.import_module(f"posenc_export.benchmark.peers.{known.peer}")
    session = peer.open_session(folder, manifest, 1, batch, **known.options)
    wanted = answers(load(folder, provider="cpu", threads=1).session(batch), tokens)
    half = runtime == "llama.cpp"  # its attention has a mask and sums in float16
    bound = 3e-3 if half else tolerance("float32", 2, 48)
    assert worst_error(answers(session, tokens), wanted) <= bound


def test_an_error_about_a_missing_runtime_names_its_requirement(
    folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = dataclasses.replace(RUNTIMES["genai"], needs=("a_module_that_nobody_has",))
    monkeypatch.setitem(RUNTIMES, "genai", lacking)
    said = "to be installed, got none; pip install onnxruntime-genai, or omit genai"
    with pytest.raises(ValueError, match=f"genai: expected a_module_that_nobody_has {said}"):
        run([folders("decoder-rope")], ("genai",))


REFUSED = [
    ("genai", "decoder-rope", "a decoder exported with --signature mask for an ONNX target"),
    ("transformers", "decoder-nope", "a float32 decoder of Llama's shape"),
]


@pytest.mark.parametrize(("runtime", "model", "rule"), choice(REFUSED, REFUSED[:1]))
def test_a_runtime_that_supports_none_of_the_folders_is_refused(
    runtime: str, model: str, rule: str, folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RUNTIMES, runtime, dataclasses.replace(RUNTIMES[runtime], needs=()))
    with pytest.raises(ValueError, match=f"benchmark {runtime}: expected .*{rule}"):
        contestants.gather([folders(model)], (runtime,))
