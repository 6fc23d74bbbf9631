"""Small random models of the model types of transformers, each by its own configuration class.

Windows, chunks and original lengths of a configuration are below TOKENS; the trained length is,
too, unless a table of positions ends there.
"""

import inspect
import itertools
from typing import Any, Iterator

import torch

TOKENS = 20  # of a row that is tried
LAYERS = 3
PADDING = 8  # rows of a table that may belong to padding
TRAINED, TABLE = 12, 64  # positions: trained length below TOKENS, or a table that holds them
POSITIONS = TABLE - PADDING  # for reading: beyond a trained length, within a table
# Keys by the value that they get.
VALUES: dict[int, str] = {
    128: """vocab_size src_vocab_size tgt_vocab_size entity_vocab_size vocab_size_per_layer_input
        unpadded_vocab_size ngram_vocab_size_base encoder_hash_byte_group_vocab mamba_d_ssm
        pronunciation_vocab_size shape_vocab_size mamba_intermediate""",
    96: """intermediate_size ffn_dim d_ff dff dim_ff n_inner ffn_hidden_size d_inner
        feed_forward_size intermediate_size_mlp dense_intermediate_size encoder_ffn_dim
        decoder_ffn_dim hidden_dim speech_encoder_intermediate_size t2u_decoder_ffn_dim
        t2u_encoder_ffn_dim""",
    64: """hidden_size d_model n_embd n_embed dim emb_dim embedding_size embedding_dim lru_width
        hidden_size_global word_embed_proj_dim pooler_hidden_size input_embedding_size
        output_embedding_size prediction_head_size pronunciation_embed_dim shape_embed_dim
        entity_emb_size d_latents embedding_rank router_hidden_size ple_embed_dim
        prompt_mid_dim dim_model_base mamba_d_head_total mask_feature unit_embed_dim""",
    32: """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        moe_shared_expert_intermediate_size shared_intermediate_size intra_bottleneck_size
        mamba_d_head mamba_headdim mamba_head_dim shared_experts_intermediate_size
        adapter_rank time_step_rank mamba_dt_rank lang_embed_dim spkr_embed_dim o_lora_rank""",
    24: "q_lora_rank qk_head_dim",
    16: """head_dim kv_lora_rank qk_nope_head_dim v_head_dim d_kv d_head attention_head_size
        dim_head kv_channels hidden_size_per_layer_input global_head_dim swa_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim
        attention_head_dim mamba_d_state state_size ssm_state_size hc_lowrank gated_norm_rank d_rel
        relative_attention_num_buckets num_buckets num_global_tokens rel_extent num_landmarks
        segment_means_seq_len num_latents position_bias_num_buckets""",
    12: "relative_attention_max_distance relative_max_distance position_bias_max_distance",
    8: """sliding_window window_size attention_chunk_size local_attention attention_window_size
        qk_rope_head_dim rotary_dim laurel_rank mamba_chunk_size chunk_size block_size
        sliding_window_size keep_window_size local_radius floor_scale log_scaling_n_floor
        max_relative_positions local_attn_chunk_length lsh_attn_chunk_length attention_window
        index_block_size index_topk global_block_size local_attention_window_len
        original_max_position_embeddings intra_chunk make_ngram_vocab_size_divisible_by
        block_multiple_of ffn_round_up_to_multiple_of prompt_length""",
    4: """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
        decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
        swa_num_attention_heads linear_num_value_heads linear_num_heads mamba_n_heads
        mamba_num_heads num_experts num_local_experts n_routed_experts moe_num_experts
        index_n_heads speech_encoder_attention_heads t2u_encoder_attention_heads
        t2u_decoder_attention_heads num_query_groups split_ngram_parts expert_capacity""",
    2: """num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads
        linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k o_groups
        n_mamba_heads index_topk_blocks heads_per_ngram num_hidden_layers_per zero_expert_num
        num_mem_blocks num_layers_per_stack num_random_blocks intermediate_multiple_size""",
    1: """n_shared_experts num_shared_experts first_k_dense_replace n_group topk_group n_groups
        mamba_n_groups mamba_ngroups num_expert_group num_dense_layers num_nextn_predict_layers
        moe_num_shared_experts moe_layer_start_index num_codebooks n_groups""",
    0: "num_kv_shared_layers dropout",
    LAYERS: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
        num_encoder_layers num_decoder_layers num_blocks speech_encoder_layers t2u_encoder_layers
        t2u_decoder_layers max_window_layers num_self_attends_per_block""",
}
SIZES = {key: value for value, keys in VALUES.items() for key in keys.split()}
LENGTHS = """max_position_embeddings n_positions n_ctx max_seq_len seq_length context_length
    max_source_positions max_target_positions model_max_length max_encoder_position_embeddings
    max_decoder_position_embeddings""".split()
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MADE = """head_dim num_key_value_heads n_routed_experts n_shared_experts num_experts_per_tok n_group
    topk_group""".split()  # which are given also where the default is none
# Types whose sizes depend on each other in another way.
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
TWO_HYBRID = {"num_hidden_layers": 4, "layers_block_type": [LINEAR, "hybrid"] * 2}
OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": {SLIDING: ROTATION, FULL: ROTATION},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {
            "hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2,
        },
    },
    "esm": {"vocab_size": 128},
    "granitemoehybrid": {"layer_types": [LINEAR, FULL, LINEAR]},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"]},
    "mamba2": {"head_dim": 32},
    "mpnet": {"relative_attention_num_buckets": 32},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": TWO_HYBRID,
    "zamba2": {**TWO_HYBRID, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
# Lists with one entry for each layer that are left to the configuration if a model fails with them.
OF_LAYERS = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_layers")
LEFT_OUT: tuple[tuple[str, ...], ...] = (
    (),
    ("layer_types",),
    OF_LAYERS,
    ("head_dim",),
    ("num_key_value_heads",),
    (*OF_LAYERS, "head_dim"),
)


def sizes(default: Any, trained: int, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return small values of a default configuration, also of those inside it."""
    values: dict[str, Any] = {}
    names, known = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), default.to_dict()
    layers = next((known[name] for name in names if isinstance(known.get(name), int)), 0)
    for key, value in known.items():
        inner = getattr(default, key, None) if key in default.sub_configs else None
        if inner is not None:
            kind = {"model_type": inner.model_type} if inner.model_type else {}
            values[key] = {**sizes(inner, trained, left_out), **kind}
        elif key in left_out:
            continue
        elif key == "is_decoder":
            values[key] = value
        elif key in LENGTHS and type(value) is int:
            values[key] = trained
        elif key in IDS:
            values[key] = IDS[key]
        elif key in SIZES and (type(value) is int or (value is None and key in MADE)):
            values[key] = SIZES[key]
        elif isinstance(value, list) and len(value) == layers > LAYERS:
            # LAYERS entries of as many kinds as fit
            kinds = [item for index, item in enumerate(value) if item not in value[:index]]
            values[key] = (kinds * LAYERS)[:LAYERS]
    if "kv_lora_rank" in values:  # keys of all heads are made of one
        values |= {"num_key_value_heads": values["num_attention_heads"], "head_dim": 8}
    values = {key: value for key, value in values.items() if key in known}
    return {**values, **OWN.get(default.model_type, {})}


def small(name: str, auto: Any) -> Any:
    """Return a small model of a type, of the class that an auto class of transformers gives it.
    Raises what transformers raises for all sizes with a table of positions.
    """
    why: Exception | None = None
    for kind, trained, left_out in _configs(name):
        try:
            values = sizes(kind(), trained, left_out)
            torch.manual_seed(0)
            if "is_decoder" in values:
                values["is_decoder"] = "CausalLM" in auto.__name__
            config = kind(**values)
            model = auto.from_config(config, attn_implementation="eager").float().eval()
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("batched_mm")
            _randomize(model)
            _run(model.get_encoder() if model.config.is_encoder_decoder else model)
            return model
        except Exception as error:
            why = error if why is None or (trained == TABLE and not left_out) else why
    raise why or ValueError("no configuration")


def _configs(name: str) -> Iterator[tuple[Any, int, tuple[str, ...]]]:
    """Yield classes of configurations, also of the text model of a wrapper, positions, and what is
    left out.
    """
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[name]
    kinds = dict.fromkeys((whole, type(_text(whole()))))
    return itertools.product(kinds, (TRAINED, TABLE), LEFT_OUT)


def _run(model: Any) -> None:
    """Run a model on TOKENS ids, if it reads ids."""
    names = inspect.signature(model.forward).parameters
    if "input_ids" not in names:
        return
    cached = "use_cache" in names
    with torch.no_grad():
        ids = torch.randint(3, 100, (2, TOKENS))
        model(input_ids=ids, **({"use_cache": False} if cached else {}))


def _text(config: Any) -> Any:
    try:
        return config.get_text_config(decoder=True)
    except ValueError:
        return config


def _randomize(model: Any) -> None:
    """Draw weights so that every part of a layer changes its outputs."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            std = 0.5 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.1
            torch.nn.init.normal_(parameter, std=std)
