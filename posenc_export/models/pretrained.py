"""Loading of checkpoints as models that can be exported."""

from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Union

import torch

from posenc_export.models import (
    by_transformers,
    families,
    generation_settings,
    sentence_transformers,
    task_heads,
    tokenizer_settings,
)
from posenc_export.models.block import AttentionBlock
from posenc_export.models.by_transformers import AnyCheckpoint
from posenc_export.models.checkpoint import HEAD, TOKENIZER, Checkpoint, read_config, read_ids
from posenc_export.models.config import BlockConfig, StackConfig
from posenc_export.models.gguf.checkpoint import GGUFCheckpoint, is_gguf
from posenc_export.models.parameters import fill, slots
from posenc_export.models.stack import Stack, Text
from posenc_export.models.tensor_files import Shape
from posenc_export.models.weight_blocks import stored
from posenc_export.models.whole_pass import encodings_in
from posenc_export.shared.allocation import enough_memory
from posenc_export.shared.refusal import refusal

# For each parameter, the tensors of the checkpoint that form it, one after the other.
Sources = Dict[str, Dict[str, Shape]]


def from_pretrained(
    path: Union[str, Path],
    layer: Optional[int] = None,
    max_positions: Optional[int] = None,
    part: Optional[str] = None,
    lengths: Optional[str] = None,
    head: bool = True,
) -> Union[Stack, AttentionBlock, by_transformers.Published]:
    """Load a model with the weights of a checkpoint, float32, in eval mode. A model_type without a
    family is read by the code of transformers (models/by_transformers.py).

    Args:
        path: folder with config.json and model.safetensors or pytorch_model.bin, whole or in
            shards, as transformers saves it, and perhaps an adapter (models/adapters.py).
            tokenizer.json and the files in models.checkpoint.TOKENIZER_FILES are copied into
            artefacts if they exist. Or a GGUF file, whose name ends in .gguf, which holds all of
            these. A folder of sentence-transformers (models/sentence_transformers.py) gives a
            model with the second output sentence_embedding; one with a task head that
            models/task_heads.py knows, the second output logits. Decoders with a second output
            have no cache.
        layer: index of a layer whose attention, with its encodings, is returned as a block; None
            for the whole model.
        max_positions: number of positions, for the range 0 .. max_positions - 1; None for
            max_position_embeddings of the config.
        part: for a model with encoder and decoder (T5, BART), "encoder" for the encoder
            with the projection to the decoder's keys and values, or "decoder". None gives it with
            hidden states as output. "embeddings" gives the token table of a family alone.
        lengths: factors of LongRoPE for all positions: "long" or "short". None gives "long" if the
            range of positions is longer than the trained length, otherwise "short".
        head: whether the model gets its head or pooling; False for hidden states only.

    Raises:
        ValueError: a family or a key of config.json that cannot be exported; weights that are
            missing, unknown or have another shape or dtype; no such layer.
        ModuleNotFoundError: gguf or tokenizers is not installed, for a GGUF file; transformers, for
            a model_type without a family.
    """
    whole = head and layer is None and part is None
    folder, sentences = sentence_transformers.opened(Path(path), whole)
    with opened(folder) as checkpoint, enough_memory("checkpoint"), torch.no_grad():
        values = checkpoint.config
        if families.lacks(values):
            read = _published(folder, checkpoint, max_positions, head, layer, sentences, part)
            read.choose_factors(lengths)
            return read
        if lengths is not None:
            rule = "lengths only for a model with LongRoPE"
            raise refusal("checkpoint", rule, f"{lengths!r} for another", "leave it out")
        if part not in (None, families.EMBEDDINGS):
            rule = f"a model with encoder and decoder for part {part}"
            raise refusal("checkpoint", rule, repr(values["model_type"]), "leave part out")
        described = families.read(values, max_positions)
        config = task_heads.of_decoder(described, values, whole, sentences is not None)
        _check_layer(config, layer, part)
        families.check_sizes(values["model_type"], config, checkpoint.sizes())
        old_buffer = by_transformers.OLD_BUFFER.search
        checkpoint.forget([name for name in checkpoint.names() if old_buffer(name)])
        # On the meta device, parameters have shapes but no data; tables of encodings are computed.
        with torch.device("meta"):
            stack = Stack(config)
        # Of decoders for question answering, whatever their base is.
        old = ("transformer.",) if "qa_outputs.weight" in checkpoint.names() else ()
        base = checkpoint.base((families.BASE, *old, ""))
        if config.head is None:
            others = [name for name in checkpoint.names() if not name.startswith(base)]
            checkpoint.forget(others)  # heads
        attention = config.kinds[0].attention
        sources = {
            name: families.tensors_of(name, tuple(parameter.shape), attention, base)
            for name, parameter in stack.named_parameters()
        }
        _check(checkpoint, config, sources)
        with torch.device("meta"):
            model = _part(stack, layer, part)
        _fill(model, checkpoint, sources, "" if layer is None else f"layers.{layer}.")
        if isinstance(model, Stack):
            ids = model.config.tokens.vocabulary
            model.text = _text(checkpoint.files, values, ids, bool(model.config.head))
            model.stored = stored(sources, checkpoint.matrix)
    for encoding in encodings_in(model):
        encoding.prepare()
    if sentences is not None and isinstance(model, Stack):
        sentence_transformers.attach(model, sentences)
    elif isinstance(model, Stack) and whole:
        task_heads.attach(model, folder, values)
    return model.eval()


def _published(
    folder: Path,
    checkpoint: AnyCheckpoint,
    max_positions: Optional[int],
    head: bool,
    layer: Optional[int],
    sentences: Optional[sentence_transformers.Sentences],
    part: Optional[str],
) -> by_transformers.Published:
    """Return the model of a type without a family. Arguments as of from_pretrained."""
    values = checkpoint.config
    reads_out = head and (sentences is not None or task_heads.reads_head(values))
    kind = by_transformers.kind_of(values, head and not reads_out)
    if part not in (None, "encoder", "decoder", families.EMBEDDINGS):
        raise refusal("checkpoint", "part encoder or decoder", repr(part), "change part")
    if layer is not None or part == families.EMBEDDINGS:
        rule = f"a model_type with a family of ours for {'part' if layer is None else 'layer'}"
        raise refusal("checkpoint", rule, repr(values["model_type"]), "leave it out")
    model = by_transformers.load(kind, checkpoint, part)
    model.max_positions = max_positions or model.max_positions
    if model.max_positions is None:
        raise refusal("checkpoint", "a number of positions", "none", "give max_positions")
    decodes = model.head and model.causal
    model.text = _text(checkpoint.files, values, model.vocabulary, decodes, part)
    if model.causal and head and not kind.head:  # encoders give hidden states, as left_out says
        rule = f"a base model, or one for {', '.join(by_transformers.EACH)}"
        got = f"architectures {values.get('architectures')!r:.80}"
        raise refusal("checkpoint", rule, got, task_heads.WITHOUT)
    if sentences is not None and head:
        sentence_transformers.attach(model, sentences)
    elif reads_out:
        task_heads.attach(model, folder, values)
    return model


def _part(model: Stack, layer: Optional[int], part: Optional[str]) -> Union[Stack, AttentionBlock]:
    """Return the attention of a layer, the part before the layers, or the whole model."""
    config = model.config
    sizes: Dict[str, Any] = {"width": config.width, "max_positions": config.max_positions}
    if layer is not None:
        return AttentionBlock(BlockConfig(**sizes, attention=config.kinds[layer].attention))
    if part == families.EMBEDDINGS:
        return Stack(StackConfig(**sizes, tokens=config.tokens))
    return model


def outline(
    path: Union[str, Path],
    max_positions: Optional[int] = None,
    head: bool = True,
) -> Optional[Stack]:
    """The model of a checkpoint on the meta device, with shapes of parameters and no data, and
    without a readout; None for a type without a family. Arguments as of from_pretrained.

    Raises:
        ValueError: as from_pretrained, for config.json.
    """
    folder, sentences = sentence_transformers.opened(Path(path), head)
    with opened(folder) as checkpoint, torch.device("meta"):
        values = checkpoint.config
        if families.lacks(values):
            return None
        config = families.read(values, max_positions)
        return Stack(task_heads.of_decoder(config, values, head, sentences is not None))


def _check_layer(config: StackConfig, layer: Optional[int], part: Optional[str]) -> None:
    if layer is not None and part == families.EMBEDDINGS:
        got = f"both, with layer {layer}"
        raise refusal("checkpoint", f"layer or part {part}", got, "leave one out")
    if layer is not None and not 0 <= layer < len(config.order):
        rule = f"layer to be 0 .. {len(config.order) - 1}"
        raise refusal("checkpoint", rule, layer, "give another layer")


def opened(path: Path) -> AnyCheckpoint:
    """Open a folder or a GGUF file."""
    return GGUFCheckpoint(path) if is_gguf(path) else Checkpoint(path, read_config(path))


def _text(
    files: Mapping[str, bytes],
    values: Mapping[str, Any],
    vocabulary: int,
    head: bool,
    part: Optional[str] = None,
) -> Text:
    """Return a checkpoint's tokenizer and, with a head, stop ids, start ids and generation."""
    tokenizer_settings.check(files)
    others = {name: content for name, content in files.items() if name != TOKENIZER}
    tokenizer = files.get(TOKENIZER, b"")
    if not head:
        return Text(tokenizer, files=others)
    stop_ids = read_ids(files, values, "eos_token_id", vocabulary)
    start_ids = read_ids(files, values, "decoder_start_token_id", vocabulary)
    generation = generation_settings.read(files, values, vocabulary)
    return Text(tokenizer, stop_ids, start_ids if part else (), others, generation)


def _check(checkpoint: AnyCheckpoint, config: StackConfig, sources: Sources) -> None:
    """Check that the checkpoint holds exactly the tensors. A tied head may be saved, too."""
    needed = {name: shape for shapes in sources.values() for name, shape in shapes.items()}
    if config.head is None or not config.head.tied or HEAD not in checkpoint.names():
        return checkpoint.check(needed)
    name, shape = next(iter(sources["tokens.embedding.weight"].items()))
    if name not in checkpoint.names() and isinstance(checkpoint, Checkpoint):
        checkpoint.rename(HEAD, name)  # transformers reads it as the token table, too
        return checkpoint.check(needed)
    checkpoint.check({**needed, HEAD: shape})
    if not torch.equal(checkpoint.tensor(HEAD), checkpoint.tensor(name)):
        rule = f"{HEAD} to equal {name} with tie_word_embeddings"
        remedy = "set tie_word_embeddings to false"
        raise refusal("checkpoint", rule, "different tensors", remedy)


def _fill(model: Any, checkpoint: AnyCheckpoint, sources: Sources, within: str) -> None:
    """Set all parameters of the model, one at a time, a tied one in both modules that use it.
    model: stack or block on the meta device; within: prefix that names in `sources` have before
    names of the model.
    """
    places = slots(model)
    for name, parameter in list(model.named_parameters()):
        tensors = [checkpoint.tensor(theirs) for theirs in sources[within + name]]
        formed = torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()
        # A view would keep all of its base tensor in memory.
        whole = formed.untyped_storage().nbytes() == formed.nbytes
        fill(places[id(parameter)], torch.nn.Parameter(formed if whole else formed.clone()))
