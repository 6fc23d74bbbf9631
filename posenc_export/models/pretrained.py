"""Loading of checkpoints as models that can be exported."""

from pathlib import Path

import torch

from posenc_export.models import by_transformers, sentence_transformers, task_heads
from posenc_export.models.by_transformers import AnyCheckpoint, TransformersModel
from posenc_export.models.checkpoint import Checkpoint, read_config
from posenc_export.models.gguf.checkpoint import GGUFCheckpoint, is_gguf
from posenc_export.models.text_settings import text_of
from posenc_export.shared.allocation import enough_memory
from posenc_export.shared.refusal import path_of, refusal


def from_pretrained(
    path: str | Path, max_positions: int | None = None, part: str | None = None, head: bool = True
) -> TransformersModel:
    """Load a model with the weights of a checkpoint, as the code of transformers computes it
    (models/by_transformers.py), float32, in eval mode.

    Args:
        path: folder with config.json and model.safetensors, whole or in shards, as transformers
            saves it.
            tokenizer.json and the files in models.checkpoint.TOKENIZER_FILES are copied into
            artefacts if they exist. Or a GGUF file, whose name ends in .gguf, which holds all of
            these. A folder of sentence-transformers (models/sentence_transformers.py) gives a
            model with the second output sentence_embedding; one for scores of a sequence, the
            second output logits. Decoders with a second output have no cache. One with another
            head of models/task_heads.py gives logits alone.
        max_positions: number of positions, for the range 0 .. max_positions - 1; None for
            max_position_embeddings of the config.
        part: for a model with encoder and decoder (T5, BART), "encoder" for the encoder
            with the projection to the decoder's keys and values, or "decoder". None gives it with
            hidden states as output.
        head: whether the model gets its head or pooling; False for hidden states only.

    Raises:
        ValueError: a type or a value of config.json that cannot be exported; weights that are
            missing, unknown or have another shape or dtype.
        ModuleNotFoundError: transformers is not installed; gguf or tokenizers, for a GGUF file.
    """
    place = path_of("checkpoint", path)
    folder, sentences = sentence_transformers.opened(place, head and part is None)
    with opened(folder) as checkpoint, enough_memory("checkpoint"), torch.no_grad():
        values = checkpoint.config
        kind = by_transformers.kind_of(values, head and sentences is None)
        if part not in (None, "encoder", "decoder"):
            raise refusal("checkpoint", "part encoder or decoder", repr(part), "change part")
        model = by_transformers.load(kind, checkpoint, part)
        if max_positions is not None:
            model.max_positions = max_positions
        if model.max_positions is None:
            raise refusal("checkpoint", "a number of positions", "none", "give max_positions")
        if type(model.max_positions) is not int or model.max_positions < 1:
            rule = "max_positions to be an integer above 0"
            raise refusal("checkpoint", rule, repr(max_positions), "correct it")
        model.choose_factors()
        model.text = text_of(checkpoint.files, values, model.vocabulary, model.decodes, part)
        if sentences is not None:
            sentence_transformers.attach(model, sentences)
        elif model.causal and head and task_heads.left_out(model, values):
            rule = f"a base model, or one for {', '.join(task_heads.HEADS)}"
            got = f"architectures {values.get('architectures')!r:.80}"
            raise refusal("checkpoint", rule, got, task_heads.WITHOUT)
    return model.eval()


def opened(path: Path) -> AnyCheckpoint:
    """Open a folder or a GGUF file."""
    if is_gguf(path):
        return GGUFCheckpoint(path)
    values = read_config(path)
    by_transformers.check_type(values)  # before files are asked for that another format has
    return Checkpoint(path, values)
