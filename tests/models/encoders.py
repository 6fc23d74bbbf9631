"""Small random checkpoints of encoders, as transformers saves them."""

from pathlib import Path
from typing import Any

import torch
import transformers

PADDING = 1
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "layer_norm_eps": 1e-7,
    "pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LOCAL = {"norm_eps": 1e-5, "local_attention": 8, "num_hidden_layers": 5, "cls_token_id": 0,
    "sep_token_id": 2}  # fmt: skip
RELATIVE = {"relative_attention": True, "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"]}  # fmt: skip
# Settings of each model that differ from SIZES. The first word of a name is the model type.
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 3},
    "roberta": {"type_vocab_size": 1},
    "roberta other": {"type_vocab_size": 2, "pad_token_id": 4, "hidden_act": "relu"},
    "mpnet": {"max_position_embeddings": 300},
    "modernbert": LOCAL,
    "modernbert other": {
        **LOCAL, "attention_bias": True, "mlp_bias": True, "norm_bias": True,
        "hidden_activation": "silu", "local_attention": 5, "norm_eps": 1e-2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention",
            "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}
        },
    },
    "roformer": {"type_vocab_size": 2},
    "roformer other": {"type_vocab_size": 1, "num_attention_heads": 3, "hidden_act": "relu"},
    "deberta-v2": {**RELATIVE, "type_vocab_size": 0, "position_buckets": 8,
        "max_relative_positions": 20, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "t5": {"d_kv": 16, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "t5 gated": {"d_kv": 8, "num_attention_heads": 3, "feed_forward_proj": "gated-gelu",
        "layer_norm_eps": 1e-3, "num_hidden_layers": 3},
    "electra": {"type_vocab_size": 2, "embedding_size": 48},
    "distilbert": {"activation": "relu"},
}  # fmt: skip
CONFIGS = {
    "bert": "BertConfig", "roberta": "RobertaConfig", "mpnet": "MPNetConfig",
    "modernbert": "ModernBertConfig", "roformer": "RoFormerConfig", "electra": "ElectraConfig",
    "distilbert": "DistilBertConfig", "deberta-v2": "DebertaV2Config", "t5": "T5Config",
}  # fmt: skip
# For types with other key names, the key in the config of the type; None if there is none.
KEYS: dict[str, dict[str, Any]] = {
    "modernbert": {"layer_norm_eps": None},
    "t5": {
        "hidden_size": "d_model", "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers", "intermediate_size": "d_ff",
        "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    },
    "distilbert": {
        "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim", "layer_norm_eps": None
    },
}  # fmt: skip

# transformers' encoder class for types whose base model includes a decoder.
ALONE = {"t5": "T5EncoderModel"}


def described(name: str) -> Any:
    """Return transformers' configuration of a model."""
    family, values = name.split()[0], {**SIZES, **MODELS[name]}
    spelled = {KEYS.get(family, {}).get(key, key): value for key, value in values.items()}
    spelled.pop(None, None)
    return getattr(transformers, CONFIGS[family])(**spelled)


def made(name: str, head: str = "AutoModel") -> Any:
    """Return transformers' model with random parameters, float32, in eval mode.

    Args:
        name: key of MODELS.
        head: an Auto class of transformers, such as AutoModel or AutoModelForMaskedLM.
    """
    torch.manual_seed(0)
    return randomised(built(described(name), head))


def built(config: Any, head: str = "AutoModel") -> Any:
    """Return transformers' model of a configuration, with a head as in `made`."""
    alone = ALONE.get(config.model_type) if head == "AutoModel" else None
    if alone:
        return getattr(transformers, alone)(config)
    return getattr(transformers, head).from_config(config)


def randomised(model: Any) -> Any:
    """Set all parameters of a model to random numbers, and return the model in eval mode."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key:  # table of sines and cosines of RoFormer
                continue
            parameter.copy_(torch.randn(parameter.shape) * (0.25 if parameter.dim() > 1 else 0.1))
            if "norm" in key.lower() and key.endswith("weight"):
                parameter += 1.0
        # T5 does not divide scores by sqrt(D), so its queries are smaller.
        if model.config.model_type in ALONE:
            for key, parameter in model.named_parameters():
                if key.endswith(".q.weight"):
                    parameter *= model.config.d_kv**-0.5
    return model.eval()


def saved(name: str, folder: Path, head: str = "AutoModel") -> tuple[Any, Path]:
    """Save transformers' model, and return it with its folder."""
    model = made(name, head)
    model.save_pretrained(folder)
    return model, folder
