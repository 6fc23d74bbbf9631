"""Conversion of existing attention weights to those of a block, in either layout of pairs."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor

from posenc_export import encodings
from posenc_export.models.config import BlockConfig
from posenc_export.models.layouts import to_half, to_interleaved
from posenc_export.models.named_projections import ENCODING, find
from posenc_export.models.short_forms import block_config
from posenc_export.models.tensor_files import SafetensorsFile
from posenc_export.shared.refusal import refusal

Array = Union[np.ndarray, Tensor]
DTYPES = ("float32", "float16", "bfloat16")
LAYOUTS = ("half", "interleaved")


def pack(
    weights: Mapping[str, Array],
    heads: int,
    max_positions: int,
    kv_heads: Optional[int],
    encoding: Union[str, Mapping[str, Any]],
    causal: bool,
) -> Tuple[BlockConfig, Dict[str, Tensor]]:
    """Derive the description of a block from its weights, and pack them.

    Args:
        weights: arrays by role, from `projections`.

    Returns:
        The description, and the parameters of the projection: "qkv.weight", "output.weight" and, if
        given, "qkv.bias" and "output.bias".

    Raises:
        ValueError: as AttentionBlock.from_state_dict.
    """
    names = [name for name in weights if not name.startswith(ENCODING)]
    tensors = {name: _tensor(name, weights[name]) for name in names}
    separate = _is_separate(tensors)
    output = tensors["o"]
    if type(heads) is not int or heads < 1 or output.dim() != 2 or not output.size(1):
        raise _other_heads(output, heads)
    width, (size, remainder) = output.size(0), divmod(output.size(1), heads)
    if remainder:
        raise _other_heads(output, heads)
    k = tensors["k" if separate else "qkv"]
    rows = k.size(0) if k.dim() else 0
    kv_heads = kv_heads or max((rows if separate else (rows - heads * size) // 2) // size, 1)
    sizes = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    shapes = {**sizes, "qkv": sum(sizes.values()), "o": width}
    _check_shapes(tensors, shapes, {"o": heads * size}, width)
    qkv = torch.cat([tensors[name] for name in sizes]) if separate else tensors["qkv"]
    parameters = {"output.weight": output, "qkv.weight": qkv, **_biases(tensors, sizes)}
    spec = encodings.parse(encoding) if isinstance(encoding, str) else encoding
    biases = ("qkv.bias" in parameters, "output.bias" in parameters)
    config = block_config(width, heads, max_positions, kv_heads, size, spec, *biases, causal)
    return config, parameters


def _is_separate(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether q, k and v have separate weights. ValueError unless one form is complete."""
    separate = {"q", "k", "v"} & tensors.keys()
    whole = len(separate) == 3 if separate else "qkv" in tensors
    if "o" not in tensors or not whole or (separate and "qkv" in tensors):
        got = ", ".join(tensors) or "none"
        rule, remedy = "q, k, v and o, or qkv and o", "give all weights of one form"
        raise refusal("weights", rule, got, remedy)
    return bool(separate)


def _other_heads(output: Tensor, heads: Any) -> ValueError:
    rule = f"o with shape [width, heads * head_size] for {heads} heads"
    return refusal("weights", rule, list(output.shape), "give another number of heads")


def _biases(tensors: Dict[str, Tensor], sizes: Dict[str, int]) -> Dict[str, Tensor]:
    """Return the biases by parameter. If only some of q, k and v have one, the others are 0."""
    biases = {"output.bias": tensors["o_bias"]} if "o_bias" in tensors else {}
    if "qkv_bias" in tensors:
        biases["qkv.bias"] = tensors["qkv_bias"]
    elif any(f"{name}_bias" in tensors for name in sizes):
        zeros = {name: torch.zeros(rows) for name, rows in sizes.items()}
        parts = [tensors.get(f"{name}_bias", zeros[name]) for name in sizes]
        biases["qkv.bias"] = torch.cat(parts)
    return biases


def fill(
    block: Any, parameters: Dict[str, Tensor], layout: Optional[str], weights: Mapping[str, Array]
) -> None:
    """Copy weights into a block. ValueError: as AttentionBlock.from_state_dict.

    Args:
        block, parameters: from `pack`.
        layout: layout of rotary pairs in the parameters; None if it is that of the encoding.
        weights: arrays by role, parameters of the encoding among them.
    """
    attention, in_layer = block.attention, bool(block.config.attention.encodings)
    encoding = attention.encoding if in_layer else block.token_encoding
    wanted = {f"{ENCODING}{name}": one for name, one in encoding.named_parameters()}
    trained = {name for name in weights if name.startswith(ENCODING)}
    if {*wanted} != trained:
        names, got = (", ".join(sorted(group)) or "none" for group in (wanted, trained))
        rule = f"trained parameters {names} for {type(encoding).__name__}"
        raise refusal("weights", rule, got, "give them under these names")
    if layout is not None:
        _convert_layout(attention, encoding, parameters, layout)
    with torch.no_grad():
        for name, parameter in attention.projection.named_parameters():
            parameter.copy_(parameters[name])
        for name, parameter in wanted.items():
            value = _tensor(name, weights[name])
            if value.shape != parameter.shape:
                rule = f"{name} with shape {list(parameter.shape)}"
                raise refusal("weights", rule, list(value.shape), "give it in that shape")
            parameter.copy_(value)
    encoding.prepare()


def read_file(path: Path, prefix: str = "") -> Tuple[Dict[str, Array], List[str]]:
    """Read attention weights from a .safetensors file, as `projections` returns them. prefix:
    beginning of the names of one attention. ValueError: as for `find`, or no file.
    """
    with ExitStack() as opened:
        file = SafetensorsFile(path, opened)
        return projections({name: file.shape(name) for name in file.names()}, file.tensor, prefix)


def projections(
    shapes: Mapping[str, Tuple[int, ...]], tensor: Callable[[str], Array], prefix: str
) -> Tuple[Dict[str, Array], List[str]]:
    """Return the weights of one attention by role, parameters of its encoding as encoding.NAME, and
    lines that say which tensor is which. shapes: those of all tensors by name, which `tensor`
    returns. ValueError: as named_projections.find.
    """
    found = find(shapes, prefix)
    weights = {role: tensor(name) for role, name in found.names.items()}
    if found.transposed:
        turned = [role for role in weights if role[:9] != ENCODING and role[-5:] != "_bias"]
        weights |= {role: weights[role].T for role in turned}
    return weights, found.lines(shapes)


def _tensor(name: str, value: Array) -> Tensor:
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    if dtype not in DTYPES:
        raise refusal("weights", f"{name} in {', '.join(DTYPES)}", dtype, "convert it to float32")
    if isinstance(value, Tensor):
        return value.detach().float()
    return torch.from_numpy(np.array(value, np.float32))


def _check_shapes(
    tensors: Dict[str, Tensor], rows: Dict[str, int], columns: Dict[str, int], width: int
) -> None:
    for name, value in tensors.items():
        projection, bias = name.removesuffix("_bias"), name.endswith("_bias")
        shape: List[int] = [rows[projection], *([] if bias else [columns.get(projection, width)])]
        if list(value.shape) != shape:
            rule = f"{name} with shape {shape} (as in torch.nn.Linear)"
            raise refusal("weights", rule, list(value.shape), "check heads and kv_heads")
    if "qkv_bias" in tensors and {"q_bias", "k_bias", "v_bias"} & tensors.keys():
        raise refusal("weights", "qkv_bias or q_bias, k_bias and v_bias", "both", "remove one")


def _convert_layout(
    attention: Any, encoding: Any, parameters: Dict[str, Tensor], layout: str
) -> None:
    """Reorder rows of queries and keys in `parameters` to the encoding's layout of pairs."""
    interleaved = getattr(encoding, "interleaved", None)
    if layout not in LAYOUTS or interleaved is None:
        rule = f"one of {', '.join(LAYOUTS)}"
        if interleaved is None:
            rule = f"left out, since {type(encoding).__name__} rotates no pairs"
        raise refusal("weights", f"layout to be {rule}", repr(layout), "correct it")
    if interleaved == (layout == "interleaved"):
        return
    move = to_interleaved if interleaved else to_half
    rotary = getattr(encoding, "size", attention.head_size)
    for name in {"qkv.weight", "qkv.bias"} & set(parameters):
        q, k, v = parameters[name].split(attention.projection.sizes)
        q, k = move(q, attention.heads, rotary), move(k, attention.kv_heads, rotary)
        parameters[name] = torch.cat((q, k, v))
