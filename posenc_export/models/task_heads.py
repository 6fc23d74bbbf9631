"""Task heads as the readout `logits`, by `architectures` of config.json."""

import re
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

import msgspec
import torch
from torch import Tensor

from posenc_export.models import masked_heads
from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import Named, ReadoutConfig, StackConfig
from posenc_export.models.stack import Stack, readout
from posenc_export.shared.refusal import refusal

# For each linear layer, its tensor name without .weight and .bias, and the key of its activation or
# an activation.
Linears = List[Tuple[str, Optional[str]]]
# The layers of a readout, and their tensors by name.
Layers = Tuple[Tuple[Named, ...], Dict[str, Tensor]]
OUTPUT, MASKED, SCORES = "logits", "MaskedLM", "SequenceClassification"
LIKE_ROBERTA: Linears = [("classifier.dense", "tanh"), ("classifier.out_proj", None)]
LIKE_DEBERTA: Linears = [("pooler.dense", "pooler_hidden_act"), ("classifier", None)]
SPEECH = ("wav2vec2", "hubert", "wavlm", "wav2vec2-bert")
# By model_type, the linear layers after the first token of a sequence, or after the mean of all.
SEQUENCE: Dict[str, Linears] = {
    **{
        name: [(f"{name}.pooler.dense", "tanh"), ("classifier", None)]
        for name in ("bert", "layoutlm")
    },
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet", "layoutlmv3"), LIKE_ROBERTA),
    "electra": [("classifier.dense", "gelu"), ("classifier.out_proj", None)],
    "distilbert": [("pre_classifier", "relu"), ("classifier", None)],
    **dict.fromkeys(("deberta", "deberta-v2"), LIKE_DEBERTA),
}
EACH_TOKEN = (*SEQUENCE, "roformer")  # model types with one linear layer for each token
OF_MEAN: Linears = [("projector", None), ("classifier", None)]
TASKS: Dict[str, Dict[str, Linears]] = {
    SCORES: {**SEQUENCE, **dict.fromkeys(SPEECH, OF_MEAN)},
    "CTC": dict.fromkeys(SPEECH, [("lm_head", None)]),
    "AudioFrameClassification": {
        name: [("classifier", None)] for name in SPEECH if name != "hubert"
    },
    "TokenClassification": {name: [("classifier", None)] for name in EACH_TOKEN},
    "QuestionAnswering": {
        **{name: [("qa_outputs", None)] for name in EACH_TOKEN},
        "layoutlmv3": [("qa_outputs.dense", "tanh"), ("qa_outputs.out_proj", None)],
    },
}

# Tasks of decoders, and the names that their linear layer has. Only scores of a sequence, of its
# last token, have no bias.
OF_DECODERS: Dict[str, Tuple[str, ...]] = {
    SCORES: ("score",),
    "TokenClassification": ("score", "classifier"),
    "QuestionAnswering": ("qa_outputs",),
}
LANGUAGE = ("CausalLM", "ConditionalGeneration")
WITHOUT = "give --no-head, or head=False, for hidden states"


def task_of(config: Mapping[str, Any]) -> str:
    """Return the task in `architectures`, such as SequenceClassification, or an empty text."""
    # RoFormer also contains For.
    task = re.search(r"For([A-Z]\w*)$", _architecture(config))
    return task[1] if task else ""


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else ""
    return first if isinstance(first, str) else ""


def of_decoder(
    config: StackConfig, values: Mapping[str, Any], head: bool, pooled: bool
) -> StackConfig:
    """Return the description of a decoder with the head that its checkpoint has: unchanged with a
    head for language; without a head for its base model or head=False, with hidden states as
    output; without head and caches if a readout follows. Other models are returned unchanged.

    Args:
        values: contents of config.json.
        head: whether the head is wanted.
        pooled: whether hidden states are pooled (sentence-transformers).

    Raises:
        ValueError: `architectures` names another head, or a readout follows a recurrent mechanism.
    """
    if config.head is None or any(attention.reads_encoder for attention in config.attentions):
        return config
    task, name = task_of(values), _architecture(values)
    known = pooled or task in OF_DECODERS
    if head and not known and (not name or task in LANGUAGE or "LMHead" in name):
        return config
    base = re.sub(r"[\W_]", "", f"{values['model_type']}Model").lower()
    if head and not known and name.replace("_", "").lower() != base:
        rule = f"a decoder's base model, or one for {', '.join((*LANGUAGE, *OF_DECODERS))}"
        raise refusal("checkpoint", rule, f"architectures {name!r}", WITHOUT)
    without = msgspec.structs.replace(config, head=None)
    if not head or not known:
        return without
    layers = {}
    for kind, layer in config.layers.items():
        if layer.attention.mechanism != "softmax":
            rule = "softmax attention for an output of whole rows"
            raise refusal("checkpoint", rule, layer.attention.mechanism, WITHOUT)
        sees = {**layer.attention.sees, "cache": False}
        layers[kind] = layer.with_attention(sees=sees)
    return msgspec.structs.replace(without, layers=layers)


def attach(model: Stack, folder: Path, config: Mapping[str, Any]) -> None:
    """Add the head that config.json names to its model; `left_out` names others. ValueError: its
    tensors are missing or do not fit each other, an unknown activation.
    """
    task, kind = task_of(config), str(config.get("model_type"))
    causal = model.config.token_geometry.causal
    known = masked_heads.HEADS if task == MASKED else OF_DECODERS if causal else TASKS.get(task, {})
    if left_out(model, config) is None or (task if causal else kind) not in known:
        return
    with Checkpoint(folder, config) as checkpoint:
        if task == MASKED:
            table = model.tokens.embedding.weight
            layers, tensors = masked_heads.read(checkpoint, config, table)
        elif causal:
            stored = [name.removesuffix(".weight") for name in checkpoint.names()]
            own = [name for name in OF_DECODERS[task] if name in stored] or OF_DECODERS[task]
            layers, tensors = _linears(checkpoint, config, [(own[0], None)], task != SCORES)
        else:
            layers, tensors = _linears(checkpoint, config, TASKS[task][kind])
    pooled = "last" if causal else "mean" if kind in SPEECH else "cls"
    pooling = (pooled,) if task == SCORES else ()
    labels = () if task in (MASKED, "CTC") else _labels(task, config, layers[-1]["size"])
    put(model, ReadoutConfig(output=OUTPUT, pooling=pooling, layers=layers, labels=labels), tensors)


def _linears(
    checkpoint: Checkpoint, config: Mapping[str, Any], linears: Linears, bias: bool = True
) -> Layers:
    stored, kinds = set(checkpoint.names()), ("weight", "bias") if bias else ("weight",)
    if linears[0][0] == "classifier" and "classifier.dense.weight" in stored:
        linears = LIKE_ROBERTA  # LayoutLMv3 with 10 labels or more for each token
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
        layers[-1] |= {} if bias else {"bias": False}
    return tuple(layers), tensors


def put(model: Stack, description: ReadoutConfig, tensors: Mapping[str, Tensor]) -> None:
    """Give a model a readout with these tensors, by name of its parameters. ValueError: tensors
    are missing, unknown or have another shape.
    """
    config = msgspec.structs.replace(model.config, readout=description)
    built = readout(config, getattr(model.tokens, "embedding", None))
    assert built is not None
    wanted = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    named = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != named:
        rule = f"layers after width {config.width} with the tensors {wanted}"
        raise refusal("checkpoint", rule, named, "download the checkpoint again")
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            parameter.copy_(tensors[name])
    model.config, model.readout = config, built.eval()


def left_out(model: Any, config: Mapping[str, Any]) -> Optional[str]:
    """Return the task whose head a model with hidden states as only output lacks, or None."""
    if not isinstance(model, Stack) or not model.config.order or model.readout is not None:
        return None
    if model.config.head is not None or model.config.key_values is not None:
        return None
    return task_of(config) or None


def _labels(task: str, config: Mapping[str, Any], size: int) -> Tuple[str, ...]:
    """Return id2label in the order of ids, if complete; start and end for question answering."""
    if task == "QuestionAnswering":
        return ("start", "end") if size == 2 else ()
    by_id = config.get("id2label")
    names = {str(key): value for key, value in by_id.items()} if isinstance(by_id, dict) else {}
    named = [names.get(str(index)) for index in range(size)]
    labels = tuple(name for name in named if isinstance(name, str))
    return labels if len(labels) == size else ()
