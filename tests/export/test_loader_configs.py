"""Configuration files with which other programs load an artefact folder. The programs are run if
they are installed.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posenc_export.export import export
from posenc_export.models.presets import seeded
from posenc_export.models.pretrained import from_pretrained
from posenc_export.models.stack import Text
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from tests.auditing import families
from tests.tiny import decoder, encoder
from tests.traces import artefact

pytestmark = pytest.mark.xdist_group(
    "plain runtimes"
)  # one worker, so that these models are traced once
NAMES = ("config.json", "generation_config.json", "genai_config.json")
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Decoders of signature mask by target, and one that is read; tests must not modify them."""
    folder, targets = tmp_path_factory.mktemp("read"), ("onnx", "onnx-static", "ort")
    families.save("qwen3", folder)
    read = from_pretrained(folder)
    export(read, "onnx", folder / "artefact", signature="mask", verify=False)
    made = {target: artefact(decoder("rope"), target, signature="mask") for target in targets}
    return {**made, "read": folder / "artefact"}


def _present(folder: Path) -> list[str]:
    return [name for name in NAMES if (folder / name).is_file()]


def _json(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize(
    ("target", "names"), [("onnx", NAMES), ("ort", NAMES), ("onnx-static", ("genai_config.json",))]
)
def test_the_manifest_lists_the_configurations_of_a_decoder_with_a_mask(
    target: str, names: Any, made: dict[str, Path]
) -> None:
    assert _present(made[target]) == list(names)
    listed = manifests.read(made[target]).files
    assert {name: listed[name] for name in names} == {
        name: files.entry(made[target] / name) for name in names
    }


@pytest.mark.parametrize("target", ["onnx", "ort", "read"])
def test_the_configuration_has_the_sizes_of_the_caches(target: str, made: dict[str, Path]) -> None:
    config, states = _json(made[target], "config.json"), manifests.read(made[target]).states
    assert 2 * config["num_hidden_layers"] == len(states)
    assert {(state.axes[1], state.axes[3]) for state in states} == {
        (config["num_key_value_heads"], config["head_dim"])
    }


@pytest.mark.parametrize(
    ("target", "shared"), [("onnx", False), ("read", False), ("ort", True), ("onnx-static", True)]
)
def test_onnxruntime_genai_shares_buffers_for_in_place_caches(
    target: str, shared: bool, made: dict[str, Path]
) -> None:
    assert _json(made[target], "genai_config.json")["search"]["past_present_share_buffer"] is shared


@pytest.mark.parametrize(
    ("variant", "signature"),
    [("rope", "positions"), pytest.param("fox", "mask", marks=pytest.mark.exhaustive)],
)
def test_a_graph_that_these_formats_cannot_describe_has_no_configuration_file(
    variant: str, signature: str
) -> None:
    assert _present(artefact(decoder(variant), "ort", signature=signature)) == []


def test_an_encoder_has_the_configuration_of_a_bert_model() -> None:
    folder = artefact(encoder("learned"), "onnx", signature="mask")
    config = _json(folder, "config.json")
    assert _present(folder) == ["config.json"]
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "type_vocab_size": 1}
    assert config.items() >= sizes.items()


def test_the_folder_contains_stop_ids_and_tokenizer_files_of_a_checkpoint(tmp_path: Path) -> None:
    stack = seeded(decoder("rope"))
    kept = {
        "generation_config.json": b'{"eos_token_id": [7, 9], "top_k": 5}',
        "chat_template.jinja": b"{{ messages }}",
    }
    stack.text = Text(b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', (7, 9), files=kept)  # type: ignore[union-attr,assignment]
    export(stack, "onnx", tmp_path / "artefact", signature="mask", verify=False)
    assert {name: (tmp_path / "artefact" / name).read_bytes() for name in kept} == kept
    assert _json(tmp_path / "artefact", "config.json")["eos_token_id"] == [7, 9]
    model = _json(tmp_path / "artefact", "genai_config.json")["model"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([7, 9], 7)


def test_without_stop_ids_the_last_token_id_is_the_padding_of_onnxruntime_genai(
    made: dict[str, Path],
) -> None:
    model = _json(made["ort"], "genai_config.json")["model"]
    assert (model["eos_token_id"], model["pad_token_id"]) == ([], model["vocab_size"] - 1)


def _wanted(folder: Path, count: int) -> list[int]:
    session = load(folder, provider="cpu").session()
    return [int(token[0]) for token in session.generate([np.array(PROMPT)], count)]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["onnx", "ort"])
def test_optimum_onnx_generates_the_same_tokens(target: str, made: dict[str, Path]) -> None:
    optimum = pytest.importorskip(
        "optimum.onnxruntime", reason="optimum-onnx is not installed", exc_type=ImportError
    )
    import torch

    ids = torch.tensor([PROMPT])
    made_ids = optimum.ORTModelForCausalLM.from_pretrained(made[target]).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )
    assert made_ids[0, len(PROMPT) :].tolist() == _wanted(made[target], 12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["onnx", "onnx-static", "ort"])
def test_onnxruntime_genai_generates_the_same_tokens(target: str, made: dict[str, Path]) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    model = genai.Model(str(made[target]))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(PROMPT) + 12)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(PROMPT)
    while not generator.is_done():
        generator.generate_next_token()
    assert list(generator.get_sequence(0))[len(PROMPT) :] == _wanted(made[target], 12)
