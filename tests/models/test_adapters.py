"""An adapter of peft beside the weights of its base is merged into them, or refused by name."""

import json
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from safetensors.torch import save_file

from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.pretrained import from_pretrained

WIDE, SQUARE = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.o_proj"
HEAD = "lm_head.weight"
SHAPES: Dict[str, Tuple[int, int]] = {WIDE: (6, 4), SQUARE: (4, 4)}  # outputs, inputs
RANK, OF = 2, "base_model.model."


def _folder(folder: Path, turned: bool = False, **config: Any) -> Dict[str, torch.Tensor]:
    """Write base and adapter of a model, and return all tensors. turned: as in Conv1D of GPT-2."""
    draw = torch.Generator().manual_seed(0)
    base = {f"{name}.weight": torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    base[HEAD] = torch.randn(7, 4, generator=draw)
    stored = {n: w.t().contiguous() if turned and n != HEAD else w for n, w in base.items()}
    adapter = {OF + HEAD: torch.ones(7, 4)} if config.get("modules_to_save") else {}
    for name, (outputs, inputs) in SHAPES.items():
        adapter[f"{OF}{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=draw)
        adapter[f"{OF}{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=draw)
    save_file(stored, folder / "model.safetensors")
    save_file(adapter, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return {**base, **adapter}


SCALES: Dict[str, Tuple[Dict[str, Any], Tuple[float, float]]] = {
    "plain": ({"target_modules": ["up_proj", "o_proj"], "init_lora_weights": True}, (3, 3)),
    "use_rslora": ({"use_rslora": True}, (6 / 2**0.5, 6 / 2**0.5)),
    "alpha_pattern": ({"alpha_pattern": {"layers.0.mlp.up_proj": 5, "proj": 9}}, (2.5, 3)),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, (3, 3)),
    "fan_in_fan_out": ({"fan_in_fan_out": True, "turned": True}, (3, 3)),
}


@pytest.mark.parametrize("case", SCALES)
def test_an_adapter_beside_its_base_is_merged_into_its_weights(case: str, tmp_path: Path) -> None:
    config, scales = SCALES[case]
    tensors = _folder(tmp_path, **config)
    with Checkpoint(tmp_path) as checkpoint:
        for (name, shape), scale in zip(SHAPES.items(), scales, strict=True):
            a, b = (tensors[f"{OF}{name}.lora_{part}.weight"] for part in "AB")
            wanted = tensors[f"{name}.weight"].double() + scale * (b.double() @ a.double())
            merged = checkpoint.tensor(f"{name}.weight")
            merged = merged.t() if config.get("turned") else merged
            assert tuple(merged.shape) == shape
            torch.testing.assert_close(merged.double(), wanted, rtol=1e-6, atol=1e-6)
        head = tensors[OF + HEAD] if config.get("modules_to_save") else tensors[HEAD]
        assert torch.equal(checkpoint.tensor(HEAD), head) and len(checkpoint.names()) == 3


REFUSED: Dict[str, Tuple[Dict[str, Any], str]] = {
    "another type": ({"peft_type": "IA3"}, "got peft_type='IA3'; save the model that merge_and"),
    "magnitudes": ({"use_dora": True, "lora_bias": True}, "got use_dora=True, lora_bias=True;"),
    "biases": ({"bias": "lora_only"}, "got bias='lora_only';"),
    "another base": ({"init_lora_weights": "pissa"}, "got init_lora_weights='pissa';"),
    "other parameters": ({"target_parameters": ["experts"]}, r"target_parameters=\['experts'\]"),
    "a later key": ({"hydra_heads": 3}, "hydra_heads=3"),
    "a pattern of endless time": ({"alpha_pattern": {"(a+)+$": 2}}, "alpha_pattern to map names"),
    "an alpha in words": ({"lora_alpha": "16"}, "lora_alpha to be a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_of_another_kind_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    config, message = REFUSED[case]
    _folder(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)


TENSORS: Dict[str, Tuple[Dict[str, torch.Tensor], str]] = {
    "an embedding": (
        {f"{OF}model.embed_tokens.lora_embedding_A": torch.ones(2, 7)},
        "got base_model.model.model.embed_tokens.lora_embedding_A;",
    ),
    "another model": (
        {f"{OF}model.layers.9.k.lora_{part}.weight": torch.ones(2, 2) for part in "AB"},
        "no model.layers.9.k.weight for .* copy the adapter to the weights of its base",
    ),
    "a convolution": (
        {
            f"{OF}{WIDE}.lora_A.weight": torch.ones(2, 4, 3),
            f"{OF}{WIDE}.lora_B.weight": torch.ones(6, 2, 1),
        },
        r"for .*up_proj.weight \[6, 4\], got \[2, 4, 3\] and \[6, 2, 1\]",
    ),
    "half a layer": ({f"{OF}{WIDE}.lora_B.weight": torch.ones(6, 2)}, "lora_B.weight;"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_no_linear_layers_of_the_base_are_refused(
    case: str, tmp_path: Path
) -> None:
    tensors, message = TENSORS[case]
    _folder(tmp_path)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=message):
        Checkpoint(tmp_path)


def test_a_folder_with_an_adapter_alone_is_refused_with_the_name_of_its_base(
    tmp_path: Path,
) -> None:
    _folder(tmp_path, base_model_name_or_path="org/base")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        ValueError,
        match="expected a folder with the weights of a model, got an adapter of 'org/base' alone; "
        "copy both files of the adapter into the folder of 'org/base', or save",
    ):
        from_pretrained(tmp_path)
