"""Attacks on checkpoint folders and GGUF files as payload x place x format: what JSON files name,
what files of tensors hold and state, and what stands in the place of a file.
"""

import io
import json
import os
import struct
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from safetensors.torch import save

Write = Callable[[Path, Path], Path]  # as `write` of a threat: a folder and the trace, to a path
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 61,
    "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
    "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens": (61, 8), "norm": (8,), "layers.0.input_layernorm": (8,),
    "layers.0.post_attention_layernorm": (8,), "layers.0.self_attn.q_proj": (8, 8),
    "layers.0.self_attn.k_proj": (4, 8), "layers.0.self_attn.v_proj": (4, 8),
    "layers.0.self_attn.o_proj": (8, 8), "layers.0.mlp.gate_proj": (8, 8),
    "layers.0.mlp.up_proj": (8, 8), "layers.0.mlp.down_proj": (8, 8),
}  # fmt: skip
WEIGHTS = {f"model.{name}.weight": torch.ones(shape) for name, shape in SHAPES.items()}
# Keys that make transformers or sentence-transformers import or fetch something, by file.
KEYS: dict[str, list[str]] = {
    "config.json": """auto_map attn_implementation _attn_implementation experts_implementation
        _experts_implementation quantization_config custom_pipelines _name_or_path trust_remote_code
        tokenizer_class architectures model_type torch_dtype hidden_act rope_parameters
        rope_scaling kernel_config backbone text_config id2label""".split(),
    "tokenizer_config.json": "auto_map tokenizer_class chat_template processor_class".split(),
    "generation_config.json": """custom_generate cache_implementation compile_config eos_token_id
        suppress_tokens""".split(),
    "model.safetensors.index.json": ["weight_map", "metadata"],
    "modules.json": ["type", "path"],
}


class Command:
    """A pickle of this object runs a command that makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.trace}'",)


class Sized:
    """A pickle of this object takes this many bytes of memory."""

    def __reduce__(self) -> Any:
        return bytearray, (1 << 36,)


def checkpoint(folder: Path, **config: Any) -> Path:
    """Write a right checkpoint of a tiny Llama, with other keys, and return its folder."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(save(WEIGHTS))
    return folder


def code(folder: Path, trace: Path) -> None:
    """Write a module of Python that makes the trace when it is imported."""
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Model: pass\n")


def _values(trace: Path) -> dict[str, Any]:
    """Return what a key may name, by kind of payload."""
    return {
        "module": "evil.Model",
        "modules": {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Model"},
        "repository": "org/evil--evil.Model",
        "command": f"__import__('os').system('touch {trace}')",
        "template": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "path": f"../../../../../../{trace}",
        "method": {"quant_method": "evil", "modules": ["evil.Model"]},
        "number": 1 << 62,
        "text": "\x1b]0;evil\x07\n" * 9,
    }


def _written(file: str, content: Callable[[Path], bytes]) -> Write:
    def write(folder: Path, trace: Path) -> Path:
        checkpoint(folder)
        code(folder, trace)
        if file == "pytorch_model.bin" or file.endswith(".index.json"):
            (folder / "model.safetensors").unlink()
        (folder / file).write_bytes(content(trace))
        return folder / file if file.endswith(".gguf") else folder

    return write


def of_keys() -> Iterator[tuple[str, Write]]:
    """Every payload under every key of every JSON file."""
    for file, keys in KEYS.items():
        for key in keys:
            for kind in _values(Path()):

                def content(
                    trace: Path, file: str = file, key: str = key, kind: str = kind
                ) -> bytes:
                    own = CONFIG if file == "config.json" else {}
                    values = {**own, key: _values(trace)[kind]}
                    return json.dumps([values] if file == "modules.json" else values).encode()

                yield f"{file} {key} {kind}", _written(file, content)


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def of_pickles() -> Iterator[tuple[str, Write]]:
    """Pickles in every place where torch reads one."""
    payloads: dict[str, Callable[[Path], bytes]] = {
        "command": lambda trace: _saved({"a": Command(trace)}),
        "command in a bare pickle": lambda trace: _bare(Command(trace)),
        "memory": lambda _: _saved({"a": Sized()}),
    }
    files = ("pytorch_model.bin", "model.safetensors", "training_args.bin")
    for file in (*files, "optimizer.pt", "model.ckpt", "tokenizer.json", "config.json", "m.gguf"):
        for kind, payload in payloads.items():
            yield f"{file} with a pickle: {kind}", _written(file, payload)


def _bare(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def _header(header: bytes, size: int = -1, data: bytes = bytes(64)) -> bytes:
    return struct.pack("<Q", len(header) if size < 0 else size) + header + data


def of_tensors() -> Iterator[tuple[str, Write]]:
    """Headers of safetensors and GGUF that do not tell the truth."""
    entry = '"%s":{"dtype":"%s","shape":%s,"data_offsets":%s}'
    tensor = {
        "beyond the end": entry % ("a", "F32", [1 << 40], [0, 1 << 42]),
        "overlapping": ",".join(entry % (name, "F32", [16], [0, 64]) for name in "ab"),
        "twice": ",".join(entry % ("a", "F32", [16], [0, 64]) for _ in "ab"),
        "of more than 64 bits": entry % ("a", "F32", [1 << 62, 1 << 62], [0, 64]),
        "backwards": entry % ("a", "F32", [16], [64, 0]),
        "of another size": entry % ("a", "F32", [999], [0, 64]),
        "of another type": entry % ("a", "OBJECT", [16], [0, 64]),
        "of 10^5 axes": entry % ("a", "F32", [1] * 10**5, [0, 4]),
        "with an odd name": entry % (r"\u001b[2Ja\n", "F32", [16], [0, 64]),
        "nested": '"a":' + "[" * 10**5,
    }
    headers = {kind: _header(f"{{{text}}}".encode()) for kind, text in tensor.items()}
    sizes = {f"a header of {size}": _header(b"{}", size) for size in (1 << 20, 1 << 40, 1 << 63)}
    for kind, content in {**headers, **sizes, "nothing": b"", "noise": bytes(99)}.items():
        yield f"safetensors {kind}", _written("model.safetensors", lambda _, c=content: c)
    name = struct.pack("<Q", 1) + b"a"
    for kind, rest in {
        "many tensors": struct.pack("<QQ", 1 << 60, 0),
        "many keys": struct.pack("<QQ", 0, 1 << 60),
        "a long name": struct.pack("<QQQ", 0, 1, 1 << 60),
        "a long text": struct.pack("<QQ", 0, 1) + name + struct.pack("<IQ", 8, 1 << 60),
        "a long array": struct.pack("<QQ", 0, 1) + name + struct.pack("<IIQ", 9, 4, 1 << 60),
        "many texts": struct.pack("<QQ", 0, 1) + name + struct.pack("<IIQ", 9, 8, 1 << 60),
        "nested arrays": struct.pack("<QQ", 0, 1) + name + struct.pack("<IQ", 9, 9) * 10**4,
        "many axes": struct.pack("<QQ", 1, 0) + name + struct.pack("<I", 1 << 31),
        "a huge tensor": struct.pack("<QQ", 1, 0)
        + name
        + struct.pack("<IQQIQ", 2, 1 << 62, 4, 0, 0),
    }.items():
        content = b"GGUF" + struct.pack("<I", 3) + rest + bytes(64)
        yield f"gguf with {kind}", _written("m.gguf", lambda _, c=content: c)


def of_places() -> Iterator[tuple[str, Write]]:
    """Something else in the place of each file: pipes, devices, folders, links, endless JSON."""
    makers: dict[str, Callable[[Path, Path], None]] = {
        "a pipe": lambda path, _: os.mkfifo(path),
        "a device": lambda path, _: path.symlink_to("/dev/zero"),
        "a folder": lambda path, _: path.mkdir(),
        "a link to itself": lambda path, _: path.symlink_to(path.name),
        "a link out": lambda path, trace: path.symlink_to(_outside(path, trace)),
        "nested JSON": lambda path, _: path.write_text('{"a":' * 10**5) and None,
        "a long number": lambda path, _: path.write_text('{"a":' + "9" * 10**5 + "}") and None,
        "a large file": lambda path, _: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 1 << 30),
    }
    files = (*KEYS, "tokenizer.json", "model.safetensors", "pytorch_model.bin", "m.gguf")
    for file in (*files, "chat_template.jinja"):
        for kind, make in makers.items():
            yield f"{file} as {kind}", _replaced(file, make)


def _outside(path: Path, trace: Path) -> Path:
    """Write a secret beside the folder of an attack, and return its path."""
    secret = path.parent.with_name("secret")
    secret.write_bytes(save(WEIGHTS) if path.suffix == ".safetensors" else b'{"secret": 1}')
    return secret


def _replaced(file: str, make: Callable[[Path, Path], None]) -> Write:
    def write(folder: Path, trace: Path) -> Path:
        checkpoint(folder)
        if file in ("pytorch_model.bin", "model.safetensors.index.json"):
            (folder / "model.safetensors").unlink()
        (folder / file).unlink(missing_ok=True)
        make(folder / file, trace)
        return folder / file if file.endswith(".gguf") else folder

    return write


def attacks() -> dict[str, Write]:
    """Return all attacks by name."""
    kinds = (of_keys, of_pickles, of_tensors, of_places)
    return {name: write for of_kind in kinds for name, write in of_kind()}
