"""Checkpoints that others quantized are read as the weights that their codes stand for."""

import functools
import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is not installed")
from posenc_export import export_model
from posenc_export.export.quantization.rounding import kept
from posenc_export.export.read_module import as_model
from posenc_export.models.pretrained import from_pretrained
from tests.cases import choice
from tests.models.checkpoints import saved

GROUP, K = 32, 64
Q = "model.layers.0.self_attn.q_proj"
# The tensors of a linear layer, and the weights [N,K] that they stand for.
Made = tuple[dict[str, torch.Tensor], np.ndarray]


def _packed(codes: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack codes along the last axis into integers of 32 bits; code order[i] of each word stands
    at place i.
    """
    per = 32 // bits
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per), np.uint64)
    for place in range(per):
        part = codes[..., order[place] if order else place :: per]
        words |= part.astype(np.uint64) << np.uint64(place * bits)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def _random(rows: int, bits: int, groups: int = K // GROUP) -> list[np.ndarray]:
    """Return codes [rows,K], scales and zeros [rows,groups]."""
    source = np.random.default_rng(rows)
    scales = source.uniform(0.01, 0.02, (rows, groups)).astype(np.float16).astype(np.float32)
    codes, zeros = (source.integers(0, 1 << bits, (rows, n)) for n in (K, groups))
    return [codes, scales, zeros]


def _weights(codes: Any, scales: Any, zeros: Any, groups: Any = np.arange(K) // GROUP) -> Any:
    return ((codes - zeros[:, groups]) * scales[:, groups]).astype(np.float32)


def _gptq(rows: int, bits: int = 4, less: int = 1, shuffled: bool = False) -> Made:
    codes, scales, zeros = _random(rows, bits)
    groups = np.random.default_rng(5).permutation(K) // GROUP if shuffled else np.arange(K) // GROUP
    stored = (zeros - less) & ((1 << bits) - 1)
    tensors = {
        "qweight": _packed(codes, bits).T,
        "qzeros": _packed(stored.T, bits),
        "scales": torch.from_numpy(scales.T).half(),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return tensors, _weights(codes, scales, zeros, groups)


def _awq(rows: int) -> Made:
    codes, scales, zeros = _random(rows, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _packed(codes.T, 4, order),
        "qzeros": _packed(zeros.T, 4, order),
        "scales": torch.from_numpy(scales.T).half(),
    }, _weights(codes, scales, zeros)


def _pack_quantized(rows: int, bits: int = 4, zero: bool = False) -> Made:
    codes, scales, zeros = _random(rows, bits)
    zeros = zeros if zero else np.full_like(zeros, 1 << (bits - 1))
    tensors = {
        "weight_packed": _packed(codes, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([rows, K]),
    }
    if zero:
        tensors["weight_zero_point"] = _packed(zeros.T, bits).T
    return tensors, _weights(codes, scales, zeros)


def _int8(rows: int) -> Made:
    codes, scales, _ = _random(rows, 8, 1)
    tensors = {"weight": torch.from_numpy(codes - 128).to(torch.int8)}
    weights = ((codes - 128) * scales).astype(np.float32)
    return {**tensors, "weight_scale": torch.from_numpy(scales)}, weights


def _float8(rows: int, end: str = "weight_scale", block: int = 0) -> Made:
    source = np.random.default_rng(rows)
    weight = torch.from_numpy(source.normal(size=(rows, K))).to(torch.float8_e4m3fn)
    shape = (-(-rows // block), -(-K // block)) if block else (rows, 1)
    scales = source.uniform(0.01, 0.02, shape).astype(np.float32)
    whole = scales.repeat(block, 0)[:rows].repeat(block, 1)[:, :K] if block else scales
    return {"weight": weight, end: torch.from_numpy(scales)}, weight.float().numpy() * whole


def _of_groups(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
PACKED = functools.partial(_of_groups, "pack-quantized", type="int")
CASES: dict[str, tuple[dict[str, Any], Callable[[int], Made]]] = {
    "GPTQ": ({**GPTQ, "group_size": GROUP}, _gptq),
    "GPTQ in 8 bits": ({**GPTQ, "bits": 8, "group_size": GROUP}, functools.partial(_gptq, bits=8)),
    "GPTQ, second version": (
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        functools.partial(_gptq, less=0),
    ),
    "GPTQ in another order": ({**GPTQ, "desc_act": True}, functools.partial(_gptq, shuffled=True)),
    "AWQ": (AWQ, _awq),
    "packed": (PACKED(num_bits=4), _pack_quantized),
    "packed with zeros": (
        PACKED(num_bits=4, symmetric=False),
        functools.partial(_pack_quantized, zero=True),
    ),
    "packed in 8 bits": (PACKED(num_bits=8), functools.partial(_pack_quantized, bits=8)),
    "int8": (_of_groups("int-quantized", num_bits=8, type="int"), _int8),
    "float8": (_of_groups("float-quantized", num_bits=8, type="float"), _float8),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        functools.partial(_float8, end="weight_scale_inv", block=32),
    ),
}


def _configured(folder: Path, quantization: Any) -> None:
    """Write the config of a quantization into a folder."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": quantization}
    path.write_text(json.dumps(config))


def _quantized(case: str, folder: Path, name: str = "llama with biases") -> tuple[Path, Path]:
    """Return the folder of a quantized model, and that of the same model in float32."""
    config, make = CASES[case]
    for place in ("quantized", "plain"):
        saved(name, folder / place)
    quantized, unquantized = folder / "quantized", folder / "plain"
    few, plain = (load_file(place / "model.safetensors") for place in (quantized, unquantized))
    linear = [n for n, w in plain.items() if n.endswith("proj.weight") and w.shape[1] == K]
    for name in linear:
        tensors, weights = make(len(plain[name]))
        plain[name], start = torch.from_numpy(weights), name.removesuffix("weight")
        del few[name]
        few |= {start + end: tensor.contiguous() for end, tensor in tensors.items()}
    save_file(few, quantized / "model.safetensors", {"format": "pt"})
    save_file(plain, unquantized / "model.safetensors", {"format": "pt"})
    _configured(quantized, config)
    return quantized, unquantized


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_the_codes_stand_for(case: str, tmp_path: Path) -> None:
    result, wanted = map(from_pretrained, _quantized(case, tmp_path))
    parameters = dict(wanted.named_parameters())
    equal = {n: torch.equal(one, parameters[n]) for n, one in result.named_parameters()}
    assert equal == dict.fromkeys(parameters, True)


OF_CODES = [case for case in CASES if not {"float8", "fp8", "another"} & {*case.split()}]


@pytest.mark.parametrize("case", choice(OF_CODES, ["GPTQ", "AWQ", "packed with zeros", "int8"]))
def test_codes_of_others_are_kept(case: str, tmp_path: Path) -> None:
    model = as_model(from_pretrained(_quantized(case, tmp_path)[0]))
    rounded, parameters = kept(model).weights, dict(model.named_parameters())
    assert rounded[f"calls.model.{Q}.weight"][0].bits == (8 if "8" in case else 4)
    for name, (_, codes) in rounded.items():
        weight = parameters[name].detach().numpy()
        assert np.abs(codes.weight - weight).max() <= 2.0**-21 * np.abs(weight).max()


@pytest.mark.parametrize(
    "case", choice(["AWQ", "GPTQ", "int8", "packed", "GPTQ in another order"], ["AWQ"])
)
def test_an_artefact_with_kept_codes_is_certified(case: str, tmp_path: Path) -> None:
    model = from_pretrained(_quantized(case, tmp_path)[0])
    manifest = export_model(model, "ort", tmp_path / "artefact", weights="keep")
    assert manifest.certificate is not None and manifest.certificate["passed"]
    assert manifest.quality is not None and manifest.quality.error < 0.05


def test_four_bit_floating_point_experts_are_read(tmp_path: Path) -> None:
    folder = saved("gpt_oss", tmp_path)[1]
    path, name = folder / "model.safetensors", "model.layers.0.mlp.experts.gate_up_proj"
    held = load_file(path)
    count, inputs, outputs = held.pop(name).shape
    source = np.random.default_rng(0)
    blocks = source.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
    powers = source.integers(120, 128, (count, outputs, inputs // 32), np.uint8)
    held |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(powers)}
    save_file(held, path, {"format": "pt"})
    _configured(folder, {"quant_method": "mxfp4"})
    experts = from_pretrained(folder).model.model.layers[0].mlp.experts  # type: ignore[union-attr]
    result = experts.gates[1, 32, 3].item()
    # Gates and ups alternate; input 32 is the first of the second block.
    code = blocks[1, 6, 1, 0] & 15
    value = (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7] * (-1 if code & 8 else 1)
    assert result == value * 2.0 ** (int(powers[1, 6, 1]) - 127)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "to be one of gptq, .*, got 'bitsandbytes'",
    ),
    "three bits": (
        {**GPTQ, "bits": 3},
        "expected bits in quantization_config to be 2 or 4 or 8, got 3",
    ),
    "another order of AWQ": ({**AWQ, "version": "gemv"}, "expected version .* got 'gemv'"),
    "quantized caches": (
        {**_of_groups("pack-quantized", num_bits=4), "kv_cache_scheme": {"num_bits": 8}},
        "quantized caches, got bits 4",
    ),
    "other tensors": (
        {"quant_method": "fp8"},
        "expected tensors NAME.weight by quantization_config fp8, got none",
    ),
    "no mapping": ("gptq", "got 'gptq'"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_quantizations_are_refused_by_name(case: str, tmp_path: Path) -> None:
    folder = _quantized("GPTQ", tmp_path)[0]
    _configured(folder, REFUSED[case][0])
    with pytest.raises(ValueError, match=REFUSED[case][1]) as refused:
        from_pretrained(folder)
    assert "\n" not in str(refused.value)


def test_missing_and_misshapen_parts_are_refused_by_name(tmp_path: Path) -> None:
    folder = _quantized("GPTQ", tmp_path)[0]
    held = load_file(folder / "model.safetensors")
    other = torch.zeros(1, 1, dtype=torch.int32)
    for changed, message in (
        ({f"{Q}.scales": None}, f"{Q}.scales beside"),
        ({f"{Q}.qzeros": other}, f"expected {Q}.weight in the layout"),
    ):
        left = {name: one for name, one in {**held, **changed}.items() if one is not None}
        save_file(left, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            from_pretrained(folder)
