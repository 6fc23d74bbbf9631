"""Checkpoints of known families as models that can be exported."""

import dataclasses
import re
from pathlib import Path
from typing import Dict, Optional, Tuple, Union

import torch

from posenc_export.allocation import enough_memory
from posenc_export.models import families
from posenc_export.models.attention import AttentionBlock
from posenc_export.models.checkpoint import Checkpoint, Shape, read_config
from posenc_export.models.config import AttentionConfig, DecoderConfig
from posenc_export.models.decoder import Decoder
from posenc_export.models.families.rules import Rule, Table

LAYER = re.compile(r"^layers\.(\d+)\.")
OLD_BUFFER = ".rotary_emb.inv_freq"  # saved by transformers before 4.32, read by none after
Source = Tuple[Rule, Dict[str, Shape]]  # of one parameter: its rule, and what the checkpoint holds for it


def from_pretrained(path: Union[str, Path], layer: Optional[int] = None, max_positions: Optional[int] = None) -> Union[Decoder, AttentionBlock]:
    """A model with the weights of a checkpoint, float32, in eval mode.

    Args:
        path: a folder with config.json and model.safetensors (or pytorch_model.bin, or either in shards), as transformers saves it.
        layer: its attention alone, with its encoding, as a block from normed hidden states to what is added to them; the whole decoder where None.
        max_positions: range of positions 0 .. max_positions - 1; max_position_embeddings of the config where None.

    Raises:
        ValueError: a family or a key of config.json that cannot be exported, weights that are missing, too many, of another shape or dtype, no such layer.
    """
    folder = Path(path)
    config, table = families.read(read_config(folder), max_positions)
    if layer is not None and not 0 <= layer < config.layers:
        raise ValueError(f"checkpoint: layer is 0 .. {config.layers - 1}, got {layer}; give another layer")
    sources = _sources(config, table)
    with Checkpoint(folder) as checkpoint, enough_memory("checkpoint"), torch.no_grad():
        checkpoint.forget([name for name in checkpoint.names() if name.endswith(OLD_BUFFER)])
        _check(checkpoint, config, sources)
        model: Union[Decoder, AttentionBlock] = Decoder(config) if layer is None else AttentionBlock(_alone(config, layer))
        for name, parameter in model.named_parameters():
            rule, shapes = sources[name if layer is None else f"layers.{layer}.{name}"]
            parameter.copy_(rule.form([checkpoint.tensor(given) for given in shapes]))
    return model.eval()


def _alone(config: DecoderConfig, layer: int) -> AttentionConfig:
    """The attention of one layer, with the encoding that acts in it."""
    in_turn = config.layer_encodings or (config.attention.encoding,)
    return dataclasses.replace(config.attention, encoding=in_turn[layer % len(in_turn)])


def _sources(config: DecoderConfig, table: Table) -> Dict[str, Source]:
    """Of each parameter of the decoder, which is built for that without weights and without encodings: those of families have no parameters."""
    nowhere = dataclasses.replace(config.attention, encoding={"name": "nope"})
    with torch.device("meta"), enough_memory("checkpoint"):
        bare = Decoder(dataclasses.replace(config, attention=nowhere, layer_encodings=()))
    found = {}
    for name, parameter in bare.named_parameters():
        module, _, kind = name.rpartition(".")
        layer = LAYER.match(module)
        rule = table[LAYER.sub("layers.{layer}.", module)]
        shapes = rule.shapes(kind, tuple(parameter.shape), config.attention)
        found[name] = (rule, {given.format(layer=layer[1] if layer else ""): shape for given, shape in shapes.items()})
    return found


def _check(checkpoint: Checkpoint, config: DecoderConfig, sources: Dict[str, Source]) -> None:
    """Refuse weights that do not fit the description; a tied head may be saved a second time, as it is."""
    needed = {name: shape for _, shapes in sources.values() for name, shape in shapes.items()}
    table, head = next(iter(sources["embedding.weight"][1].items())), "lm_head.weight"
    twice = config.tied and head in checkpoint.names()
    checkpoint.check({**needed, **({head: table[1]} if twice else {})})
    if twice and not torch.equal(checkpoint.tensor(head), checkpoint.tensor(table[0])):
        raise ValueError(f"checkpoint: with tie_word_embeddings {head} is {table[0]}, got two that differ; set tie_word_embeddings to false")
