"""Task heads of encoders as the readout `logits`, by `architectures` of config.json."""

import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import msgspec
import torch
from torch import Tensor

from posenc_export.models import masked_heads
from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import Named, ReadoutConfig
from posenc_export.models.stack import Stack, readout

# For each linear layer, its tensor name without .weight and .bias, and the key of its activation or
# an activation.
Linears = List[Tuple[str, Optional[str]]]
# The layers of a readout, and their tensors by name.
Layers = Tuple[Tuple[Named, ...], Dict[str, Tensor]]
OUTPUT, MASKED = "logits", "MaskedLM"
LIKE_ROBERTA: Linears = [("classifier.dense", "tanh"), ("classifier.out_proj", None)]
LIKE_DEBERTA: Linears = [("pooler.dense", "pooler_hidden_act"), ("classifier", None)]
# By model_type, the linear layers after the first token of a sequence.
SEQUENCE: Dict[str, Linears] = {
    "bert": [("bert.pooler.dense", "tanh"), ("classifier", None)],
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), LIKE_ROBERTA),
    "electra": [("classifier.dense", "gelu"), ("classifier.out_proj", None)],
    "distilbert": [("pre_classifier", "relu"), ("classifier", None)],
    **dict.fromkeys(("deberta", "deberta-v2"), LIKE_DEBERTA),
}
EACH_TOKEN = (*SEQUENCE, "roformer")  # model types with one linear layer for each token
TASKS: Dict[str, Dict[str, Linears]] = {
    "SequenceClassification": SEQUENCE,
    "TokenClassification": {name: [("classifier", None)] for name in EACH_TOKEN},
    "QuestionAnswering": {name: [("qa_outputs", None)] for name in EACH_TOKEN},
}


def task_of(config: Mapping[str, Any]) -> str:
    """Return the task in `architectures`, such as SequenceClassification, or an empty text."""
    named = config.get("architectures")
    architecture = (
        named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    )
    task = re.search(r"For([A-Z]\w*)$", architecture)  # RoFormer also contains For
    return task[1] if task else ""


def attach(model: Stack, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the head that config.json names to its encoder. Other heads are left out; `left_out`
    names them.

    Raises:
        ValueError: tensors of the head are missing or do not fit each other, an unknown activation.
    """
    task, kind = task_of(config), str(config.get("model_type"))
    if left_out(model, config) is None or kind not in (
        masked_heads.HEADS if task == MASKED else TASKS.get(task, {})
    ):
        return
    with Checkpoint(folder, config) as checkpoint:
        layers, tensors = (
            masked_heads.read(checkpoint, config, model.tokens.embedding.weight)
            if task == MASKED
            else _linears(checkpoint, config, TASKS[task][kind])
        )
    pooling = ("cls",) if task == "SequenceClassification" else ()
    labels = () if task == MASKED else _labels(task, config, layers[-1]["size"])
    put(model, ReadoutConfig(output=OUTPUT, pooling=pooling, layers=layers, labels=labels), tensors)


def _linears(checkpoint: Checkpoint, config: Mapping[str, Any], linears: Linears) -> Layers:
    stored = set(checkpoint.names())
    wanted = [f"{name}.{kind}" for name, _ in linears for kind in ("weight", "bias")]
    missing = [name for name in wanted if name not in stored]
    if missing:
        rule = f"expected the tensors of the head that architectures names, {', '.join(wanted)}"
        raise ValueError(
            f"checkpoint: {rule}, got no {missing[0]}; use the config.json that belongs to "
            "the weights"
        )
    tensors = {
        f"layers.{index}.linear.{kind}": checkpoint.tensor(f"{name}.{kind}").clone()
        for index, (name, _) in enumerate(linears)
        for kind in ("weight", "bias")
    }
    layers: Tuple[Named, ...] = tuple(
        {
            "name": "dense",
            "size": tensors[f"layers.{index}.linear.weight"].size(0),
            "activation": None
            if activation is None
            else masked_heads.activation_of(config, activation),
        }
        for index, (_, activation) in enumerate(linears)
    )
    return layers, tensors


def put(model: Stack, description: ReadoutConfig, tensors: Mapping[str, Tensor]) -> None:
    """Give an encoder a readout with these tensors, by name of its parameters.

    Raises:
        ValueError: tensors are missing, unknown or have another shape.
    """
    config = msgspec.structs.replace(model.config, readout=description)
    built = readout(config, getattr(model.tokens, "embedding", None))
    assert built is not None
    wanted = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    named = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != named:
        raise ValueError(
            f"checkpoint: expected layers after width {config.width} with the tensors "
            f"{wanted}, got {named}; download the checkpoint again"
        )
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(tensors[name])
    model.config, model.readout = config, built.eval()


def left_out(model: Any, config: Mapping[str, Any]) -> Optional[str]:
    """Return the task whose head an encoder with hidden states as only output lacks, or None."""
    plain = (
        isinstance(model, Stack)
        and bool(model.config.order)
        and model.config.head is None
        and model.config.key_values is None
        and model.readout is None
    )
    return (task_of(config) or None) if plain else None


def _labels(task: str, config: Mapping[str, Any], size: int) -> Tuple[str, ...]:
    """Return id2label in the order of ids, if complete; start and end for question answering."""
    if task == "QuestionAnswering":
        return ("start", "end") if size == 2 else ()
    by_id = config.get("id2label")
    names = {str(key): value for key, value in by_id.items()} if isinstance(by_id, dict) else {}
    named = [names.get(str(index)) for index in range(size)]
    return (
        tuple(name for name in named if isinstance(name, str))
        if all(isinstance(name, str) for name in named)
        else ()
    )
