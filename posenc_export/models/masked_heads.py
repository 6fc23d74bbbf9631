"""Heads for masked language modelling: a dense layer, a norm, and a logit for each token id, whose weights are often the token table."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor

from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import Named
from posenc_export.models.families.shared.settings import ACTIVATIONS

TABLES = (
    "embeddings.word_embeddings.weight",
    "embeddings.tok_embeddings.weight",
)  # ends of names of the token table


@dataclass(frozen=True)
class MaskedHead:
    """Names of the tensors of a head, without .weight and .bias, and keys of config.json.

    Args:
        dense, norm, logits: the three layers.
        bias: the bias of the logits.
        activation: key of the activation after the dense layer, or an activation.
        epsilon: key of the epsilon of the norm, or a number.
    """

    dense: str
    norm: str
    logits: str
    bias: str
    activation: str = "gelu"
    epsilon: Any = "layer_norm_eps"


CLS = "cls.predictions."
LIKE_BERT = MaskedHead(
    f"{CLS}transform.dense",
    f"{CLS}transform.LayerNorm",
    f"{CLS}decoder",
    f"{CLS}bias",
    "hidden_act",
)
LIKE_ROBERTA = MaskedHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
NEW_DEBERTA = MaskedHead(
    "lm_predictions.lm_head.dense",
    "lm_predictions.lm_head.LayerNorm",
    "",
    "lm_predictions.lm_head.bias",
    "hidden_act",
)
HEADS: Dict[str, MaskedHead] = {
    **dict.fromkeys(("bert", "roformer", "deberta", "deberta-v2"), LIKE_BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), LIKE_ROBERTA),
    "electra": MaskedHead(
        "generator_predictions.dense",
        "generator_predictions.LayerNorm",
        "generator_lm_head",
        "generator_lm_head.bias",
    ),
    "distilbert": MaskedHead(
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "vocab_projector.bias",
        "activation",
        1e-12,
    ),
    "modernbert": MaskedHead(
        "head.dense", "head.norm", "decoder", "decoder.bias", "classifier_activation", "norm_eps"
    ),
}


def read(
    checkpoint: Checkpoint, config: Mapping[str, Any], table: Tensor
) -> Tuple[Tuple[Named, ...], Dict[str, Tensor]]:
    """Return the layers of the readout, and their tensors by name in the module Readout.

    Args:
        config: contents of config.json, of a model_type in HEADS.
        table: token table of the model [V,E], which is the last layer's weight if the checkpoint ties them.

    Raises:
        ValueError: tensors of the head are missing, or an unknown activation.
    """
    head = (
        NEW_DEBERTA
        if config["model_type"].startswith("deberta") and config.get("legacy") is False
        else HEADS[config["model_type"]]
    )
    weight = _weight(checkpoint, head)
    found: Dict[str, Optional[Tensor]] = {
        "layers.0.linear.weight": _tensor(checkpoint, f"{head.dense}.weight"),
        "layers.0.linear.bias": _optional(checkpoint, f"{head.dense}.bias"),
        "layers.1.weight": _tensor(checkpoint, f"{head.norm}.weight"),
        "layers.1.bias": _optional(checkpoint, f"{head.norm}.bias"),
        "layers.2.linear.weight": weight,
        "layers.2.linear.bias": _optional(checkpoint, head.bias),
    }
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    activation = config.get(
        head.activation, "gelu" if head.activation == "classifier_activation" else head.activation
    )
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"checkpoint: expected {head.activation} to be one of {', '.join(ACTIVATIONS)}, got {activation!r}; export it with head=False"
        )
    epsilon = config[head.epsilon] if isinstance(head.epsilon, str) else head.epsilon
    dense = {
        "name": "dense",
        "size": tensors["layers.0.linear.weight"].size(0),
        "bias": "layers.0.linear.bias" in tensors,
    }
    norm = {"name": "norm", "epsilon": epsilon, "bias": "layers.1.bias" in tensors}
    logits = {"name": "dense", "size": weight.size(0), "bias": "layers.2.linear.bias" in tensors}
    tied = {"tied": True} if torch.equal(weight, table) else {}
    return ({**dense, "activation": ACTIVATIONS[activation]}, norm, {**logits, **tied}), tensors


def _weight(checkpoint: Checkpoint, head: MaskedHead) -> Tensor:
    """Return the weight of the logits: its own tensor or, if the checkpoint does not repeat it, the token table."""
    own = f"{head.logits}.weight"
    return _tensor(
        checkpoint,
        own
        if own in checkpoint.names()
        else next((name for name in checkpoint.names() if name.endswith(TABLES)), own),
    )


def _optional(checkpoint: Checkpoint, name: str) -> Optional[Tensor]:
    return _tensor(checkpoint, name) if name in checkpoint.names() else None


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    if name not in checkpoint.names():
        rule = "expected the tensors of the head that architectures names"
        raise ValueError(
            f"checkpoint: {rule}, got no {name}; use the config.json that belongs to the weights, or export it with head=False"
        )
    return checkpoint.tensor(name).clone()
