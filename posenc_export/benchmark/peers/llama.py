"""LlamaForCausalLM of transformers with the same weights, in eager mode with a DynamicCache."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from posenc_export.benchmark.peers import CallSession
from posenc_export.benchmark.peers.eager import rebuilt
from posenc_export.runtime.artefact.manifest import Manifest


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> CallSession:
    torch.set_num_threads(threads)
    return LlamaSession(llama(manifest))


def llama(manifest: Manifest) -> LlamaForCausalLM:
    """Return the model of transformers with the artefact's weights."""
    model = LlamaForCausalLM(_config(manifest.config)).eval()
    model.load_state_dict(_renamed(rebuilt(manifest), manifest.config))
    return model


def _config(config: dict[str, Any]) -> LlamaConfig:
    layer = config["layers"][config["order"][0]]
    attention = layer["attention"]
    return LlamaConfig(
        vocab_size=config["tokens"]["vocabulary"],
        hidden_size=config["width"],
        intermediate_size=layer["mlp"]["hidden"],
        num_hidden_layers=len(config["order"]),
        num_attention_heads=attention["heads"],
        num_key_value_heads=attention["kv_heads"],
        head_dim=attention["head_size"],
        max_position_embeddings=config["max_positions"],
        rms_norm_eps=config["norm"]["epsilon"],
        tie_word_embeddings=config["head"]["tied"],
    )


def _renamed(model: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    attention = config["layers"][config["order"][0]]["attention"]
    counts = [attention[name] for name in ("heads", "kv_heads", "kv_heads")]
    sizes = [count * attention["head_size"] for count in counts]
    own = dict(model.named_parameters())
    table = own["tokens.embedding.weight"]
    state = {
        "model.embed_tokens.weight": table,
        "model.norm.weight": own["norm.weight"],
        "lm_head.weight": own.get("head.linear.weight", table),
    }
    for index in range(len(config["order"])):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        projected = own[f"{ours}attention.projection.qkv.weight"].split(sizes)
        for name, weight in zip("qkv", projected, strict=True):
            state[f"{theirs}self_attn.{name}_proj.weight"] = weight
        for name in ("gate", "up", "down"):
            state[f"{theirs}mlp.{name}_proj.weight"] = own[f"{ours}mlp.{name}.weight"]
        state[f"{theirs}self_attn.o_proj.weight"] = own[f"{ours}attention.projection.output.weight"]
        state[f"{theirs}input_layernorm.weight"] = own[f"{ours}residual.attention_norm.weight"]
        state[f"{theirs}post_attention_layernorm.weight"] = own[f"{ours}residual.mlp_norm.weight"]
    return state


class LlamaSession(CallSession):
    """Session on the model with a DynamicCache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.cache = DynamicCache(config=self.model.config)

    def rewind(self, n: int) -> None:
        super().rewind(n)
        self.cache.crop(-n)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        ids, options = torch.from_numpy(inputs), {"use_cache": True, "logits_to_keep": 1}
        with torch.inference_mode():
            output = self.model(ids, None, None, self.cache, **options)
        logits: np.ndarray = output.logits.numpy()
        return logits
