"""Experts, of which each token has some with a weight above 0."""

from typing import Any

import torch
from torch import Tensor, library

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


def weighted_experts(
    x: Tensor,
    weights: Tensor,
    gates: Tensor,
    ups: Tensor,
    downs: Tensor,
    chosen: int,
    gates_bias: Tensor | None,
    ups_bias: Tensor | None,
    downs_bias: Tensor | None,
    alpha: float,
    beta: float,
    limit: float,
) -> Tensor:
    """Sum over experts n of weights_n downs_n(g sigmoid(alpha g) (u + beta)), g = gates_n x at most
    limit, u = ups_n x within -limit .. limit, of which at most `chosen` have another weight than 0
    for a token.

    x and result [B,S,E], or [S,E]; weights [B,S,N] or [S,N]; gates and ups [N,E,H], downs [N,H,E],
    biases [N,H] and [N,E].
    """
    if not torch.jit.is_scripting() and emitting():
        rows = x if x.dim() == 3 else x.unsqueeze(0)
        of_rows = weights if x.dim() == 3 else weights.unsqueeze(0)
        matrices = (gates, gates_bias, ups, ups_bias, downs, downs_bias)
        numbers = (chosen, alpha, beta, limit)
        y = graph.Experts.emit(rows, rows.shape, rows, of_rows, *matrices, *numbers)
        return y if x.dim() == 3 else y.squeeze(0)
    inputs = x.unsqueeze(-3)  # [B,1,S,E]
    g, u = linear_of_all(inputs, gates, gates_bias), linear_of_all(inputs, ups, ups_bias)
    g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    y = linear_of_all(g * torch.sigmoid(alpha * g) * (u + beta), downs, downs_bias)
    return (y * weights.transpose(-1, -2).unsqueeze(-1)).sum(-3)


def linear_of_all(x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    """Apply weights [N,n,m] and biases [N,m] of all experts to x [B,1 or N,S,n]: [B,N,S,m]."""
    y = x @ weights
    return y if bias is None else y + bias.unsqueeze(1)


LIBRARY = "posenc_experts"
library.define(
    f"{LIBRARY}::run",
    "(Tensor x, Tensor weights, Tensor gates, Tensor ups, Tensor downs, int chosen,"
    " Tensor? gates_bias, Tensor? ups_bias, Tensor? downs_bias, float alpha, float beta,"
    " float limit) -> Tensor",
)
# weighted_experts of x [S,E], as one operator of a trace.
RUN = torch.ops.posenc_experts.run.default


def _run(
    x: Tensor,
    weights: Tensor,
    gates: Tensor,
    ups: Tensor,
    downs: Tensor,
    chosen: int,
    *further: Any,
) -> Tensor:
    y, biases, unit = torch.zeros_like(x), further[:3], further[3:]
    for expert in range(gates.shape[0]):
        rows, own = weights[:, expert].nonzero()[:, 0], slice(expert, expert + 1)
        of_expert = [None if bias is None else bias[own] for bias in biases]
        given: Any = (x[rows], weights[rows, own], gates[own], ups[own], downs[own], chosen)
        y[rows] += weighted_experts(*given, *of_expert, *unit)
    return y


library.impl(f"{LIBRARY}::run", "CompositeExplicitAutograd", _run)


@library.register_fake(f"{LIBRARY}::run")
def _(x: Tensor, *more: object) -> Tensor:
    return torch.empty_like(x)
