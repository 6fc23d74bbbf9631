"""Artefacts have the trained numbers of their encodings: where the graph holds them, and in
encodings.bin otherwise.
"""

import copy
import functools
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from posenc_export import Stack
from posenc_export.export import Sources, export
from posenc_export.export.trained_numbers import FILE_NAME, with_trained_encodings
from posenc_export.models.placed import placed
from posenc_export.models.presets import load_preset, seeded
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.shared.preset_folders import preset_folder
from tests.tiny import VARIANTS, block, decoder

pytestmark = pytest.mark.xdist_group("trained numbers")  # one worker traces each model once


def _trained(config: Any) -> Any:
    """Return a model whose encodings have other numbers than a new one."""
    model = seeded(config)
    with torch.no_grad():
        for each in placed(model):
            for weight in each.encoding.parameters():
                weight.mul_(0.875).add_(0.125)
            each.encoding.prepare()
    return model


@functools.lru_cache(maxsize=None)
def _sources(make: Any, name: str) -> Sources:
    """Return a trained model that several tests export, traced once."""
    return Sources(_trained(make(name)))


def _numbers(model: Any) -> Dict[str, Tensor]:
    """Return the trained numbers of all encodings of a model."""
    return {
        f"{each.layer} {name}": value
        for each in placed(model)
        for name, value in each.encoding.state_dict().items()
    }


def _same(one: Any, other: Any) -> bool:
    ours, theirs = _numbers(one), _numbers(other)
    return (
        ours.keys() == theirs.keys()
        and bool(ours)
        and all(torch.equal(ours[name], theirs[name]) for name in ours)
    )


FURTHER = tuple(
    "learned fire shaw recurrent floater transformer_xl deberta cope fox swin_v2 pope".split()
)
CASES = [
    *(("t5", target) for target in ("ort", "torchscript", "pt2")),
    ("rope_2d", "ort"),
    *(pytest.param(name, "onnx", marks=pytest.mark.exhaustive) for name in FURTHER),
]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_the_trained_numbers_of_an_artefact_are_those_of_its_module(
    name: str, target: str, tmp_path: Path
) -> None:
    sources = _sources(block, name)
    export(sources, target, tmp_path / "a", verify=False)
    assert _same(with_trained_encodings(tmp_path / "a"), sources.model)


def test_a_model_with_rounded_weights_keeps_the_numbers_of_its_encodings(tmp_path: Path) -> None:
    sources = _sources(block, "rope_2d")
    export(sources, "ort", tmp_path / "a", verify=False, weights="int8")
    assert _same(with_trained_encodings(tmp_path / "a"), sources.model)


def test_numbers_of_float16_are_those_that_the_artefact_computes_with(tmp_path: Path) -> None:
    sources = _sources(block, "learned")
    export(sources, "onnx", tmp_path / "a", verify=False, dtype="float16")
    (numbers,) = manifests.read(tmp_path / "a").encodings.values()
    assert numbers.dtype == "float16" and _same(
        with_trained_encodings(tmp_path / "a"), copy.deepcopy(sources.model).half().float()
    )


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("ort", "model.onnx.data"),
        ("onnx-static", "model.onnx.data"),
        ("torchscript", "model.pt"),
        ("pt2", "model.pt2"),
    ],
)
def test_a_table_that_the_graph_holds_is_not_stored_twice(
    target: str, file: str, tmp_path: Path
) -> None:
    export(_sources(block, "learned"), target, tmp_path / "a", verify=False)
    (numbers,) = manifests.read(tmp_path / "a").encodings.values()
    assert (numbers.file, numbers.shape, numbers.bytes) == (
        file,
        (1100, 48),
        4 * 1100 * 48,
    ) and not (tmp_path / "a" / FILE_NAME).exists()


def test_a_matrix_that_the_graph_holds_transposed_is_not_stored_twice(tmp_path: Path) -> None:
    sources = _sources(block, "fox_pair")
    manifest = export(sources, "ort", tmp_path / "a", verify=False)
    (numbers,) = (numbers for numbers in manifest.encodings.values() if len(numbers.shape) == 2)
    assert (
        numbers.transposed
        and numbers.file == "model.onnx.data"
        and _same(with_trained_encodings(tmp_path / "a"), sources.model)
    )


def test_numbers_of_which_the_graph_keeps_only_results_are_in_a_file_of_the_manifest(
    tmp_path: Path,
) -> None:
    manifest = export(_sources(block, "kerple"), "ort", tmp_path / "a", verify=False)
    (numbers,) = manifest.encodings.values()
    assert (
        numbers.file == FILE_NAME and manifest.files[FILE_NAME].bytes == numbers.bytes == 4 * 2 * 6
    )


def test_an_artefact_without_trained_numbers_has_no_entry_and_no_file(tmp_path: Path) -> None:
    manifest = export(seeded(block("rope")), "ort", tmp_path / "a", verify=False)
    assert "encodings" not in manifest.to_json() and FILE_NAME not in manifest.files


def test_layers_with_weights_of_their_own_have_each_their_numbers(tmp_path: Path) -> None:
    model = _trained(decoder("shaw"))
    with torch.no_grad():
        placed(model)[2].encoding.keys.mul_(-1)
    export(model, "ort", tmp_path / "a", verify=False)
    assert _same(with_trained_encodings(tmp_path / "a"), model)


def test_the_parts_of_a_combined_encoding_have_their_numbers(tmp_path: Path) -> None:
    config = decoder("t5")
    (name,) = config.layers
    attention = replace(
        config.layers[name].attention, encodings=(VARIANTS["t5"], VARIANTS["kerple"])
    )
    model = _trained(
        replace(config, layers={name: replace(config.layers[name], attention=attention)})
    )
    export(model, "ort", tmp_path / "a", verify=False)
    assert _same(with_trained_encodings(tmp_path / "a"), model)


@pytest.mark.parametrize("name", ["small-t5", "small-fire"])
def test_a_preset_has_the_numbers_that_were_trained(name: str) -> None:
    folder = preset_folder(name)
    assert folder is not None and _same(with_trained_encodings(folder), load_preset(name))


def test_an_artefact_of_an_earlier_version_is_refused_with_the_name_of_what_it_lacks(
    tmp_path: Path,
) -> None:
    manifest = export(_sources(block, "kerple"), "ort", tmp_path / "a", verify=False)
    manifests.write(manifest.replace(encodings={}), tmp_path / "a")
    with pytest.raises(
        ValueError,
        match=r"expected the trained numbers attention\.encoding\.r\.value .* shape \[2, 6, 1, "
        r"1\], got none; export it again",
    ):
        with_trained_encodings(tmp_path / "a")


@pytest.mark.parametrize("change", [{"offset": 1}, {"file": "other.bin"}, {"shape": (2, 6, 1, 2)}])
def test_numbers_outside_their_file_are_refused(change: Dict[str, Any], tmp_path: Path) -> None:
    manifest = export(_sources(block, "kerple"), "ort", tmp_path / "a", verify=False)
    manifests.write(
        manifest.replace(
            encodings={
                name: replace(numbers, **change) for name, numbers in manifest.encodings.items()
            }
        ),
        tmp_path / "a",
    )
    with pytest.raises(
        ValueError,
        match=r"posenc.json: expected encodings\..*r\.value within the \d+ bytes that files gives",
    ):
        manifests.read(tmp_path / "a")


def test_no_weight_but_those_of_encodings_is_read(tmp_path: Path) -> None:
    export(_sources(decoder, "t5"), "ort", tmp_path / "a", verify=False)
    model = with_trained_encodings(tmp_path / "a")
    assert isinstance(model, Stack) and {
        weight.device.type for name, weight in model.named_parameters() if ".encoding." not in name
    } == {"meta"}
