"""Task heads as the readout `logits`, by `architectures` of config.json."""

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from torch import Tensor

from posenc_export.models import masked_heads
from posenc_export.models.by_transformers import MASKED, Published, task_of
from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import Named, ReadoutConfig
from posenc_export.models.stack import readout
from posenc_export.shared.refusal import refusal

# For each linear layer, its tensor name without .weight and .bias, and the key of its activation or
# an activation.
Linears = List[Tuple[str, Optional[str]]]
# The layers of a readout, and their tensors by name.
Layers = Tuple[Tuple[Named, ...], Dict[str, Tensor]]
OUTPUT, SCORES = "logits", "SequenceClassification"
LIKE_ROBERTA: Linears = [("classifier.dense", "tanh"), ("classifier.out_proj", None)]
# By model_type, the linear layers after the first token of a sequence.
SEQUENCE: Dict[str, Linears] = {
    "bert": [("bert.pooler.dense", "tanh"), ("classifier", None)],
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), LIKE_ROBERTA),
    "electra": [("classifier.dense", "gelu"), ("classifier.out_proj", None)],
    "distilbert": [("pre_classifier", "relu"), ("classifier", None)],
    "deberta-v2": [("pooler.dense", "pooler_hidden_act"), ("classifier", None)],
}
EACH_TOKEN = (*SEQUENCE, "roformer")  # model types with one linear layer for each token
TASKS: Dict[str, Dict[str, Linears]] = {
    SCORES: SEQUENCE,
    "TokenClassification": {name: [("classifier", None)] for name in EACH_TOKEN},
    "QuestionAnswering": {name: [("qa_outputs", None)] for name in EACH_TOKEN},
}
WITHOUT = "give --no-head, or head=False, for hidden states"


def attach(model: Published, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the head that config.json names to its model; `left_out` names others. ValueError: its
    tensors are missing or do not fit each other, an unknown activation.
    """
    task, kind = task_of(config), str(config.get("model_type"))
    if left_out(model, config) is None or not reads_head(config):
        return
    with Checkpoint(folder, config) as checkpoint:
        if task == MASKED:
            table = _table(model)
            assert table is not None
            layers, tensors = masked_heads.read(checkpoint, config, table)
        else:
            layers, tensors = _linears(checkpoint, config, TASKS[task][kind])
    pooling = ("cls",) if task == SCORES else ()
    labels = () if task == MASKED else _labels(task, config, layers[-1]["size"])
    put(model, ReadoutConfig(output=OUTPUT, pooling=pooling, layers=layers, labels=labels), tensors)


def _linears(checkpoint: Checkpoint, config: Mapping[str, Any], linears: Linears) -> Layers:
    stored, kinds = set(checkpoint.names()), ("weight", "bias")
    wanted = [f"{name}.{kind}" for name, _ in linears for kind in kinds]
    if missing := [name for name in wanted if name not in stored]:
        rule = f"the tensors of the head that architectures names, {', '.join(wanted)}"
        raise refusal("checkpoint", rule, f"no {missing[0]}", masked_heads.WITHOUT)
    layers: List[Named] = []
    tensors: Dict[str, Tensor] = {}
    for index, (name, activation) in enumerate(linears):
        for kind in kinds:
            tensor = checkpoint.tensor(f"{name}.{kind}").clone()
            tensors[f"layers.{index}.linear.{kind}"] = tensor
        ours = None if activation is None else masked_heads.activation_of(config, activation)
        layers.append({"name": "dense", "size": tensor.size(0), "activation": ours})
    return tuple(layers), tensors


def reads_head(config: Mapping[str, Any]) -> bool:
    """Return whether `attach` reads the head that an encoder's config.json names."""
    of_type = masked_heads.HEADS if task_of(config) == MASKED else TASKS.get(task_of(config), {})
    return str(config.get("model_type")) in of_type


def put(model: Published, description: ReadoutConfig, tensors: Mapping[str, Tensor]) -> None:
    """Give a model a readout with these tensors, by name of its parameters. ValueError: tensors
    are missing, unknown or have another shape.
    """
    built = readout(description, model.width, _table(model))
    assert built is not None
    wanted = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    named = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != named:
        rule = f"layers after width {model.width} with the tensors {wanted}"
        raise refusal("checkpoint", rule, named, "download the checkpoint again")
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if not torch.equal(parameter, tensors[name]):  # a tied one may be mapped from a file
                parameter.copy_(tensors[name])
    model.readout = description, built.eval()


def _table(model: Published) -> Optional[Tensor]:
    """Return the token table of a model."""
    table: Optional[Tensor] = model.model.get_input_embeddings().weight
    return table


def left_out(model: Published, config: Mapping[str, Any]) -> Optional[str]:
    """Return the task whose head a model with hidden states as only output lacks, or None."""
    return None if model.head or model.readout else task_of(config) or None


def _labels(task: str, config: Mapping[str, Any], size: int) -> Tuple[str, ...]:
    """Return id2label in the order of ids, if complete; start and end for question answering."""
    if task == "QuestionAnswering":
        return ("start", "end") if size == 2 else ()
    by_id = config.get("id2label")
    names = {str(key): value for key, value in by_id.items()} if isinstance(by_id, dict) else {}
    named = [names.get(str(index)) for index in range(size)]
    labels = tuple(name for name in named if isinstance(name, str))
    return labels if len(labels) == size else ()
