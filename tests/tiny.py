"""Tiny models for tests: every registered encoding in the smallest sizes with grouped heads, a
number of heads that is not a power of two, and partial blocks.
"""

from typing import Any

from msgspec.structs import replace

from posenc_export.encodings import REGISTRY, parse
from posenc_export.models.config import BlockConfig, StackConfig
from posenc_export.models.short_forms import block_config, decoder_config, encoder_config

# Other choices of the parameters of an encoding: its name, a word for the choice, and what follows
# NAME: in `posenc export --encoding`.
CHOICES = {
    "rope-interleaved": "layout=interleaved,theta=500000.0",
    "rope-partial": "rotary=8",
    "sinusoidal-fairseq": "layout=halves,divisor=fairseq,scale=2.0",
    "sinusoidal-offset": "layout=halves,divisor=fairseq,offset=2",
    "sinusoidal-factor": "factor=0.3",
    "sinusoidal-computed": "angles=computed",
    "sinusoidal-computed-offset": "angles=computed,layout=halves,divisor=fairseq,offset=2",
    "sinusoidal_2d-grid": (
        "first=column,layout=interleaved,rows=500,columns=70,factor=0.5,scale=2.0"
    ),
    "boxes-joined": "size=700,extent=6",
    "learned_2d-beside": "rows=60,columns=700,join=column_row",
    "learned_2d-row_column": "rows=700,columns=60,join=row_column",
    "learned-offset": "offset=2",
    "rope_proportional-factor": "share=0.3,factor=4.0",
    "rope_linear-spread": "factor=0.4",
    "rope_dynamic-short": "factor=4.0,original_max_positions=20,layout=interleaved,rotary=8",
    "rope_longrope-short": (
        "original_max_positions=20,rotary=8,short_factor=1;1.5;2;3,long_factor=1;3;7;16"
    ),
    "rope_longrope-long": "original_max_positions=20,rotary=8,long_factor=1;3;7;16,lengths=long",
    "dual_chunk-near": ("chunk_size=10,local_size=4,original_max_positions=20,layout=interleaved"),
    "t5-near": "buckets=8,max_distance=20,scores=scaled",
    "kerple-power": "kernel=power",
    "swin-wide": "rows=600,columns=60",
    "swin_v2-pretrained": "pretrained_rows=8,pretrained_columns=12",
    "swin_v2-wide": "rows=600,columns=60",
    "layout_bias-near": (
        "buckets=8,max_distance=20,box_buckets=12,box_max_distance=90,added=unscaled"
    ),
    "layout_bias-boxes": "box_max_distance=90,size=700",
    "decomposed_2d-wide": "rows=600,columns=60",
    "dynamic_bias-log": "distance=log,hidden=8,depth=1",
    "dynamic_bias-norm": "hidden=8,norm=layer",
    "inkling-near": "basis=3,extent=9,scores=by_size",
    "wavlm-near": "buckets=8,max_distance=20",
    "transformer_xl-clamped": "clamp=7",
    "shaw-plain": "left=9,right=0,values=plain",
    "shaw-plain-keys": "left=7,right=0,values=plain,score=query_key",
    "shaw-bert": "left=7,right=5,score=query_key",
    "deberta-v1": "version=v1,span=10",
    "deberta-near": "span=8,max_relative=20",
    "deberta-c2p": "span=8,max_relative=20,terms=c2p",
    "deberta-p2c": "version=v1,span=10,terms=p2c",
    "cope-short": "positions=6",
    "normalized-short": "length=100",
    "hierarchical-rows": "rows=200,share=0.3",
    "multiplicative-sinusoidal": "table=sinusoidal",
    "floater-fine": "substeps=2,step=0.05",
    "rope_trained-theta": "trains=theta,rotary=8,layout=interleaved",
    "rope_yarn-untruncated": (
        "truncate=no,original_max_positions=64,mscale=1.0,mscale_all_dim=0.5,layout=interleaved"
    ),
    "rope_llama3-short": "original_max_positions=64,theta=10000.0",
    "xpos-interleaved": "layout=interleaved,scale_base=1024.0",
    "logn-steps": "form=steps,period=7",
    "logn-steps-from-0": "form=steps,period=5,first=0",
    "conditional_conv-wav2vec": "kernel=6,groups=4,activation=gelu",
    "conditional_conv_2d-wide": "rows=40,columns=900,kernel=5",
    "fox-forgetful": "remember=-200.0",
    "fox-scaled": "scale=0.25",
    "fox_pair-wide": "size=20,scale=0.5",
    "rope_axial-partial": "rotary=8,spectrum=alternating,layout=interleaved",
    "rope_axial-video": "rotary=12,axes=3",
    "rope_2d-partial": "rotary=8,layout=interleaved",
    "rope_normalized-grid": "rows=400,columns=70",
    "rope_normalized-video": "frames=50,rotary=12,points=ends,spectrum=linear,layout=interleaved",
    "mrope-partial": "rotary=12,layout=interleaved",
    "mrope-alternating": "order=alternating,layout=interleaved",
    "mrope_interleaved-partial": "rotary=12",
    "xdrope-sections": "text=3,width=2,height=1,alpha=4.0",
    "alibi-mpt": "max_bias=16.0",
    "alibi-scaled": "scale=0.25",
    "alibi-some-heads": "heads=3",
}
VARIANTS = {
    **{name: {"name": name} for name in REGISTRY},
    **{name: parse(f"{name.partition('-')[0]}:{given}") for name, given in CHOICES.items()},
}


def works(variant: str, attention: str) -> bool:
    """Return whether an encoding supports "causal" or "bidirectional" attention."""
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
    )


def attending(config: Any, **settings: Any) -> Any:
    """Return a stack whose layers have other settings of attention, such as `sees`."""
    layers = {
        name: replace(kind, attention=replace(kind.attention, **settings))
        for name, kind in config.layers.items()
    }
    return replace(config, layers=layers)
