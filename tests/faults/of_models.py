"""Faults of layers, token types and norms, planted in modules; faults of masks and of the
selection of logits, planted in functions that all models call.
"""

from typing import Any, Callable, Tuple

import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.models.parts.residuals import PostNorm, PreNorm
from posenc_export.ops import recurrence
from tests.faults.of_encodings import each
from tests.faults.planting import Fault


def _without_segments(model: Any) -> None:
    model.tokens.segments.weight.zero_()


def _pre_norm(model: Any) -> None:
    for layer in model.layers:
        layer.residual = PreNorm([layer.residual.attention_norm, layer.residual.mlp_norm])
        layer.residual.exact = PostNorm(
            [layer.residual.attention_norm, layer.residual.mlp_norm]
        ).exact


def _layers_exchanged(model: Any) -> None:
    first, second = (layer.attention for layer in model.layers)
    first.encoding, second.encoding = second.encoding, first.encoding


def _mask(change: Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]) -> Callable[[Any], Any]:
    """Return a function that gives the mask other positions of queries and keys."""
    return lambda right: (
        lambda positions, key_positions, *rest: right(*change(positions, key_positions), *rest)
    )


def _shifted_by_padding(q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
    """As GroupQueryAttention with a bias on CUDA, if a short row beside longer ones is given its
    own length.
    """
    first = (k >= 0).sum(1, keepdim=True) == (q >= 0).sum(1, keepdim=True)
    return torch.where(first, q - (q < 0).sum(1, keepdim=True), q), k


def _last_columns(right: Any) -> Any:
    return lambda x, index: x[:, x.size(1) - index.size(1) :]


def _rule(change: Callable[..., Tuple[Tensor, ...]]) -> Callable[[Any], Any]:
    """Return a function that gives the gated delta rule other inputs."""
    return lambda right: lambda *inputs: right(*change(*inputs))


def _without_decay(model: Any) -> None:
    """Let LinearAttention forget nothing."""
    node = next(node for node in model.graph.node if node.op_type == "LinearAttention")
    rule = next(attribute for attribute in node.attribute if attribute.name == "update_rule")
    rule.s = b"delta"
    node.input[4] = ""


DELTA = "gated_delta nope"
RULE, FILTERS = (recurrence, "gated_delta"), (recurrence, "short_convolution")
MASK, SELECTION = (ops, "attention_mask"), (ops, "select_tokens")
# Of gated delta rules: what is wrong, what it breaks, the function, and its change.
DELTAS: Tuple[Tuple[str, str, Any, Any], ...] = (
    (
        "decay ignored",
        "states",
        RULE,
        lambda q, k, v, decay, rate, state: (q, k, v, 0 * decay, rate, state),
    ),
    (
        "rate of the token before",
        "states",
        RULE,
        lambda q, k, v, decay, rate, state: (q, k, v, decay, rate.roll(1, 1), state),
    ),
    (
        "state of a call lost",
        "states",
        RULE,
        lambda q, k, v, decay, rate, state: (q, k, v, decay, rate, 0 * state),
    ),
    (
        "state of another row",
        "rows",
        RULE,
        lambda q, k, v, decay, rate, state: (q, k, v, decay, rate, state.flip(0)),
    ),
    (
        "inputs of filters one token late",
        "states",
        FILTERS,
        lambda x, tail, weight: (x, tail.roll(1, 1), weight),
    ),
)
FAULTS = {
    fault.name: fault
    for fault in (
        *(
            Fault(f"{name}, gated_delta", breaks, "function", _rule(change), DELTA, of=of)
            for name, breaks, of, change in DELTAS
        ),
        Fault(
            "decay of another entry, gated_delta",
            "states",
            "function",
            _rule(lambda q, k, v, decay, *rest: (q, k, v, decay.roll(1, 2), *rest)),
            "gated_delta by entry nope",
            of=RULE,
        ),
        Fault(
            "decay ignored, gated_delta-ort", "states", "file", _without_decay, DELTA, target="ort"
        ),
        Fault(
            "segments of an encoder are lost",
            "tokens",
            "module",
            _without_segments,
            "encoder learned",
        ),
        Fault(
            "norms before layers instead of after them",
            "layers",
            "module",
            _pre_norm,
            "encoder learned",
        ),
        Fault(
            "segments of an encoder with coordinates are lost",
            "tokens",
            "module",
            _without_segments,
            "encoder learned_2d",
        ),
        Fault(
            "segments in scores exchanged",
            "scores",
            "module",
            each(lambda e: e.segment.copy_(e.segment.flip(0))),
            "encoder transformer_xl-segments",
        ),
        Fault(
            "encodings of two layers exchanged", "layers", "module", _layers_exchanged, "two thetas"
        ),
        Fault(
            "logits of the last column instead of the last token",
            "outputs",
            "function",
            _last_columns,
            "rope",
            of=SELECTION,
        ),
        Fault(
            "mask one short", "mask", "function", _mask(lambda q, k: (q - 1, k)), "rope", of=MASK
        ),
        Fault("mask one long", "mask", "function", _mask(lambda q, k: (q + 1, k)), "rope", of=MASK),
        Fault(
            "mask of a shorter row shifted in its first call",
            "mask",
            "function",
            _mask(_shifted_by_padding),
            "rope",
            of=MASK,
        ),
        Fault(
            "padding attended",
            "mask",
            "function",
            _mask(lambda q, k: (q, k.clamp(min=0))),
            "rope",
            of=MASK,
        ),
    )
}
