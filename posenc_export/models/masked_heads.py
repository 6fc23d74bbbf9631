"""Heads for masked language modelling: dense, norm, and logits often by the token table."""

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple

import torch
from torch import Tensor

from posenc_export.models.checkpoint import Checkpoint
from posenc_export.models.config import Named
from posenc_export.shared.refusal import refusal

# Ends of names of the token table.
TABLES = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
WITHOUT = "export it with head=False"


@dataclass(frozen=True)
class MaskedHead:
    """Names of the tensors of a head, without .weight and .bias, and keys of config.json."""

    # dense, norm, logits: the three layers. logits is empty if the last weight is always the token
    # table.
    dense: str
    norm: str
    logits: str
    shared_bias: str = ""  # full name of the bias of the logits if they have none of their own
    activation: str = "gelu"  # key of the activation after the dense layer, or an activation
    epsilon: Any = "layer_norm_eps"  # key of the epsilon of the norm, or a number
    # For each layer, the key that says whether it has a bias, and its default; none if all layers
    # have one.
    biases: Tuple[Tuple[str, bool], ...] = ()


CLS, NEW = "cls.predictions.", "lm_predictions.lm_head."
LIKE_BERT = MaskedHead(
    f"{CLS}transform.dense",
    f"{CLS}transform.LayerNorm",
    f"{CLS}decoder",
    f"{CLS}bias",
    "hidden_act",
)
LIKE_ROBERTA = MaskedHead("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
NEW_DEBERTA = MaskedHead(f"{NEW}dense", f"{NEW}LayerNorm", "", f"{NEW}bias", "hidden_act")
HEADS: Dict[str, MaskedHead] = {
    **dict.fromkeys(("bert", "roformer", "deberta-v2"), LIKE_BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), LIKE_ROBERTA),
    "electra": MaskedHead(
        "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"
    ),
    "distilbert": MaskedHead(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "", "activation", 1e-12
    ),
    "modernbert": MaskedHead(
        "head.dense",
        "head.norm",
        "decoder",
        activation="classifier_activation",
        epsilon="norm_eps",
        biases=(("classifier_bias", False), ("norm_bias", False), ("decoder_bias", True)),
    ),
}
# Activations of heads: transformers' name to ours. Defaults of their keys.
# Activations: transformers' name to ours.
ACTIVATIONS = {
    **{"silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "tanh": "tanh"},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
}
DEFAULTS = {"classifier_activation": "gelu", "pooler_hidden_act": "gelu"}


def read(
    checkpoint: Checkpoint, config: Mapping[str, Any], table: Tensor
) -> Tuple[Tuple[Named, ...], Dict[str, Tensor]]:
    """Return the layers of the readout, and their tensors by name in the module Readout. table:
    token table of the model [V,E], which may be the last layer's weight. ValueError: tensors of the
    head are missing or contradict config.json.
    """
    head = HEADS[config["model_type"]]
    if config["model_type"] == "deberta-v2" and config.get("legacy") is False:
        head = NEW_DEBERTA
    weight = _weight(checkpoint, config, head)
    optional = {
        "layers.0.linear.weight": _tensor(checkpoint, f"{head.dense}.weight"),
        "layers.0.linear.bias": _bias(checkpoint, config, head, 0),
        "layers.1.weight": _tensor(checkpoint, f"{head.norm}.weight"),
        "layers.1.bias": _bias(checkpoint, config, head, 1),
        "layers.2.linear.weight": weight,
        "layers.2.linear.bias": _bias(checkpoint, config, head, 2),
    }
    tensors = {name: tensor for name, tensor in optional.items() if tensor is not None}
    size = tensors["layers.0.linear.weight"].size(0)
    epsilon = config[head.epsilon] if isinstance(head.epsilon, str) else head.epsilon
    dense = {"name": "dense", "size": size, "bias": "layers.0.linear.bias" in tensors}
    norm = {"name": "norm", "epsilon": epsilon, "bias": "layers.1.bias" in tensors}
    logits = {"name": "dense", "size": weight.size(0), "bias": "layers.2.linear.bias" in tensors}
    tied = {"tied": True} if torch.equal(weight, table) else {}
    activation = activation_of(config, head.activation)
    return ({**dense, "activation": activation}, norm, {**logits, **tied}), tensors


def activation_of(config: Mapping[str, Any], key: str) -> str:
    """Return our name of the activation under a key of config.json. ValueError: an unknown one."""
    name = config.get(key, DEFAULTS.get(key, key))
    if not isinstance(name, str) or name not in ACTIVATIONS:
        rule = f"{key} to be one of {', '.join(ACTIVATIONS)}"
        raise refusal("checkpoint", rule, repr(name), WITHOUT)
    return ACTIVATIONS[name]


def _tied(config: Mapping[str, Any]) -> bool:
    """Return tie_word_embeddings; if it is missing true, the default of all these types."""
    return config.get("tie_word_embeddings", True) is not False


def _weight(checkpoint: Checkpoint, config: Mapping[str, Any], head: MaskedHead) -> Tensor:
    """Return the weight of the logits: its own tensor, or the token table."""
    names, weight = checkpoint.names(), f"{head.logits}.weight"
    if weight not in names and not (head.logits and not _tied(config)):
        weight = next((name for name in names if name.endswith(TABLES)), weight)
    return _tensor(checkpoint, weight)


def _bias(
    checkpoint: Checkpoint, config: Mapping[str, Any], head: MaskedHead, layer: int
) -> Optional[Tensor]:
    """Return the bias of a layer, or None. A file without a bias that a layer may have means zeros.

    transformers computes the logits with their own bias if the files hold it, even if it is tied to
    the shared bias, and with the shared bias only if the two are tied. ValueError: a bias that
    config.json excludes; a shared bias that is not tied.
    """
    name = f"{(head.dense, head.norm, head.logits)[layer]}.bias"
    stored = checkpoint.names()
    if layer == 2 and head.shared_bias in stored and name not in stored:
        if head.logits and not _tied(config):
            remedy = "set tie_word_embeddings to true, which keeps a weight that differs from the"
            remedy = f"{remedy} token table, or add {name}"
            rule = f"{name} with tie_word_embeddings false"
            raise refusal("checkpoint", rule, f"only {head.shared_bias}", remedy)
        name = head.shared_bias
    key, default = head.biases[layer] if head.biases else ("", True)
    if name in stored and not config.get(key, default):
        remedy = f"set {key} to true, or {WITHOUT}"
        raise refusal("checkpoint", f"no {name} with {key} false", "one", remedy)
    return _tensor(checkpoint, name) if name in stored else None


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    if name not in checkpoint.names():
        rule = "the tensors of the head that architectures names"
        raise refusal("checkpoint", rule, f"no {name}", WITHOUT)
    return checkpoint.tensor(name).clone()
