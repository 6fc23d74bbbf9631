"""Mixture of experts: a router selects a few experts for each token (Shazeer et al. 2017)."""

import math
from typing import Any, Mapping, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.models.parts import float64
from posenc_export.models.parts.activations import activation as activation_of
from posenc_export.models.parts.mlps import Gated
from posenc_export.ops.experts import linear_of_all
from posenc_export.ops.graph import emitting
from posenc_export.shared import registry
from posenc_export.shared.refusal import refusal


class GatedUnit(torch.nn.Module):
    """act(gate) up (Shazeer 2020, GLU Variants Improve Transformer).

    Attributes:
        swiglu: alpha, beta and limit if the unit is g sigmoid(alpha g) (u + beta) with g and u
            bounded as in ClampedUnit, otherwise None.
    """

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation_of(activation)
        silu = {"alpha": 1.0, "beta": 0.0, "limit": math.inf}
        self.swiglu = silu if activation == "silu" else None

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up of one shape to that shape."""
        return self.activation(gate) * up

    def exact(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """float64."""
        return up * self.activation.exact(gate)  # type: ignore[operator]


class ClampedUnit(torch.nn.Module):
    """g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up within -limit .. limit (gpt-oss)."""

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        if not limit > 0:
            raise refusal("unit clamped", "limit to be above 0", limit)
        self.alpha, self.limit = float(alpha), float(limit)
        self.swiglu = {"alpha": self.alpha, "beta": 1.0, "limit": self.limit}

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up of one shape to that shape."""
        g = gate.clamp(max=self.limit)
        return g * torch.sigmoid(self.alpha * g) * (up.clamp(-self.limit, self.limit) + 1)

    def exact(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """float64."""
        g = np.where(gate > self.limit, self.limit, gate)
        u = np.where(abs(up) > self.limit, np.sign(up) * self.limit, up)
        return (1 + u) * g * (1 + np.tanh(self.alpha * g / 2)) / 2


class SoftmaxOverChosen(torch.nn.Module):
    """Softmax over the logits of the chosen experts (Mixtral, gpt-oss)."""

    def forward(self, top: Tensor) -> Tensor:
        """Logits of the chosen experts [B,S,k] to weights [B,S,k]."""
        return torch.softmax(top, -1)

    def exact(self, top: np.ndarray) -> np.ndarray:
        """Logits [k] to weights [k], float64."""
        return np.array([1 / np.exp(top - logit).sum() for logit in top])


class Sigmoid(torch.nn.Module):
    """Sigmoid of each logit (Llama 4)."""

    def forward(self, top: Tensor) -> Tensor:
        return torch.sigmoid(top)

    def exact(self, top: np.ndarray) -> np.ndarray:
        return (1 + np.tanh(top / 2)) / 2


WEIGHTS = {"chosen": SoftmaxOverChosen, "sigmoid": Sigmoid}
UNITS = {"gated": GatedUnit, "clamped": ClampedUnit}
ON = ("output", "input")


class Experts(torch.nn.Module):
    """factor times the sum over k chosen experts e of weight_e down_e(unit(gate_e x, up_e x)), plus
    a shared expert if there is one.

    All experts are computed for all tokens, and those not chosen get weight 0. This needs only
    batched matrix products, which every target supports, but costs as much as all experts together.
    If the unit has the form of `swiglu`, a semantic node is emitted, and target ort computes only
    the chosen experts.

    Args:
        width, hidden: model width E, and hidden width of each expert.
        experts, chosen: number of experts N, and of those for each token k.
        weights: how weights follow from the logits of the chosen experts: "chosen" or "sigmoid".
        on: whether the weight multiplies the "output" or the "input" of an expert.
        unit: {"name": "gated" or "clamped", ...}, the function of gate and up; None for "gated"
            with silu.
        bias: whether router and experts have biases.
        shared: hidden width of a gated MLP that is added for every token, with the activation of
            the unit; 0 for none.
    """

    gates: Tensor
    ups: Tensor
    downs: Tensor
    gates_bias: Optional[Tensor]
    ups_bias: Optional[Tensor]
    downs_bias: Optional[Tensor]

    def __init__(
        self,
        width: int,
        experts: int,
        chosen: int,
        hidden: int,
        weights: str = "chosen",
        on: str = "output",
        unit: Optional[Mapping[str, Any]] = None,
        bias: bool = False,
        shared: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= chosen <= experts or hidden < 1 or shared < 0:
            rule = "chosen to be 1 .. experts, hidden at least 1 and shared at least 0"
            raise refusal("mlp experts", rule, f"{chosen} of {experts}, {hidden} and {shared}")
        if weights not in WEIGHTS or on not in ON:
            rule = f"weights to be one of {', '.join(WEIGHTS)}, on one of {', '.join(ON)}"
            raise refusal("mlp experts", rule, f"{weights!r} and {on!r}")
        unit = unit or {"name": "gated"}
        self.chosen, self.on_input = chosen, on == "input"
        self.router = torch.nn.Linear(width, experts, bias=bias)
        self.weigh, self.unit = WEIGHTS[weights](), registry.build("unit", UNITS, unit)
        self._add("gates", (experts, width, hidden), bias)
        self._add("ups", (experts, width, hidden), bias)
        self._add("downs", (experts, hidden, width), bias)
        self.shared = Gated(width, shared, unit.get("activation", "silu")) if shared else None
        on_output = not self.on_input or chosen == 1 and not bias
        self.sparse = self.unit.swiglu is not None and on_output

    def _add(self, name: str, shape: Tuple[int, int, int], bias: bool) -> None:
        """Add weights [experts,inputs,outputs], and biases [experts,outputs] or None."""
        bound = shape[1] ** -0.5  # as torch.nn.Linear
        weights = torch.nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
        biases = torch.nn.Parameter(torch.zeros(shape[0], shape[2])) if bias else None
        self.register_parameter(name, weights)
        self.register_parameter(f"{name}_bias", biases)

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to [B,S,E]."""
        y = self.weighted_sum(x, self.route(x))
        return y if self.shared is None else y + self.shared(x)

    def route(self, x: Tensor) -> Tensor:
        """x [B,S,E] to weights [B,S,N], which are 0 for experts that are not chosen."""
        logits = self.router(x)
        top, chosen = torch.topk(logits, self.chosen, dim=-1)
        return torch.zeros_like(logits).scatter(-1, chosen, self.weigh(top))

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum over experts for x [B,S,E], weights [B,S,N], 0 if not chosen, to [B,S,E]."""
        if not torch.jit.is_scripting():
            if emitting() and self.sparse:
                return self._emitted(x, weights)
        by_expert = weights.transpose(1, 2).unsqueeze(3)  # [B,N,S,1]
        inputs = x.unsqueeze(1)  # [B,1,S,E]
        if self.on_input:
            inputs = inputs * by_expert
        gates = linear_of_all(inputs, self.gates, self.gates_bias)
        hidden = self.unit(gates, linear_of_all(inputs, self.ups, self.ups_bias))
        outputs = linear_of_all(hidden, self.downs, self.downs_bias)  # [B,N,S,E]
        # Weights on the input do not multiply biases, which experts that were not chosen also have.
        if self.on_input:
            by_expert = by_expert.ne(0).to(outputs.dtype)
        return (outputs * by_expert).sum(1)  # [B,S,E]

    @torch.jit.unused
    def _emitted(self, x: Tensor, weights: Tensor) -> Tensor:
        """Emit the node Experts, whose weights multiply outputs; on_input multiplies x before."""
        if self.on_input:
            x, weights = x * weights.sum(-1, keepdim=True), (weights > 0).to(x.dtype)
        matrices = (self.gates, self.ups, self.downs)
        biases = (self.gates_bias, self.ups_bias, self.downs_bias)
        unit: Any = self.unit.swiglu
        return ops.weighted_experts(x, weights, *matrices, self.chosen, *biases, **unit)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute x [n,E] to [n,E], float64, one token and one expert at a time."""
        logits, y = float64.linear(self.router, x), np.zeros_like(x)
        for token, row in enumerate(x):
            chosen = np.argsort(-logits[token], kind="stable")[: self.chosen]
            weights = self.weigh.exact(logits[token][chosen])  # type: ignore[operator]
            for expert, weight in zip(chosen, weights, strict=True):
                before, after = (weight, 1.0) if self.on_input else (1.0, weight)
                y[token] += after * self._exact_expert(int(expert), row * before)
        return y if self.shared is None else y + self.shared.exact(x)

    def _exact_expert(self, expert: int, row: np.ndarray) -> np.ndarray:

        def through(name: str, values: np.ndarray) -> np.ndarray:
            bias: Optional[Tensor] = getattr(self, name + "_bias")
            product = values @ float64.numbers(getattr(self, name)[expert])
            return product if bias is None else product + float64.numbers(bias[expert])

        return through("downs", self.unit.exact(through("gates", row), through("ups", row)))


class ChosenInFloat32(Experts):
    """Experts in half precision with a float32 router, so that near logits do not become equal."""

    def route(self, x: Tensor) -> Tensor:
        """x [B,S,E] to weights [B,S,N] in the dtype of x."""
        return super().route(x.float()).to(x.dtype)

    @staticmethod
    def of(part: Experts, router: torch.nn.Linear) -> None:
        """Change experts in half precision. router: in float32."""
        part.router, part.__class__ = router, ChosenInFloat32
