"""Keys of config.json that no family uses, and names of keys that differ between families."""

from typing import Any, Dict, Tuple

# Keys that do not affect the computation of logits from tokens.
IGNORED = frozenset(
    """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _flash_attn_2_enabled _model_name_or_path _name_or_path _num_labels
    activation_dropout architectures attention_dropout attention_probs_dropout_prob
    attn_implementation attn_pdrop auto_map aux_loss_alpha base_model bos_token_id
    cache_implementation chunk_size_feed_forward classifier_dropout custom_pipelines
    decoder_start_token_id dropout dtype emb_pdrop embd_pdrop eos_token_id ep_size
    experts_implementation gradient_checkpointing hidden_dropout hidden_dropout_prob id2label
    init_config init_device init_std initializer_range is_llama_config keys_to_ignore_at_inference
    label2id layerdrop library_name license neftune_noise_alpha output_attentions
    output_hidden_states output_past output_router_logits pad_token_id prefix pretraining_tp
    problem_type resid_pdrop return_dict router_aux_loss_coef router_jitter_noise
    sentence_transformers seq_aux summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj task_specific_params tokenizer_class tokenizer_name torch_dtype
    transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_cache
    use_flash_attention use_flash_attn verbose""".split()
)
# quantization_config is read with the tensors (models/packed.py). Keys that earlier versions of
# transformers wrote for every model: settings of generation, which generation_config.json has
# today, and of training and tasks.
GENERATION = """bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p"""
IGNORED |= {
    *GENERATION.split(),
    *(
        "compression_config finetuning_task num_labels quantization_config sep_token_id "
        "tf_legacy_loss torchscript use_bfloat16"
    ).split(),
}
# Keys that they wrote too, with the values that change nothing. A family that reads one takes it.
DEFAULTS: Dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
# Other names of keys, by our name: each with the model types in which transformers reads it.
SPELLINGS: Dict[str, Dict[str, Tuple[str, ...]]] = {"max_position_embeddings": {"n_ctx": ()}}
