"""Faults of layers and norms, planted in modules; faults of masks and of the
selection of logits, planted in functions that all models call.
"""

from typing import Any, Callable

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.models.parts.residuals import PostNorm, PreNorm
from tests.faults.planting import Fault


def _pre_norm(model: Any) -> None:
    for layer in model.layers:
        norms = layer.residual.attention_norm, layer.residual.mlp_norm
        layer.residual, layer.residual.exact = PreNorm(*norms), PostNorm(*norms).exact


def _layers_exchanged(model: Any) -> None:
    first, second = (layer.attention for layer in model.layers)
    first.encoding, second.encoding = second.encoding, first.encoding


def _mask(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Any], Any]:
    """Return a function that gives the mask other positions of queries and keys."""
    return lambda right: (
        lambda positions, key_positions, *rest: right(*change(positions, key_positions), *rest)
    )


def _shifted_by_padding(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """As GroupQueryAttention with a bias on CUDA, if a short row beside longer ones is given its
    own length.
    """
    first = (k >= 0).sum(1, keepdim=True) == (q >= 0).sum(1, keepdim=True)
    return torch.where(first, q - (q < 0).sum(1, keepdim=True), q), k


def _last_columns(right: Any) -> Any:
    return lambda x, index: x[:, x.size(1) - index.size(1) :]


MASK, SELECTION = (ops, "attention_mask"), (ops, "select_tokens")
# Of masks: what is wrong, and the change of positions of queries and keys.
MASKS: tuple[tuple[str, Any], ...] = (
    ("mask one short", lambda q, k: (q - 1, k)),
    ("mask one long", lambda q, k: (q + 1, k)),
    ("mask of a shorter row shifted in its first call", _shifted_by_padding),
    ("padding attended", lambda q, k: (q, k.clamp(min=0))),
)
# Of modules: what is wrong, the model, and its change.
MODULES: tuple[tuple[str, str, Any], ...] = (
    ("norms before layers instead of after them", "encoder learned", _pre_norm),
    ("encodings of two layers exchanged", "two thetas", _layers_exchanged),
)
LAST = "logits of the last column instead of the last token"
FAULTS = {
    fault.name: fault
    for fault in (
        *(Fault(name, "module", change, model) for name, model, change in MODULES),
        Fault(LAST, "function", _last_columns, "rope", of=SELECTION),
        *(Fault(name, "function", _mask(change), "rope", of=MASK) for name, change in MASKS),
    )
}
