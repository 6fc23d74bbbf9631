"""Encoder-decoder models of transformers as two parts. The encoder's part gives the keys and values
that the layers of the decoder read.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from posenc_export.models.checkpoint import WHERE
from posenc_export.shared.refusal import refusal

OWN = "build the model in Python and give it to export_model"


class Numbers(torch.nn.Module):
    """A slice of the numbers of each token, in place of a linear layer that computes them."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__()
        self.begin, self.end = begin, end

    def forward(self, x: Tensor) -> Tensor:
        """x [B,M,N] -> [B,M,end-begin]."""
        return x[..., self.begin : self.end]


def read_encoder(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the linear layers of a decoder that read the hidden states of the encoder, keys before
    values of each layer, by name. ValueError: other layers read them, too.
    """
    ids, memory = torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 2, model.config.hidden_size)
    found: dict[str, Any] = {}

    def note(name: str, part: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if any(one is memory for one in inputs) and not [*part.children()]:
            found[name] = part

    hooks = [
        part.register_forward_pre_hook(functools.partial(note, name))
        for name, part in model.named_modules()
    ]
    with torch.no_grad():
        decoded(model, ids, memory, use_cache=False)
    for hook in hooks:
        hook.remove()
    if not found or len(found) % 2 or {type(part) for part in found.values()} != {torch.nn.Linear}:
        rule = "a decoder whose layers read an encoder by a projection to keys and one to values"
        raise refusal(WHERE, rule, f"{', '.join(found) or 'none'}"[:80], OWN)
    return found


def decoded(
    model: Any, ids: Tensor, memory: Tensor, mask: Tensor | None = None, **options: Any
) -> Any:
    """Return the outputs of the decoder of a model. memory: [B,M,*] in place of the encoder's
    hidden states; mask [B,M], None for all tokens.
    """
    from transformers.modeling_outputs import BaseModelOutput

    if mask is not None:
        least = torch.finfo(torch.float32).min
        hidden = torch.zeros(mask.shape).masked_fill(mask.eq(0), least)
        options["attention_mask"] = hidden[:, None, None]
    encoded = BaseModelOutput(last_hidden_state=memory)
    return model(encoder_outputs=encoded, decoder_input_ids=ids, **options)
