"""GGUF files byte by byte, also such as no library writes."""

import struct
from typing import Any, Sequence

U8, U32, I32, F32, BOOL, TEXT, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
FORMS = {U8: "<B", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q"}
Typed = tuple[int, Any]  # a type and a value; of an array, another such pair for each entry
Tensor = tuple[str, Sequence[int], int, int]  # name, sizes as the file has them, type, offset


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def payload(kind: int, value: Any) -> bytes:
    """Return the bytes of a value. That of an array is the type of its entries and these."""
    if kind == TEXT:
        return text(value)
    if kind == ARRAY:
        entries, values = value
        content = b"".join(payload(entries, entry) for entry in values)
        return struct.pack("<IQ", entries, len(values)) + content
    return struct.pack(FORMS[kind], value)


def pair(key: str, value: Typed) -> bytes:
    return text(key.encode()) + struct.pack("<I", value[0]) + payload(*value)


def file(
    pairs: Sequence[bytes], tensors: Sequence[Tensor], data: bytes = b"", alignment: int = 32
) -> bytes:
    """Return a file with these pairs of keys and values, and `data` behind its padding."""
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    for name, sizes, kind, offset in tensors:
        content += text(name.encode()) + struct.pack("<I", len(sizes))
        content += struct.pack(f"<{len(sizes)}Q", *sizes) + struct.pack("<IQ", kind, offset)
    return content + b"\0" * (-len(content) % alignment) + data


TOKENS = [b"<unk>", b"<s>", b"</s>", b"a", b"b", b"ab"]
# Metadata of a model of llama, with a vocabulary of bytes.
LLAMA: dict[str, Typed] = {
    "general.architecture": (TEXT, b"llama"),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, 8),
    "llama.block_count": (U32, 1),
    "llama.feed_forward_length": (U32, 8),
    "llama.attention.head_count": (U32, 2),
    "llama.attention.head_count_kv": (ARRAY, (U32, [2])),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "llama.rope.freq_base": (F32, 10000.0),
    "llama.rope.dimension_count": (U32, 4),
    "llama.rope.scaling.type": (TEXT, b"yarn"),
    "llama.rope.scaling.factor": (F32, 2.0),
    "llama.expert_count": (U32, 0),
    "tokenizer.chat_template": (TEXT, b"{{ messages }}"),
    "tokenizer.ggml.model": (TEXT, b"gpt2"),
    "tokenizer.ggml.pre": (TEXT, b"gpt-2"),
    "tokenizer.ggml.tokens": (ARRAY, (TEXT, TOKENS)),
    "tokenizer.ggml.token_type": (ARRAY, (I32, [2, 3, 3, 1, 1, 1])),
    "tokenizer.ggml.merges": (ARRAY, (TEXT, [b"a b"])),
    "tokenizer.ggml.bos_token_id": (U32, 1),
    "tokenizer.ggml.add_bos_token": (BOOL, 1),
}
TABLE: list[Tensor] = [("token_embd.weight", (8, 6), 0, 0)]  # float32
DATA = struct.pack("<48f", *range(48))


def llama(changes: dict[str, Any] = {}) -> bytes:  # noqa: B006
    """Return a file of the metadata LLAMA with changes; bytes are a value with its type."""
    values = {**LLAMA, **changes}
    pairs = [
        text(key.encode()) + value if isinstance(value, bytes) else pair(key, value)
        for key, value in values.items()
    ]
    return file(pairs, TABLE, DATA)
