"""Tiny models for tests: every registered encoding in the smallest sizes with grouped heads, a
number of heads that is not a power of two, and partial blocks.
"""

from msgspec.structs import replace

from posenc_export.encodings import REGISTRY
from posenc_export.models.config import AttentionConfig, BlockConfig, LayerConfig, StackConfig
from posenc_export.models.short_forms import block_config, decoder_config, encoder_config

VARIANTS = {
    **{name: {"name": name} for name in REGISTRY},
    "rope-interleaved": {"name": "rope", "layout": "interleaved", "theta": 500000.0},
    "rope-partial": {"name": "rope", "rotary": 8},
    "sinusoidal-fairseq": {
        "name": "sinusoidal",
        "layout": "halves",
        "divisor": "fairseq",
        "scale": 2.0,
    },
    "sinusoidal-computed": {"name": "sinusoidal", "angles": "computed"},
    "sinusoidal-computed-halves": {
        "name": "sinusoidal",
        "angles": "computed",
        "layout": "halves",
        "divisor": "fairseq",
    },
    "sinusoidal-offset": {
        "name": "sinusoidal",
        "layout": "halves",
        "divisor": "fairseq",
        "offset": 2,
    },
    "sinusoidal-computed-offset": {"name": "sinusoidal", "angles": "computed", "offset": 2},
    "sinusoidal-factor": {"name": "sinusoidal", "factor": 0.3},
    "sinusoidal-computed-factor": {"name": "sinusoidal", "angles": "computed", "factor": -1.5},
    "sinusoidal_2d-grid": {
        "name": "sinusoidal_2d",
        "first": "column",
        "layout": "interleaved",
        "rows": 500,
        "columns": 70,
        "factor": 0.5,
        "scale": 2.0,
    },
    "boxes-joined": {"name": "boxes", "size": 700, "extent": 6},
    "learned_2d-beside": {"name": "learned_2d", "rows": 60, "columns": 700, "join": "column_row"},
    "learned_2d-row_column": {
        "name": "learned_2d",
        "rows": 700,
        "columns": 60,
        "join": "row_column",
    },
    "learned-offset": {"name": "learned", "offset": 2},
    "rope_proportional-factor": {"name": "rope_proportional", "share": 0.3, "factor": 4.0},
    "rope_linear-spread": {"name": "rope_linear", "factor": 0.4},
    "rope_dynamic-short": {
        "name": "rope_dynamic",
        "factor": 4.0,
        "original_max_positions": 20,
        "layout": "interleaved",
        "rotary": 8,
    },
    "rope_dynamic-rotated": {
        "name": "rope_dynamic",
        "original_max_positions": 20,
        "keys": "rotated",
    },
    "rope_longrope-short": {
        "name": "rope_longrope",
        "original_max_positions": 20,
        "rotary": 8,
        "short_factor": "1;1.5;2;3",
        "long_factor": "1;3;7;16",
    },
    "rope_longrope-rotated": {
        "name": "rope_longrope",
        "original_max_positions": 20,
        "long_factor": "1;2;3;4;5;6;7;8",
        "keys": "rotated",
    },
    "rope_dynamic-single": {
        "name": "rope_dynamic",
        "original_max_positions": 20,
        "numerics": "transformers",
    },
    "rope_dynamic-single-rotated": {
        "name": "rope_dynamic",
        "original_max_positions": 20,
        "numerics": "transformers",
        "keys": "rotated",
    },
    "rope_longrope-single": {
        "name": "rope_longrope",
        "original_max_positions": 20,
        "long_factor": "1;2;3;4;5;6;7;8",
        "numerics": "transformers",
    },
    "rope_dynamic-per_call": {
        "name": "rope_dynamic",
        "original_max_positions": 20,
        "layout": "interleaved",
        "rotary": 8,
        "lengths": "per_call",
    },
    "rope_dynamic-single-per_call": {
        "name": "rope_dynamic",
        "original_max_positions": 20,
        "numerics": "transformers",
        "lengths": "per_call",
    },
    "rope_longrope-per_call": {
        "name": "rope_longrope",
        "original_max_positions": 20,
        "long_factor": "1;2;3;4;5;6;7;8",
        "lengths": "per_call",
    },
    "rope_longrope-long": {
        "name": "rope_longrope",
        "original_max_positions": 20,
        "rotary": 8,
        "long_factor": "1;3;7;16",
        "lengths": "long",
    },
    "dual_chunk-near": {
        "name": "dual_chunk",
        "chunk_size": 10,
        "local_size": 4,
        "original_max_positions": 20,
        "layout": "interleaved",
        "definition": "paper",
    },
    "t5-near": {"name": "t5", "buckets": 8, "max_distance": 20, "scores": "scaled"},
    "kerple-power": {"name": "kerple", "kernel": "power"},
    "complex_order-words": {"name": "complex_order", "frequencies": "words"},
    "complex_order-dimensions": {
        "name": "complex_order",
        "frequencies": "dimensions",
        "phases": "zero",
    },
    "swin-wide": {"name": "swin", "rows": 600, "columns": 60},
    "swin_v2-pretrained": {"name": "swin_v2", "pretrained_rows": 8, "pretrained_columns": 12},
    "swin_v2-wide": {"name": "swin_v2", "rows": 600, "columns": 60},
    "layout_bias-near": {
        "name": "layout_bias",
        "buckets": 8,
        "max_distance": 20,
        "box_buckets": 12,
        "box_max_distance": 90,
        "added": "unscaled",
    },
    "layout_bias-boxes": {"name": "layout_bias", "box_max_distance": 90, "size": 700},
    "decomposed_2d-resized": {
        "name": "decomposed_2d",
        "rows": 600,
        "columns": 60,
        "trained_rows": 8,
        "trained_columns": 90,
        "scores": "scaled",
    },
    "dynamic_bias-log": {"name": "dynamic_bias", "distance": "log", "hidden": 8, "depth": 1},
    "dynamic_bias-norm": {"name": "dynamic_bias", "hidden": 8, "norm": "layer"},
    "inkling-near": {"name": "inkling", "basis": 3, "extent": 9, "scores": "by_size"},
    "wavlm-near": {"name": "wavlm", "buckets": 8, "max_distance": 20},
    "transformer_xl-segments": {"name": "transformer_xl", "segments": "pairs"},
    "transformer_xl-clamped": {"name": "transformer_xl", "clamp": 7},
    "shaw-plain": {"name": "shaw", "left": 9, "right": 0, "values": "plain"},
    "infused-trained": {"name": "infused", "table": "trained"},
    "shaw-nezha": {"name": "shaw", "left": 7, "right": 7, "table": "sinusoidal"},
    "shaw-sinusoidal-plain": {
        "name": "shaw",
        "left": 7,
        "right": 0,
        "table": "sinusoidal",
        "values": "plain",
        "score": "query_key",
    },
    "shaw-bert": {"name": "shaw", "left": 7, "right": 5, "score": "query_key"},
    "deberta-v1": {"name": "deberta", "version": "v1", "span": 10},
    "deberta-near": {"name": "deberta", "span": 8, "max_relative": 20},
    "deberta-c2p": {"name": "deberta", "span": 8, "max_relative": 20, "terms": "c2p"},
    "deberta-p2c": {"name": "deberta", "version": "v1", "span": 10, "terms": "p2c"},
    "cope-short": {"name": "cope", "positions": 6},
    "normalized-short": {"name": "normalized", "length": 100},
    "hierarchical-rows": {"name": "hierarchical", "rows": 200, "share": 0.3},
    "multiplicative-sinusoidal": {"name": "multiplicative", "table": "sinusoidal"},
    "floater-fine": {"name": "floater", "substeps": 2, "step": 0.05},
    "rope_trained-theta": {
        "name": "rope_trained",
        "trains": "theta",
        "rotary": 8,
        "layout": "interleaved",
    },
    "rope-single": {"name": "rope", "numerics": "transformers"},
    "rope_yarn-untruncated": {
        "name": "rope_yarn",
        "truncate": "no",
        "original_max_positions": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "layout": "interleaved",
    },
    "rope_yarn-turns": {
        "name": "rope_yarn",
        "original_max_positions": 64,
        "beta_fast": 4.0,
        "ramp": "turns",
        "temperature": "off",
    },
    "rope_yarn-scores": {
        "name": "rope_yarn",
        "original_max_positions": 64,
        "rotary": 8,
        "mscale_all_dim": 1.0,
        "temperature": "scores",
    },
    "rope_yarn-scores-whole": {
        "name": "rope_yarn",
        "original_max_positions": 64,
        "mscale_all_dim": 0.5,
        "temperature": "scores",
    },
    "rope_llama3-short": {"name": "rope_llama3", "original_max_positions": 64, "theta": 10000.0},
    "xpos-interleaved": {"name": "xpos", "layout": "interleaved", "scale_base": 1024.0},
    "logn-steps": {"name": "logn", "form": "steps", "period": 7},
    "logn-steps-from-0": {"name": "logn", "form": "steps", "period": 5, "first": 0},
    "conditional_conv-wav2vec": {
        "name": "conditional_conv",
        "kernel": 6,
        "groups": 4,
        "activation": "gelu",
    },
    "conditional_conv_2d-wide": {
        "name": "conditional_conv_2d",
        "rows": 40,
        "columns": 900,
        "kernel": 5,
    },
    "fox-forgetful": {"name": "fox", "remember": -200.0},
    "fox-scaled": {"name": "fox", "scale": 0.25},
    "fox_pair-wide": {"name": "fox_pair", "size": 20, "scale": 0.5},
    "rope_axial-partial": {
        "name": "rope_axial",
        "rotary": 8,
        "spectrum": "alternating",
        "layout": "interleaved",
        "numerics": "transformers",
    },
    "rope_axial-video": {"name": "rope_axial", "rotary": 12, "axes": 3},
    "rope_2d-video": {"name": "rope_2d", "rotary": 8, "axes": 3, "layout": "interleaved"},
    "rope_normalized-grid": {
        "name": "rope_normalized",
        "rows": 400,
        "columns": 70,
        "numerics": "transformers",
    },
    "rope_normalized-video": {
        "name": "rope_normalized",
        "frames": 50,
        "rotary": 12,
        "points": "ends",
        "spectrum": "linear",
        "layout": "interleaved",
    },
    "mrope-partial": {
        "name": "mrope",
        "rotary": 12,
        "layout": "interleaved",
        "numerics": "transformers",
    },
    "mrope-yarn": {"name": "mrope", "factor": 4.0, "original_max_positions": 64},
    "mrope_interleaved-yarn": {
        "name": "mrope_interleaved",
        "factor": 8.0,
        "original_max_positions": 64,
        "truncate": "no",
        "numerics": "transformers",
    },
    "mrope-alternating": {"name": "mrope", "order": "alternating", "layout": "interleaved"},
    "mrope_interleaved-partial": {
        "name": "mrope_interleaved",
        "rotary": 12,
        "numerics": "transformers",
    },
    "xdrope-sections": {
        "name": "xdrope",
        "text": 3,
        "width": 2,
        "height": 1,
        "alpha": 4.0,
        "numerics": "transformers",
    },
    "alibi-mpt": {"name": "alibi", "max_bias": 16.0},
    "alibi-scaled": {"name": "alibi", "scale": 0.25},
    "alibi-rounded": {"name": "alibi", "added": "before", "numerics": "bfloat16"},
    "alibi-some-heads": {"name": "alibi", "heads": 3, "added": "before"},
}


def works(variant: str, attention: str) -> bool:
    """Return whether an encoding supports "causal" or "bidirectional" attention."""
    if VARIANTS[variant].get("lengths") == "per_call":
        return attention == "bidirectional"
    return attention in REGISTRY[VARIANTS[variant]["name"]].works_in


def block(variant: str, max_positions: int = 1100, **overrides: object) -> BlockConfig:
    sizes = {
        "width": 48,
        "heads": 6,
        "kv_heads": 3,
        "head_size": 16,
        "max_positions": max_positions,
    }
    values = {
        **sizes,
        "encoding": VARIANTS[variant],
        "causal": works(variant, "causal"),
        **overrides,
    }
    return block_config(**values)  # type: ignore[arg-type]


def decoder(variant: str, **overrides: object) -> StackConfig:
    tied = VARIANTS[variant]["name"] != "complex_order"  # its token table is wider than the model
    return decoder_config(
        vocabulary=61, layers=2, hidden=40, block=block(variant, **overrides), tied=tied
    )


def encoder(variant: str) -> StackConfig:
    return encoder_config(
        vocabulary=61,
        layers=2,
        hidden=40,
        block=block(variant, causal=False, qkv_bias=True, output_bias=True),
        segments=3,
    )


def reading(variant: str, **overrides: object) -> StackConfig:
    """Return a decoder of two layers, each with self-attention and cross-attention."""
    whole = decoder(variant, **overrides)
    layer = whole.kinds[0]
    own, norm = layer.attention, layer.norms[0]
    given = AttentionConfig(
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_size=own.head_size,
        sees={"name": "encoder"},
        projection={"name": "queries"},
    )
    kinds = {
        "own": LayerConfig(
            residual={"name": "alone"}, norms=(norm,), attention=own, mlp={"name": "none"}
        ),
        "encoder": LayerConfig(
            residual={"name": "pre"}, norms=(norm, norm), attention=given, mlp=layer.mlp
        ),
    }
    return replace(whole, layers=kinds, order=("own", "encoder") * 2)
