"""llama.cpp, by the functions of llama-cpp-python, on a GGUF file with the same weights."""

import ctypes
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from posenc_export.benchmark.peers import CHUNK, CallSession
from posenc_export.benchmark.peers.llama import llama
from posenc_export.runtime.artefact.manifest import Manifest

UBATCH = 512  # tokens that llama.cpp computes at once, its default


def open_session(
    folder: Path, manifest: Manifest, threads: int, batch: int, weights: str = "F32"
) -> CallSession:
    """weights: type of GGUF of all matrices, the embedding among them."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "model.gguf"
        _write(path, llama(manifest), gguf.GGMLQuantizationType[weights])
        start = time.perf_counter()
        session = LlamaCppSession(path, manifest, threads, batch)
        session.load_seconds = time.perf_counter() - start
        return session


def _write(path: Path, model: Any, weights: gguf.GGMLQuantizationType) -> None:
    """Write a LlamaForCausalLM without a vocabulary."""
    config, file = model.config, gguf.GGUFWriter(path, "llama")
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_key_length(config.head_dim)
    file.add_value_length(config.head_dim)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(config.rope_parameters["rope_theta"])
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    file.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        numbers = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # rows i, i + size/2: 2i, 2i + 1
            halves = numbers.reshape(-1, 2, config.head_dim // 2, config.hidden_size)
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
        used = weights if numbers.ndim == 2 else gguf.GGMLQuantizationType.F32
        blocks = gguf.quants.quantize(numbers, used)
        file.add_tensor(names[name.removesuffix(".weight")] + ".weight", blocks, raw_dtype=used)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


class LlamaCppSession(CallSession):
    """Sequences in one context of llama.cpp, whose cache is in float32 as that of the others."""

    def __init__(self, path: Path, manifest: Manifest, threads: int, batch: int) -> None:
        silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        self._silent = silent  # kept, since llama.cpp goes on calling it
        options: dict[str, Any] = {
            "n_ctx": manifest.max_positions * batch, "n_seq_max": batch, "n_threads": threads,
            "n_threads_batch": threads, "n_batch": CHUNK * batch, "n_ubatch": UBATCH,
            "type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32,
        }  # fmt: skip
        context = llama_cpp.llama_context_default_params()
        for name, value in options.items():
            setattr(context, name, value)
        model = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        self.context = llama_cpp.llama_init_from_model(self.model, context)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary, size = manifest.vocabulary, CHUNK * batch
        self.tokens = llama_cpp.llama_batch_init(size, 0, 1)
        fields = ("token", "pos", "logits", "n_seq_id")
        self.views = [np.ctypeslib.as_array(getattr(self.tokens, f), (size,)) for f in fields]
        self.views[3][:] = 1  # sequences of a token
        for index in range(size):
            self.tokens.seq_id[index][0] = 0

    def reset(self) -> None:
        super().reset()
        llama_cpp.llama_memory_clear(self.memory, False)

    def rewind(self, n: int) -> None:
        super().rewind(n)
        llama_cpp.llama_memory_seq_rm(self.memory, -1, self.length, -1)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        rows, count = inputs.shape
        ids, positions, wanted, _ = (
            view[: inputs.size].reshape(rows, count) for view in self.views
        )
        ids[:], positions[:] = inputs, self.length + np.arange(count)
        wanted[:] = np.arange(count) == count - 1
        for index in range(inputs.size if rows > 1 else 0):
            self.tokens.seq_id[index][0] = index // count
        self.tokens.n_tokens = inputs.size
        if status := llama_cpp.llama_decode(self.context, self.tokens):
            raise RuntimeError(f"llama.cpp: expected llama_decode to return 0, got {status}")
        ends = range(count - 1, inputs.size, count)
        logits = [llama_cpp.llama_get_logits_ith(self.context, end) for end in ends]
        return np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in logits])[:, None]
