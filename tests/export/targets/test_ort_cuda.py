"""Target ort-cuda: slots that the caller counts, and what the CUDA provider would refuse."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec.structs import replace

from posenc_export.export import export
from posenc_export.export.targets import ort
from posenc_export.runtime import load
from posenc_export.runtime.session import runner
from tests.tiny import block, decoder
from tests.traces import exported, sources

pytestmark = pytest.mark.xdist_group("alibi")
GQA = "GroupQueryAttention"


def with_sinks(variant: str) -> Any:
    plain = block(variant)
    return replace(plain, attention=replace(plain.attention, sinks=True))


def operators(folder: Path) -> dict[str, int]:
    nodes = [
        node.op_type
        for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    ]
    return {name: nodes.count(name) for name in set(nodes)}


@pytest.mark.parametrize(("variant", "operator"), [("alibi", "Attention"), ("rope", GQA)])
def test_sinks_are_certified_and_stand_in_group_query_attention_unless_there_is_a_bias(
    variant: str, operator: str, tmp_path: Path
) -> None:
    manifest = export(sources(with_sinks(variant)), "ort-cuda", tmp_path / "artefact")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    attention = {name: manifest.operators.get(name, 0) for name in ("Attention", GQA)}
    assert attention == {"Attention": 0, GQA: 0, operator: 1}


def test_a_layer_launches_no_kernel_for_its_residuals_and_prompts_are_fed_in_larger_chunks(
    tmp_path: Path,
) -> None:
    results = {
        name: export(sources(decoder(name)), "ort-cuda", tmp_path / name, verify=False)
        for name in ("rope", "alibi")
    }
    assert all(
        manifest.operators["SkipSimplifiedLayerNormalization"] == 3
        and manifest.operators["Add"] == 1
        for manifest in results.values()
    )  # of two layers
    assert [results["rope"].chunk, results["alibi"].chunk] == [ort.CHUNK, 256]


def test_what_a_cuda_kernel_refuses_is_refused_at_export_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowerings = ort.CUDA_LOWERINGS._replace(on_device=False)
    monkeypatch.setattr(ort, "CUDA_LOWERINGS", lowerings)
    with pytest.raises(
        ValueError,
        match=r"for target ort-cuda, got one that cannot run: GroupQueryAttention .* head_sink "
        r"\(sinks\); change the model, or choose",
    ):
        export(sources(with_sinks("alibi")), "ort-cuda", tmp_path / "artefact", verify=False)
    assert not (tmp_path / "artefact").exists()


def test_steps_count_slots_in_multiples_and_give_the_outputs_of_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = 16
    monkeypatch.setattr(runner, "STEP_SLOTS", slots)
    exported(tmp_path / "artefact", decoder("alibi"), "ort-cuda")
    model = load(tmp_path / "artefact", provider="cpu", threads=1)
    ids = np.arange(2 * (slots + 9)).reshape(2, -1) % 61
    whole, session = model.session(batch=2).prefill(ids), model.session(batch=2)
    session.prefill(ids[:, : slots - 3])
    result, steps = [], []
    for column in range(slots - 3, ids.shape[1]):
        result.append(session.step(ids[:, column]))
        steps.append(session._state.bound[1])
    assert len(set(map(id, steps))) == 2  # one for each multiple
    assert [len(steps[index].feeds["slots"]) for index in (0, -1)] == [slots, 2 * slots]
    assert (
        np.abs(np.stack(result, axis=1).astype(np.float32) - whole[:, slots - 3 :]).max()
        < 0.01 * np.abs(whole).max()
    )
