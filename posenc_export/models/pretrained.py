"""Checkpoints of known families as models that can be exported."""

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import torch

from posenc_export.allocation import enough_memory
from posenc_export.models import families
from posenc_export.models.block import AttentionBlock
from posenc_export.models.checkpoint import Checkpoint, Shape, read_beside, read_config, read_ids, read_tokenizer
from posenc_export.models.config import AttentionConfig, BlockConfig, StackConfig
from posenc_export.models.families.rules import Rule, Table
from posenc_export.models.stack import Stack, Text

HEADS = ("lm_head.weight", "proj_out.weight")  # of transformers' models, where it is saved beside the table that it shares
LAYER = re.compile(r"^layers\.(\d+)\.")
OLD_BUFFER = r"\.rotary_emb\.inv_freq$"  # saved by transformers before 4.32, read by none after
Source = Tuple[Rule, AttentionConfig, Dict[str, Shape]]  # of one parameter: its rule, the attention of its layer, what the checkpoint holds for it


def from_pretrained(
    path: Union[str, Path], layer: Optional[int] = None, max_positions: Optional[int] = None, part: Optional[str] = None
) -> Union[Stack, AttentionBlock]:
    """A model with the weights of a checkpoint, float32, in eval mode.

    Args:
        path: a folder with config.json and model.safetensors (or pytorch_model.bin, or either in shards), as transformers saves it; tokenizer.json and
            the files beside it (models.checkpoint.BESIDE), where they are there, go into its artefacts.
        layer: its attention alone, with its encodings, as a block from what it reads to what it gives; the whole model where None.
        max_positions: range of positions 0 .. max_positions - 1; max_position_embeddings of the config where None.
        part: of a model with an encoder and a decoder (T5, Whisper), "encoder" for the one that gives keys and values to the decoder, or "decoder"; the encoder
            of T5 to hidden states where None. "embeddings", of any model but Whisper, for what stands before the layers: tokens, positions, segments, norm.

    Raises:
        ValueError: a family or a key of config.json that cannot be exported, weights that are missing, too many, of another shape or dtype, no such layer.
    """
    folder = Path(path)
    if layer is not None and part == families.EMBEDDINGS:
        raise ValueError(f"checkpoint: expected a layer or part {part}, got layer {layer} beside it; leave one out")
    config, family = families.read(read_config(folder), max_positions, part)
    if layer is not None and not 0 <= layer < len(config.order):
        raise ValueError(f"checkpoint: layer is 0 .. {len(config.order) - 1}, got {layer}; give another layer")
    with Checkpoint(folder) as checkpoint, enough_memory("checkpoint"), torch.no_grad():
        checkpoint.forget([name for name in checkpoint.names() if any(re.search(pattern, name) for pattern in (OLD_BUFFER, *family.unused))])
        with torch.device("meta"):  # shapes alone; encodings make their tables nevertheless
            model: Union[Stack, AttentionBlock] = Stack(config)
        bases = (*family.other_bases, family.base, "")
        base = next(base for base in bases if any(name.startswith(base) for name in checkpoint.names()) or not base)
        sources = _sources(model, config, family.weights, family.base, base)
        _check(checkpoint, config, sources)
        if layer is not None or part == families.EMBEDDINGS:
            with torch.device("meta"):
                model = AttentionBlock(_alone(config, layer)) if layer is not None else Stack(_embeddings(config))
        _fill(model, checkpoint, sources, "" if layer is None else f"layers.{layer}.")
    if isinstance(model, Stack):
        ids = {key: read_ids(folder, key, config.tokens.vocabulary) if model.config.head else () for key in ("eos_token_id", "decoder_start_token_id")}
        model.text = Text(read_tokenizer(folder), ids["eos_token_id"], ids["decoder_start_token_id"] if part else (), read_beside(folder))
    for encoding in dict.fromkeys((model.token_encoding, *(attention.encoding for attention in model.attentions()))):
        encoding.prepare()
    return model.eval()


def _alone(config: StackConfig, layer: int) -> BlockConfig:
    """The attention of one layer, with the encodings that act in it."""
    return BlockConfig(width=config.width, max_positions=config.max_positions, attention=config.kinds[layer].attention)


def _embeddings(config: StackConfig) -> StackConfig:
    """What stands before the layers."""
    return StackConfig(width=config.width, max_positions=config.max_positions, tokens=config.tokens)


def _sources(model: Any, config: StackConfig, table: Table, base: str, spelled: str) -> Dict[str, Source]:
    """Of each parameter of the model, where it comes from.

    Args:
        base, spelled: what names in the table start with, and those of this checkpoint in its place.
    """
    found, once = {}, {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, kind = name.rpartition(".")
        layer = LAYER.match(name)
        if name not in once and not layer:  # what layers share has a name in each: one may be read alone
            continue
        keys = [name, module, *(LAYER.sub("layers.{layer}.", key) for key in (name, module))]
        rule = next((table[key] for key in keys if key in table), None)
        if rule is None:
            raise ValueError(f"checkpoint: the table of the family says where each parameter stands, got none for {keys[-1]}; add a line to it")
        attention = config.kinds[int(layer[1]) if layer else 0].attention
        shapes = rule.shapes(kind, tuple(parameter.shape), attention)
        spellings = {given: spelled + given.removeprefix(base) if given.startswith(base) else given for given in shapes}
        found[name] = (rule, attention, {spellings[given].format(layer=layer[1] if layer else ""): shape for given, shape in shapes.items()})
    return found


def _check(checkpoint: Checkpoint, config: StackConfig, sources: Dict[str, Source]) -> None:
    """Refuse weights that do not fit the description; a tied head may be saved a second time, as it is."""
    needed = {name: shape for _, _, shapes in sources.values() for name, shape in shapes.items()}
    heads = [name for name in HEADS if name in checkpoint.names()] if config.head is not None and config.head.tied else []
    if not heads:
        return checkpoint.check(needed)
    head, table = heads[0], next(iter(sources["tokens.embedding.weight"][2].items()))
    checkpoint.check({**needed, head: table[1]})
    if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(table[0])):
        raise ValueError(f"checkpoint: with tie_word_embeddings {head} is {table[0]}, got two that differ; set tie_word_embeddings to false")


def _fill(model: Any, checkpoint: Checkpoint, sources: Dict[str, Source], within: str) -> None:
    """Put each parameter in its place, one at a time; what is shared is made once.

    Args:
        within: what the names of sources have in front of those of the model.
    """
    homes: Dict[int, List[Tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            homes.setdefault(id(parameter), []).append((module, name))
    for name, parameter in list(model.named_parameters()):
        rule, attention, shapes = sources[within + name]
        formed = rule.form([checkpoint.tensor(given) for given in shapes], attention).contiguous()
        whole = formed.untyped_storage().nbytes() == formed.nbytes  # a part of another tensor would hold all of it
        made = torch.nn.Parameter(formed if whole else formed.clone())
        for module, short in homes[id(parameter)]:
            setattr(module, short, made)
