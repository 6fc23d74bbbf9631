"""Every encoding on every target, through the whole grid."""

from pathlib import Path

import pytest

from posenc_export.export import TARGETS, export
from posenc_export.models.config import DecoderConfig
from posenc_export.models.presets import seeded
from posenc_export.runtime import manifest as manifests
from tests.tiny import VARIANTS, block, decoder


def _passes(config: object, target: str, folder: Path, **how: str) -> None:
    export(seeded(config), target, folder / "artefact", **how)  # type: ignore[arg-type]
    certificate = manifests.read(folder / "artefact").certificate
    assert certificate is not None and certificate["passed"] and len(certificate["cells"]) > 30


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoder_matches_eager_at_every_cut(variant: str, target: str, tmp_path: Path) -> None:
    _passes(decoder(variant), target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["rope", "alibi", "sinusoidal"])
def test_block_in_half_precision_matches_eager(variant: str, target: str, tmp_path: Path) -> None:
    _passes(block(variant), target, tmp_path, dtype="float16")


@pytest.mark.parametrize("target", [name for name, target in TARGETS.items() if "mask" in target.layout])
@pytest.mark.parametrize("variant", ["rope", "alibi", "learned"])
def test_mask_signature_matches_eager(variant: str, target: str, tmp_path: Path) -> None:
    _passes(decoder(variant), target, tmp_path, signature="mask")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["rope", "learned", "nope", "input_rnn"])
def test_linear_attention_matches_eager_and_its_quadratic_form(variant: str, target: str, tmp_path: Path) -> None:
    _passes(decoder(variant, mechanism="linear", kv_heads=6), target, tmp_path)
    names = [state.past for state in manifests.read(tmp_path / "artefact").states]
    assert not any(name.endswith(("key", "value", "positions")) for name in names)  # nothing that grows: a step costs the same everywhere


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", ["rope", "alibi", "learned", "nope"])
def test_bidirectional_decoder_matches_eager_whole_padded_and_ragged(variant: str, target: str, tmp_path: Path) -> None:
    export(seeded(decoder(variant, causal=False)), target, tmp_path / "artefact")
    manifest = manifests.read(tmp_path / "artefact")
    assert not manifest.states and manifest.certificate is not None and manifest.certificate["passed"]


@pytest.mark.parametrize("target", TARGETS)
def test_layer_norm_gelu_biases_and_free_head_match_eager(target: str, tmp_path: Path) -> None:
    attention = block("rope", qkv_bias=True, output_bias=True)
    _passes(DecoderConfig(61, 2, 40, attention, norm="layer", mlp="gelu", mlp_bias=True, tied=False), target, tmp_path)


@pytest.mark.parametrize("head_size", [8, 24])
def test_head_sizes_the_kernel_cannot_rotate_are_rotated_outside(head_size: int, tmp_path: Path) -> None:
    _passes(block("rope", head_size=head_size), "ort", tmp_path)


def test_head_size_the_kernel_refuses_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiples of 8 .* got 12; choose target onnx"):
        export(seeded(block("rope", head_size=12)), "ort", tmp_path / "artefact")
    assert not list(tmp_path.iterdir())
