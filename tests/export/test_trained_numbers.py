"""Artefacts have the trained numbers of their encodings."""

import copy
import functools
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save
from torch import Tensor

from posenc_export import Stack
from posenc_export.export import Sources, export
from posenc_export.export.trained_numbers import FILE_NAME, with_trained_encodings
from posenc_export.models.placed import placed
from posenc_export.models.presets import load_preset, seeded
from posenc_export.runtime.artefact import files
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
    assert _same(
        with_trained_encodings(tmp_path / "a"), copy.deepcopy(sources.model).half().float()
    )


def test_an_artefact_without_trained_numbers_has_no_file(tmp_path: Path) -> None:
    manifest = export(seeded(block("rope")), "ort", tmp_path / "a", verify=False)
    assert FILE_NAME not in manifest.files


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


CHANGES = {
    "got none; export it again": {},
    r"got \[2, 6\]; export it again": {"attention.encoding.r.value": torch.zeros(2, 6)},
    "got an error .*; export it again": None,
}


@pytest.mark.parametrize("message", CHANGES)
def test_numbers_that_are_missing_or_damaged_are_refused(message: str, tmp_path: Path) -> None:
    manifest, path = (
        export(_sources(block, "kerple"), "ort", tmp_path / "a", verify=False),
        tmp_path / "a" / FILE_NAME,
    )
    numbers = CHANGES[message]
    path.write_bytes(b"{" if numbers is None else save(numbers))
    listed = {**manifest.files, FILE_NAME: files.entry(path)}
    manifests.write(manifest.replace(files=listed), tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        with_trained_encodings(tmp_path / "a")


def test_no_weight_but_those_of_encodings_is_read(tmp_path: Path) -> None:
    export(_sources(decoder, "t5"), "ort", tmp_path / "a", verify=False)
    model = with_trained_encodings(tmp_path / "a")
    assert isinstance(model, Stack) and {
        weight.device.type for name, weight in model.named_parameters() if ".encoding." not in name
    } == {"meta"}
