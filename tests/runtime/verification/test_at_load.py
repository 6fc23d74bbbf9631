"""The check of a few outputs when an artefact is loaded on a provider other than the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export import runtime
from posenc_export.runtime import load
from posenc_export.runtime.graphs.ort_graph import OrtGraph
from posenc_export.runtime.session.model import Model
from tests.tiny import decoder
from tests.traces import exported


class OnAnotherProvider(OrtGraph):
    """A graph that runs on the CPU under the name of another provider."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.provider = "cuda"


class WrongPrompts(OnAnotherProvider):
    """Answers of calls with several tokens are wrong."""

    def bind(self, feeds: Any, states: Any, outputs: Any, once: bool = False) -> Any:
        run = super().bind(feeds, states, outputs, once)

        def wrong() -> None:
            run()
            logits = outputs["logits"]
            logits[...] *= np.float32(1.001 if feeds["input_ids"].shape[1] > 1 else 1)

        return wrong


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    exported(tmp_path / "artefact", decoder("rope"), "ort")
    return tmp_path / "artefact"


def loading(graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runtime,
        "_load",
        lambda folder, manifest, provider, threads, capture: Model(
            graph(folder / "model.onnx", manifest, "cpu", threads)
        ),
    )


def test_wrong_prompts_of_a_provider_are_detected_when_it_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading(WrongPrompts, monkeypatch)
    rule = (
        "expected outputs of provider cuda within .* of the reference of the artefact, got an "
        "error of 1.*e-03 in 'batch 3, starts .*: past middle, new 1'"
    )
    with pytest.raises(ValueError, match=f"runtime: {rule}; give provider cpu"):
        load(folder, provider="cuda")
    assert load(folder, provider="cuda", check=False).provider == "cuda"


def test_provider_auto_uses_the_cpu_with_one_warning_where_outputs_are_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(folder: Path, manifest: Any, provider: str, threads: Any, capture: bool) -> Model:
        return Model(
            (OrtGraph if provider == "cpu" else WrongPrompts)(
                folder / "model.onnx", manifest, "cpu", threads
            )
        )

    monkeypatch.setattr(runtime, "_load", on)
    with pytest.warns(
        RuntimeWarning,
        match="provider auto chose cpu: expected outputs of provider cuda within .*, got an "
        "error of 1.*e-03 in",
    ):
        assert load(folder).provider == "cpu"


def test_a_provider_with_the_outputs_of_the_reference_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading(OnAnotherProvider, monkeypatch)
    assert load(folder, provider="cuda").provider == "cuda"
