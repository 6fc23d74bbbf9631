"""Tiny random checkpoints of 20 families, with edges that 40 tokens pass: windows and chunks of 8,
an original length of 16, every other layer without positions or with another mask.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

from tests.models import checkpoints, encoders

YARN = {**checkpoints.YARN, "original_max_position_embeddings": 64, "factor": 8.0,
    "beta_fast": 4.0, "beta_slow": 1.0}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
}  # fmt: skip
BY_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
}
EDGES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {**checkpoints.LLAMA3, "original_max_position_embeddings": 16},
        "tie_word_embeddings": False,
    },
    "mistral": {"sliding_window": 8},
    "qwen2": {"rope_parameters": YARN},
    "qwen3": {"head_dim": 32},
    "phi3": {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": 16, "sliding_window": None,
    },
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {
        "head_dim": 32, "query_pre_attn_scalar": 40, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": BY_TYPE,
    },
    "gpt2": {},
    "gpt_neox": {},
    "bloom": {},
    "mpt": {},
    "falcon": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "olmo2": {},
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "rope_parameters": {**YARN, "truncate": False},  # as published
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {
        "head_dim": 32, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "num_local_experts": 2,
        "attention_chunk_size": 8, "intermediate_size_mlp": 48, "attn_temperature_tuning": False,
    },
    "bert": {"type_vocab_size": 2},
}  # fmt: skip
ENCODERS = ("bert",)
SPECIAL = ("<pad>", "<s>", "</s>")


def save(family: str, folder: Path) -> Any:
    """Save the checkpoint of a family with the keys of config.json that published checkpoints
    have, which all versions of transformers read, and a tokenizer. Return transformers' model.
    """
    torch.manual_seed(0)
    if family in ENCODERS:
        keys = {**encoders.SIZES, "layer_norm_eps": 1e-5, "pad_token_id": 0, **EDGES[family]}
        config = getattr(transformers, encoders.CONFIGS[family])(**keys)
        model = encoders.randomised(transformers.AutoModel.from_config(config))
    else:
        sizes = checkpoints.OWN_SIZES.get(family, checkpoints.SIZES)
        keys = copy.deepcopy({**sizes, **EDGES[family]})
        config = transformers.CONFIG_MAPPING[family](**keys)
        model = checkpoints.randomised(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(_published(json.loads(path.read_text()))), encoding="utf-8")
    words = [*SPECIAL, *(f"w{index}" for index in range(3, 61))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[0])),
        pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2],
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return model


def _published(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of rotations that transformers 4 writes."""
    rope = config.pop("rope_parameters", None)
    config["torch_dtype"] = config.pop("dtype", "float32")
    if not rope:
        return config
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    theta, share = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    if config["model_type"] == "gpt_neox":
        config |= {"rotary_emb_base": theta, "rotary_pct": share}
    else:
        config["rope_theta"] = theta
        if share is not None:
            config["partial_rotary_factor"] = share
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    rope["type"] = rope["rope_type"]  # the only name that transformers 4 reads of LongRoPE
    return config
