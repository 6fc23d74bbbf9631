"""Small random checkpoints of encoder families, as transformers saves them."""

from pathlib import Path
from typing import Any, Dict, Tuple

import torch
import transformers

from posenc_export import from_pretrained
from posenc_export.models import families
from tests.models import pages, speech

BERT = {
    "attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
    "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12,
    "layer_norm_eps": 1e-12,
}  # fmt: skip
ROBERTA = {
    **BERT,
    "max_position_embeddings": 514,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "pos_att_type": "c2p|p2c",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "type_vocab_size": 0,
}
# config.json of published models.
PUBLISHED: Dict[str, Dict[str, Any]] = {
    "deberta-large": {
        **DEBERTA, "model_type": "deberta", "hidden_size": 1024, "intermediate_size": 4096,
        "position_biased_input": False, "num_attention_heads": 16, "num_hidden_layers": 24,
        "vocab_size": 50265,
    },
    "deberta-v3-base": {
        **DEBERTA, "model_type": "deberta-v2", "position_buckets": 256,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
        "position_biased_input": False, "vocab_size": 128100,
    },
    "wav2vec2-base-960h": {
        "model_type": "wav2vec2", "activation_dropout": 0.1, "apply_spec_augment": True,
        "architectures": ["Wav2Vec2ForCTC"], "attention_dropout": 0.1, "bos_token_id": 1,
        "codevector_dim": 256, "contrastive_logits_temperature": 0.1, "conv_bias": False,
        "conv_dim": [512] * 7, "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
        "conv_stride": [5, 2, 2, 2, 2, 2, 2], "ctc_loss_reduction": "sum",
        "ctc_zero_infinity": False, "diversity_loss_weight": 0.1, "do_stable_layer_norm": False,
        "eos_token_id": 2, "feat_extract_activation": "gelu", "feat_extract_dropout": 0.0,
        "feat_extract_norm": "group", "feat_proj_dropout": 0.1, "feat_quantizer_dropout": 0.0,
        "final_dropout": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
        "hidden_dropout": 0.1, "hidden_dropout_prob": 0.1, "hidden_size": 768,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
        "layerdrop": 0.1, "mask_feature_length": 10, "mask_feature_prob": 0.0,
        "mask_time_length": 10, "mask_time_prob": 0.05, "num_attention_heads": 12,
        "num_codevector_groups": 2, "num_codevectors_per_group": 320,
        "num_conv_pos_embedding_groups": 16, "num_conv_pos_embeddings": 128,
        "num_feat_extract_layers": 7, "num_hidden_layers": 12, "num_negatives": 100,
        "pad_token_id": 0, "proj_codevector_dim": 256, "vocab_size": 32,
    },
    "layoutlmv3-base": {
        **ROBERTA, "model_type": "layoutlmv3", "classifier_dropout": None, "coordinate_size": 128,
        "has_relative_attention_bias": True, "has_spatial_attention_bias": True, "input_size": 224,
        "max_2d_position_embeddings": 1024, "max_rel_2d_pos": 256, "max_rel_pos": 128,
        "num_channels": 3, "patch_size": 16, "rel_2d_pos_bins": 64, "rel_pos_bins": 32,
        "second_input_size": 112, "shape_size": 128, "text_embed": True, "type_vocab_size": 1,
        "visual_embed": True, "vocab_size": 50265,
    },
    "xlnet-base-cased": {
        "model_type": "xlnet", "attn_type": "bi", "bi_data": False, "bos_token_id": 1,
        "clamp_len": -1, "d_head": 64, "d_inner": 3072, "d_model": 768, "dropout": 0.1,
        "end_n_top": 5, "eos_token_id": 2, "ff_activation": "gelu", "initializer_range": 0.02,
        "layer_norm_eps": 1e-12, "mem_len": None, "n_head": 12, "n_layer": 12, "pad_token_id": 5,
        "reuse_len": None, "same_length": False, "start_n_top": 5, "summary_activation": "tanh",
        "summary_last_dropout": 0.1, "summary_type": "last", "summary_use_proj": True,
        "untie_r": True, "vocab_size": 32000,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}},
    },
}  # fmt: skip
PADDING = 1
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "layer_norm_eps": 1e-7,
    "pad_token_id": PADDING, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
LOCAL = {
    "norm_eps": 1e-5,
    "local_attention": 8,
    "num_hidden_layers": 5,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
RELATIVE = {
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["c2p", "p2c"],
}
# Settings of each model that differ from SIZES. The first word of a name is the family.
MODELS: Dict[str, Dict[str, Any]] = {
    "bert": {"type_vocab_size": 3},
    "bert other": {"type_vocab_size": 1, "hidden_act": "gelu_new", "num_attention_heads": 6,
        "num_hidden_layers": 3, "layer_norm_eps": 1e-3},
    "roberta": {"type_vocab_size": 1},
    "roberta other": {"type_vocab_size": 2, "pad_token_id": 4, "hidden_act": "relu"},
    "xlm-roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 1},
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
    "deberta": {**RELATIVE, "type_vocab_size": 0, "max_relative_positions": 12},
    "deberta other": {**RELATIVE, "type_vocab_size": 2, "num_attention_heads": 6,
        "pos_att_type": "p2c|c2p"},
    "deberta-v2": {**RELATIVE, "type_vocab_size": 0, "position_buckets": 8,
        "max_relative_positions": 20, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "deberta-v2 other": {**RELATIVE, "type_vocab_size": 1, "position_buckets": 16,
        "num_attention_heads": 3, "layer_norm_eps": 1e-2, "norm_rel_ebd": "layer_norm"},
    "deberta-v2 plain": {**RELATIVE, "type_vocab_size": 3, "max_relative_positions": 9},
    "deberta c2p": {**RELATIVE, "type_vocab_size": 0, "max_relative_positions": 12,
        "pos_att_type": ["c2p"]},
    "deberta-v2 p2c": {**RELATIVE, "type_vocab_size": 0, "position_buckets": 8,
        "max_relative_positions": 20, "pos_att_type": "p2c"},
    "xlnet": {"layer_norm_eps": 1e-5},
    "xlnet other": {"num_attention_heads": 2, "num_hidden_layers": 3, "ff_activation": "relu",
        "clamp_len": 4},
    "t5": {"d_kv": 16, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    "t5 gated": {"d_kv": 8, "num_attention_heads": 3, "feed_forward_proj": "gated-gelu",
        "layer_norm_eps": 1e-3, "num_hidden_layers": 3},
    "mt5": {"d_kv": 12},
    "electra": {"type_vocab_size": 2, "embedding_size": 48},
    "distilbert": {"activation": "relu"},
    **speech.MODELS, **pages.MODELS,
}  # fmt: skip
# Those that a family of ours reads; transformers' code computes the others.
OURS = [name for name in MODELS if not families.lacks({"model_type": name.split()[0]})]
CONFIGS = {
    "bert": "BertConfig", "roberta": "RobertaConfig", "xlm-roberta": "XLMRobertaConfig",
    "camembert": "CamembertConfig", "mpnet": "MPNetConfig", "modernbert": "ModernBertConfig",
    "roformer": "RoFormerConfig", "electra": "ElectraConfig", "distilbert": "DistilBertConfig",
    "deberta": "DebertaConfig", "deberta-v2": "DebertaV2Config", "xlnet": "XLNetConfig",
    "t5": "T5Config", "mt5": "MT5Config", **speech.CONFIGS, **pages.CONFIGS,
}  # fmt: skip
# For families with other key names, the key in the family's config; None if there is none.
KEYS: Dict[str, Dict[str, Any]] = {
    "xlnet": {
        "hidden_size": "d_model", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
        "intermediate_size": "d_inner", "max_position_embeddings": None
    },
    "modernbert": {"layer_norm_eps": None},
    **dict.fromkeys(speech.SPEECH, {"max_position_embeddings": None}),
    **{
        name: {
            "hidden_size": "d_model", "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers", "intermediate_size": "d_ff",
            "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
        }
        for name in ("t5", "mt5")
    },
    "distilbert": {
        "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
        "intermediate_size": "hidden_dim", "layer_norm_eps": None
    },
}  # fmt: skip


WITHOUT_RANGE = ("xlnet", *speech.SPEECH)  # families whose config has no range of positions
# transformers' encoder class for families whose base model includes a decoder.
ALONE = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel"}


def described(name: str) -> Any:
    """Return transformers' configuration of a model."""
    family = name.split()[0]
    spelled = {
        KEYS.get(family, {}).get(key, key): value
        for key, value in {**SIZES, **MODELS[name]}.items()
    }
    return getattr(transformers, CONFIGS[family])(
        **{key: value for key, value in spelled.items() if key}
    )


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
    return pages.with_boxes(auto(config, head).from_config(config))


def auto(config: Any, head: str) -> Any:
    """Return an Auto class of transformers, that of sound for a classifier of sequences of it, and
    that of documents for questions about them.
    """
    if config.model_type == "layoutlm":
        head = head.replace("ForQuestion", "ForDocumentQuestion")
    if config.model_type in speech.SPEECH and head.endswith("SequenceClassification"):
        head = "AutoModelForAudioClassification"
    return getattr(transformers, head)


def randomised(model: Any) -> Any:
    """Set all parameters of a model to random numbers, and return the model in eval mode."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key:  # table of sines and cosines of RoFormer
                continue
            parameter.copy_(torch.randn(parameter.shape) * (0.25 if parameter.dim() > 1 else 0.1))
            if "norm" in key.lower() and key.endswith("weight"):
                parameter += 1.0
        if (
            model.config.model_type in ALONE
        ):  # T5 does not divide scores by sqrt(D), so its queries are smaller
            for key, parameter in model.named_parameters():
                if key.endswith(".q.weight"):
                    parameter *= model.config.d_kv**-0.5
    return model.eval()


def read(name: str, folder: Path, **options: Any) -> Any:
    """Load our model from a folder, with max_positions if its config has no range."""
    return from_pretrained(
        folder,
        **{
            **(
                {"max_positions": SIZES["max_position_embeddings"]}
                if name.startswith(WITHOUT_RANGE)
                else {}
            ),
            **options,
        },
    )


def saved(name: str, folder: Path, head: str = "AutoModel") -> Tuple[Any, Path]:
    """Save transformers' model, and return it with its folder."""
    model = made(name, head)
    model.save_pretrained(folder)
    return speech.Peer(model) if name.startswith(speech.SPEECH) else model, folder
