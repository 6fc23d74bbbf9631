"""Small random checkpoints of encoder families, as transformers saves them."""

from pathlib import Path
from typing import Any, Dict, Tuple

import torch
import transformers

from posenc_export import from_pretrained

PADDING = 1
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40, "max_position_embeddings": 64,
    "layer_norm_eps": 1e-7, "pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LOCAL = {"norm_eps": 1e-5, "local_attention": 8, "num_hidden_layers": 5, "cls_token_id": 0, "sep_token_id": 2}
RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
# What each differs in from SIZES; the first word is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "bert": {"type_vocab_size": 3},
    "bert other": {"type_vocab_size": 1, "hidden_act": "gelu_new", "num_attention_heads": 6, "num_hidden_layers": 3, "layer_norm_eps": 1e-3},
    "roberta": {"type_vocab_size": 1},
    "roberta other": {"type_vocab_size": 2, "pad_token_id": 4, "hidden_act": "relu"},
    "xlm-roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 1},
    "mpnet": {"max_position_embeddings": 300},
    "modernbert": LOCAL,
    "modernbert other": {
        **LOCAL, "attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu", "local_attention": 5, "norm_eps": 1e-2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 20.0}
        },
    },
    "roformer": {"type_vocab_size": 2},
    "roformer other": {"type_vocab_size": 1, "num_attention_heads": 3, "hidden_act": "relu"},
    "deberta": {**RELATIVE, "type_vocab_size": 0, "max_relative_positions": 12},
    "deberta other": {**RELATIVE, "type_vocab_size": 2, "num_attention_heads": 6, "pos_att_type": "p2c|c2p"},
    "deberta-v2": {**RELATIVE, "type_vocab_size": 0, "position_buckets": 8, "max_relative_positions": 20, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deberta-v2 other": {**RELATIVE, "type_vocab_size": 1, "position_buckets": 16, "num_attention_heads": 3, "layer_norm_eps": 1e-2, "norm_rel_ebd": "layer_norm"},
    "deberta-v2 plain": {**RELATIVE, "type_vocab_size": 3, "max_relative_positions": 9},
    "xlnet": {"layer_norm_eps": 1e-5},
    "xlnet other": {"num_attention_heads": 2, "num_hidden_layers": 3, "ff_activation": "relu"},
    "electra": {"type_vocab_size": 2, "embedding_size": 48},
    "distilbert": {"activation": "relu"},
}  # fmt: skip
CONFIGS = {
    "bert": "BertConfig", "roberta": "RobertaConfig", "xlm-roberta": "XLMRobertaConfig", "camembert": "CamembertConfig", "mpnet": "MPNetConfig",
    "modernbert": "ModernBertConfig", "roformer": "RoFormerConfig", "electra": "ElectraConfig", "distilbert": "DistilBertConfig",
    "deberta": "DebertaConfig", "deberta-v2": "DebertaV2Config", "xlnet": "XLNetConfig",
}  # fmt: skip
# Families whose keys differ: theirs by ours; None for those that they have not.
KEYS: Dict[str, Dict[str, Any]] = {
    "xlnet": {
        "hidden_size": "d_model", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer", "intermediate_size": "d_inner", "max_position_embeddings": None
    },
    "modernbert": {"layer_norm_eps": None},
    "distilbert": {
        "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim", "layer_norm_eps": None
    },
}  # fmt: skip


def made(name: str, head: str = "AutoModel") -> Any:
    """Transformers' model, every parameter random, float32, in eval mode.

    Args:
        name: of MODELS.
        head: AutoModel, or AutoModelForMaskedLM and the like.
    """
    torch.manual_seed(0)
    family = name.split()[0]
    spelled = {KEYS.get(family, {}).get(key, key): value for key, value in {**SIZES, **MODELS[name]}.items()}
    config = getattr(transformers, CONFIGS[family])(**{key: value for key, value in spelled.items() if key})
    model = getattr(transformers, head).from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key:  # RoFormer's sines
                continue
            parameter.copy_(torch.randn(parameter.shape) * (0.25 if parameter.dim() > 1 else 0.1) + (parameter.dim() == 1 and "norm" in key.lower() and "weight" in key))
    return model


def read(name: str, folder: Path, **options: Any) -> Any:
    """Our model of a saved one; XLNet's config has no range of positions."""
    return from_pretrained(folder, **{**({"max_positions": SIZES["max_position_embeddings"]} if name.startswith("xlnet") else {}), **options})


def saved(name: str, folder: Path, head: str = "AutoModel") -> Tuple[Any, Path]:
    """Transformers' model and the folder where it is saved."""
    model = made(name, head)
    model.save_pretrained(folder)
    return model, folder
