"""How GPTQ, AWQ, compressed-tensors, fp8 and MXFP4 store weights in safetensors."""

import math
from typing import Any, Callable, Mapping, NamedTuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.weight_blocks import Blocks
from posenc_export.shared.refusal import refusal

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]  # shapes of tensors of a weight, by the ends of their names
Parts = Mapping[str, Tensor]  # tensors of a weight, by the ends of their names
WORD = 32  # bits of an integer that holds several codes
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a word of each of eight codes
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
CONVERT = "save the model in float32, float16 or bfloat16"
WHOLE_SHAPE = ".weight_shape"  # a tensor with the shape of the weight


class Whole(NamedTuple):
    """Weights (code - zero) * scale of whole numbers."""

    codes: np.ndarray  # [N,K] int16, without sign
    # scales, zeros: [N,groups] float32
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray  # group of each input, [K] int64
    bits: int  # of codes

    def weight(self) -> np.ndarray:
        """Return the weights [N,K] float32."""
        weights = (self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups]
        return weights.astype(np.float32)

    def blocks(self) -> Blocks | None:
        """Return blocks of 128, 64 or 32 inputs; None if groups or bits do not fit."""
        rows, inputs = self.codes.shape
        sizes = [size for size in (128, 64, 32) if inputs % size == 0]
        first = {size: self.groups[::size, None] for size in sizes}
        alike = (n for n in sizes if (self.groups.reshape(-1, n) == first[n]).all())
        block = next(alike, None)
        if block is None or self.bits not in (4, 8):
            return None
        middle, of_block = 1 << (self.bits - 1), self.groups[::block]
        scales = np.ascontiguousarray(self.scales[:, of_block])
        offsets = (np.float32(middle) - self.zeros[:, of_block]) * scales
        codes = (self.codes - middle).astype(np.int8).reshape(rows, -1, block)
        return Blocks(codes, scales, offsets if offsets.any() else None, self.bits)


class Layout(NamedTuple):
    """How a method stores a weight."""

    mark: str  # end of the name of the tensor with the codes
    # Ends of the names of further tensors; those that end with ? may be missing.
    others: tuple[str, ...]
    read: Callable[[Parts], Whole | np.ndarray]  # the weight in whole numbers or in float32
    # Returns the shape of the weight from those of the tensors.
    shape: Callable[[Shapes], Shape] = lambda shapes: shapes[".weight"]
    name: str = ".weight"  # end of the name of the weight


def layout_of(config: Any) -> Layout:
    """Return the layout of a quantization_config. ValueError: one that cannot be read."""
    method = method_of(config)
    if not isinstance(config, Mapping) or method not in METHODS:
        rule = f"quant_method in quantization_config to be one of {', '.join(METHODS)}"
        raise refusal("checkpoint", rule, repr(method), CONVERT)
    return METHODS[str(method)](config)


def method_of(config: Any) -> Any:
    return config.get("quant_method") if isinstance(config, Mapping) else config


def _only(config: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = config.get(key, default)
    if value not in allowed:
        rule = f"{key} in quantization_config to be {' or '.join(map(str, allowed))}"
        raise refusal("checkpoint", rule, repr(value), CONVERT)
    return value


def _gptq(config: Mapping[str, Any]) -> Layout:
    """Codes packed along inputs, zeros along outputs, in format version 1 less 1."""
    bits = _only(config, "bits", (2, 4, 8), None)
    version = _only(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    less = 1 if version == "gptq" else 0

    def whole(parts: Parts) -> Whole:
        codes, scales = _bits(parts[".qweight"].T, bits), _scales(parts[".scales"].T)
        zeros = (_bits(parts[".qzeros"], bits) + less) & ((1 << bits) - 1)
        size = -(-codes.shape[1] // scales.shape[1])
        groups = _groups(parts.get(".g_idx"), codes.shape[1], size)
        return Whole(codes, scales, zeros.T[: len(codes)].astype(np.float32), groups, bits)

    def shape(shapes: Shapes) -> Shape:
        return shapes[".qweight"][1], shapes[".qweight"][0] * WORD // bits

    return Layout(".qweight", (".qzeros", ".scales", ".g_idx?"), whole, shape)


def _awq(config: Mapping[str, Any]) -> Layout:
    """Codes and zeros of 4 bits packed along outputs, those of even outputs first in a word."""
    bits = _only(config, "bits", (4,), None)
    _only(config, "version", ("gemm", "GEMM"), "gemm")

    def columns(words: Tensor) -> np.ndarray:
        codes = _bits(words, bits).reshape(len(words), -1, WORD // bits)
        return codes[..., list(AWQ_ORDER)].reshape(len(words), -1)

    def whole(parts: Parts) -> Whole:
        codes, scales = columns(parts[".qweight"]).T, _scales(parts[".scales"].T)
        zeros = columns(parts[".qzeros"]).T.astype(np.float32)
        groups = _groups(None, codes.shape[1], codes.shape[1] // scales.shape[1])
        return Whole(np.ascontiguousarray(codes), scales, zeros, groups, bits)

    def shape(shapes: Shapes) -> Shape:
        return shapes[".qweight"][1] * WORD // bits, shapes[".qweight"][0]

    return Layout(".qweight", (".qzeros", ".scales"), whole, shape)


def _compressed(config: Mapping[str, Any]) -> Layout:
    """Packed codes of 4 or 8 bits, int8, or float8, of compressed-tensors."""
    bits, kind = _compressed_kind(config)
    formats = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
    if _only(config, "format", formats, None) == "pack-quantized":
        others = (".weight_scale", f"{WHOLE_SHAPE}?", ".weight_zero_point?", ".weight_g_idx?")

        def shape(shapes: Shapes) -> Shape:
            return shapes[".weight_packed"][0], shapes[".weight_packed"][1] * WORD // bits

        return Layout(".weight_packed", others, lambda parts: _packed(parts, bits), shape)
    named = (".weight_scale", ".weight_zero_point?")
    return Layout(".weight", named, _scaled if kind == "float" else _int8)


def _compressed_kind(config: Mapping[str, Any]) -> tuple[int, Any]:
    """Return the bits and the type of all weights of compressed-tensors."""
    groups = config.get("config_groups")
    listed = groups.values() if isinstance(groups, Mapping) else []
    weights = [group.get("weights") or {} for group in listed]
    bits = {settings.get("num_bits") for settings in weights}
    sparse = (config.get("sparsity_config") or {}).get("format", "dense") != "dense"
    if config.get("kv_cache_scheme") or sparse or bits not in ({4}, {8}):
        rule = "compressed-tensors with weights of 4 or 8 bits in all groups, without sparse "
        got = f"bits {', '.join(map(str, bits)) or 'none'}, {config.get('format')!r}"
        raise refusal("checkpoint", f"{rule}weights and quantized caches", got, CONVERT)
    return bits.pop(), weights[0].get("type")


def _packed(parts: Parts, bits: int) -> Whole:
    words, scales = parts[".weight_packed"], _scales(parts[".weight_scale"])
    inputs = int(parts[WHOLE_SHAPE][1]) if WHOLE_SHAPE in parts else words.shape[1] * WORD // bits
    codes = _bits(words, bits)[:, :inputs]
    zeros = np.full(scales.shape, 1 << (bits - 1), np.float32)
    if ".weight_zero_point" in parts:
        zeros = _bits(parts[".weight_zero_point"].T, bits).T[: len(codes)].astype(np.float32)
    groups = _groups(parts.get(".weight_g_idx"), inputs, inputs // scales.shape[1])
    return Whole(codes, scales, zeros, groups, bits)


def _int8(parts: Parts) -> Whole:
    codes, scales = parts[".weight"].to(torch.int16).numpy() + 128, _scales(parts[".weight_scale"])
    count = scales.shape[-1] if scales.ndim == 2 else 1
    scales = np.broadcast_to(scales.reshape(-1, count), (len(codes), count))
    zeros = np.full(scales.shape, 128, np.float32)
    if ".weight_zero_point" in parts:
        zeros += parts[".weight_zero_point"].float().numpy().reshape(scales.shape)
    groups = _groups(None, codes.shape[1], codes.shape[1] // count)
    return Whole(codes, np.ascontiguousarray(scales), zeros, groups, 8)


def _scaled(parts: Parts, end: str = ".weight_scale") -> np.ndarray:
    """Weights in float8 with a scale for all, for each output, or for each block of both axes."""
    weight, scales = parts[".weight"].float(), parts[end].float()
    if scales.ndim < 2:
        return (weight * scales.reshape(-1, 1)).numpy()
    for axis, (length, count) in enumerate(zip(weight.shape, scales.shape, strict=True)):
        block = -(-length // count)
        block = 1 << (block - 1).bit_length() if count > 1 else block
        scales = scales.repeat_interleave(block, axis).narrow(axis, 0, length)
    return (weight * scales).numpy()


def _fp8(config: Mapping[str, Any]) -> Layout:
    """Weights in float8 with a factor for each block, 128 x 128 in published models."""
    end = ".weight_scale_inv"
    return Layout(".weight", (end,), lambda parts: _scaled(parts, end))


def _mxfp4(config: Mapping[str, Any]) -> Layout:
    """Experts [experts,inputs,outputs], 32 inputs with 4-bit floats and a power of 2 (gpt-oss)."""

    def weight(parts: Parts) -> np.ndarray:
        words, powers = parts["_blocks"].numpy(), parts["_scales"].numpy().astype(np.int32) - 127
        codes = np.stack((words & 15, words >> 4), axis=-1).reshape(*words.shape[:-1], -1)
        rows = np.ldexp(np.array(FP4, np.float32)[codes], powers[..., None])
        return np.ascontiguousarray(rows.reshape(*words.shape[:2], -1).swapaxes(1, 2))

    def shape(shapes: Shapes) -> Shape:
        experts, outputs, blocks, _ = shapes["_blocks"]
        return experts, 32 * blocks, outputs

    return Layout("_blocks", ("_scales",), weight, shape, "")


def _scales(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.float().numpy())


def _groups(indices: Tensor | None, inputs: int, size: int) -> np.ndarray:
    """Return the group of each input: as stored, or groups of `size` consecutive inputs."""
    return np.arange(inputs) // size if indices is None else indices.numpy().astype(np.int64)


def _bits(words: Tensor, bits: int) -> np.ndarray:
    """Return the codes [R, C*32/bits] int16 in 32-bit integers [R,C], lowest bits first."""
    whole = np.ascontiguousarray(words.numpy()).astype(np.int64) & 0xFFFFFFFF
    codes = whole[..., None] >> np.arange(0, WORD, bits) & ((1 << bits) - 1)
    return codes.reshape(len(whole), math.prod(codes.shape[1:])).astype(np.int16)


METHODS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
