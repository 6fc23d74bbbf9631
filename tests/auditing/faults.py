"""Faults of exporters, planted in graphs as torch.onnx exports them."""

from typing import Any, Callable, Dict, NamedTuple, Tuple

import torch

from bench.audit_exporters import Wrapper

Inputs = Tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tuple[torch.Tensor, ...]]


class Fault(NamedTuple):
    """A fault of an exporter.

    Args:
        model: name of the model in which it is planted.
        causes: the causes that an audit may name.
        spoil: changes the model of transformers.
        wrap: changes the inputs of a call, as the graph then does.
        outputs: changes the caches that a call returns.
    """

    model: str
    causes: Tuple[str, ...]
    spoil: Callable[[Any], None] = lambda model: None
    wrap: Callable[..., Inputs] = lambda *inputs: inputs
    outputs: Callable[..., Any] = lambda outputs, past: outputs


class Faulty(Wrapper):
    """A decoder with a fault."""

    def __init__(self, model: Any, fault: Fault) -> None:
        super().__init__(model)
        fault.spoil(model)
        self.fault = fault

    def forward(self, input_ids, attention_mask, position_ids, *past):  # type: ignore[no-untyped-def]
        ids, mask, positions, caches = self.fault.wrap(
            input_ids, attention_mask, position_ids, past
        )
        return self.fault.outputs(super().forward(ids, mask, positions, *caches), caches)


def _windows(by: int) -> Callable[[Any], None]:
    def spoil(model: Any) -> None:
        model.config.sliding_window += by

    return spoil


def _theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = 500000.0 ** (-torch.arange(0, 8, 2).float() / 8)


def _scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 8**-1.0


def _slots(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    """Positions are slots: padding counts."""
    counted = torch.arange(mask.shape[1])[mask.shape[1] - ids.shape[1] :].expand(ids.shape)
    return ids, mask, counted + 0 * positions, past


def _moved(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    """Positions are one too large."""
    return ids, mask, positions + 1, past


def _late(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    """New tokens are one position late behind a cache."""
    return ids, mask, positions + torch.clamp(torch.tensor(past[0].shape[2]), max=1), past


def _shifted(outputs, past):  # type: ignore[no-untyped-def]
    """Values are written one slot too far."""
    moved = [
        torch.roll(cache, 1, dims=2) if i % 2 else cache for i, cache in enumerate(outputs[1:])
    ]
    return (outputs[0], *moved)


def _short_mask(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    """The mask of a padded row lacks its last column, and begins with a column too many."""
    return ids, torch.cat((mask[:, 1:], mask[:, -1:]), dim=1), positions, past


def _scaled_by_padding(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    """Slots of padding are counted as tokens, and seen."""
    return ids, torch.ones_like(mask), positions, past


def _first_row(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    return ids[:1].expand(ids.shape), mask, positions, past


def _capped(ids, mask, positions, past):  # type: ignore[no-untyped-def]
    """A cache of 12 tokens: later ones are not seen by further calls."""
    kept = (torch.arange(past[0].shape[2]) < 12).to(mask.dtype)
    of_cache = mask[:, : past[0].shape[2]] * kept
    return ids, torch.cat((of_cache, mask[:, past[0].shape[2] :]), dim=1), positions, past


def _unlimited(model: Any) -> None:
    model.config.sliding_window = 4096


FAULTS: Dict[str, Fault] = {
    "window ignored": Fault("mistral", ("window ignored",), _unlimited),
    "window one too large": Fault("mistral", ("window off by one",), _windows(1)),
    "positions of padded rows are slots": Fault("gpt2", ("positions ignored",), wrap=_slots),
    "rotary positions are slots": Fault("llama", ("positions ignored",), wrap=_slots),
    "positions one too large": Fault("gpt2", ("positions shifted",), wrap=_moved),
    "cache shifted": Fault("llama", ("cache",), outputs=_shifted),
    "new tokens one position late": Fault("llama", ("cache",), wrap=_late),
    "theta": Fault("llama", ("theta",), _theta),
    "scale": Fault("llama", ("scale",), _scale),
    "mask one short": Fault("llama", ("mask",), wrap=_short_mask),
    "ALiBi counts padding": Fault("bloom", ("padding",), wrap=_scaled_by_padding),
    "second row copied": Fault("llama", ("copied row",), wrap=_first_row),
    "cache capped": Fault("llama", ("capacity",), wrap=_capped),
}
