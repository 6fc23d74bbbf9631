"""Layers of transformers in whose place ours compute the same numbers."""

import math
from typing import Any, NamedTuple, Sequence

import torch
from torch import Tensor

from posenc_export.ops import experts


class Unit(NamedTuple):
    """Experts' function of gate and up: g sigmoid(alpha g) (u + beta), g at most limit, u within
    -limit .. limit.
    """

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    def of(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up of one shape -> that shape."""
        g, u = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return g * torch.sigmoid(self.alpha * g) * (u + self.beta)


class Chosen(torch.nn.Module):
    """Experts as one operation. of: experts of transformers, whose weights are copied. step: 1 for
    all gates before all ups in their outputs, 2 for gates and ups in turn.
    """

    def __init__(self, of: Any, unit: Unit, step: int) -> None:
        super().__init__()
        self.unit = unit
        for end in ("", "_bias") if of.has_bias else ("",):
            both, down = (getattr(of, f"{name}_proj{end}") for name in ("gate_up", "down"))
            if not of.is_transposed and not end:
                both, down = both.transpose(1, 2), down.transpose(1, 2)
            parts = dict(zip(("gates", "ups"), halves(both, step), strict=True))
            for name, part in {**parts, "downs": down}.items():
                weight = part.detach().clone(memory_format=torch.contiguous_format)
                self.register_parameter(name + end, torch.nn.Parameter(weight, requires_grad=False))
        self.biases = [f"{name}_bias" for name in ("gates", "ups", "downs")]

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [S,E], chosen experts [S,k] int64 and their weights [S,k] -> [S,E]."""
        gates: Any = self.gates
        each = x.new_zeros(x.shape[0], gates.shape[0]).scatter(1, chosen, weights.to(x.dtype))
        biases = (getattr(self, name, None) for name in self.biases)
        k = chosen.shape[1]
        return experts.RUN(x, each, gates, self.ups, self.downs, k, *biases, *self.unit)


def halves(both: Tensor, step: int) -> Sequence[Tensor]:
    """Split the last axis into gates and ups: its halves, or with step 2 every other entry."""
    return both.chunk(2, -1) if step == 1 else (both[..., ::2], both[..., 1::2])


def replace_experts(model: Any) -> None:
    """Replace experts whose unit, tried with numbers, is one of Chosen."""
    for name, part in [*model.named_modules()]:
        if not getattr(part, "has_gate", False) or part.has_post_expert_norm:
            continue
        width = part.down_proj.shape[1 if part.is_transposed else 2]
        both = 8 * torch.randn(64, 2 * width, generator=torch.Generator().manual_seed(0))
        got = part._apply_gate(both)
        clamped = Unit(getattr(part, "alpha", 1.0), 1.0, getattr(part, "limit", math.inf))
        for unit, step in ((Unit(), 1), (clamped, 2)):
            expected = unit.of(*halves(both, step))
            if got.shape == expected.shape and torch.allclose(got, expected):
                model.set_submodule(name, Chosen(part, unit, step))
                break


def replace_transposed(model: Any) -> None:
    """Replace linear layers whose weights are [inputs,outputs] (GPT-2) by those of torch."""
    from transformers.pytorch_utils import Conv1D

    for name, part in [*model.named_modules()]:
        if isinstance(part, Conv1D):
            linear = torch.nn.Linear(part.nx, part.nf, device="meta")
            linear.weight = torch.nn.Parameter(part.weight.t().contiguous(), requires_grad=False)
            linear.bias = part.bias
            model.set_submodule(name, linear)
