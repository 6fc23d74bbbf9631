"""Experts in place of one perceptron: a router gives each token to a few of many (Shazeer et al. 2017, Outrageously Large Neural Networks)."""

from typing import Any, Mapping, Optional

import numpy as np
import torch
from torch import Tensor

from posenc_export import registry
from posenc_export.models.parts import exact
from posenc_export.models.parts.activations import activation as activation_of
from posenc_export.models.parts.mlps import Gated


class OfAll(torch.nn.Module):
    """The share of an expert in the softmax over all of them (Qwen 3 without norm_topk_prob)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """logits [B,S,N], those of the chosen experts [B,S,k], which they are [B,S,k] to [B,S,k]."""
        return torch.softmax(logits, -1).gather(-1, chosen)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """logits [N] of a token, chosen [k], float64."""
        return np.array([1 / np.exp(logits - logits[one]).sum() for one in chosen])


class OfChosen(torch.nn.Module):
    """The share of an expert in the softmax over those chosen (Mixtral, gpt-oss)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """As OfAll.forward."""
        return torch.softmax(top, -1)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """As OfAll.exact."""
        return np.array([1 / np.exp(logits[chosen] - logits[one]).sum() for one in chosen])


class Sigmoid(torch.nn.Module):
    """The sigmoid of each logit by itself (Llama 4)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """As OfAll.forward."""
        return torch.sigmoid(top)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """As OfAll.exact."""
        return (1 + np.tanh(logits[chosen] / 2)) / 2


class GatedUnit(torch.nn.Module):
    """act(gate) up (Shazeer 2020, GLU Variants Improve Transformer).

    Args:
        activation: name in parts/activations.py.
    """

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation_of(activation)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two of one shape to the same."""
        return self.activation(gate) * up

    def exact(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """float64."""
        return up * self.activation.exact(gate)  # type: ignore[operator]


class ClampedUnit(torch.nn.Module):
    """g sigmoid(alpha g) (u + 1) with g = min(gate, limit), u = up within -limit .. limit (OpenAI 2025, gpt-oss).

    Args:
        alpha: slope of the sigmoid.
        limit: of both.

    Raises:
        ValueError: a limit that is not above 0.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        if not limit > 0:
            raise ValueError(f"unit clamped: limit is above 0, got {limit}")
        self.alpha, self.limit = float(alpha), float(limit)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two of one shape to the same."""
        g = gate.clamp(max=self.limit)
        return g * torch.sigmoid(self.alpha * g) * (up.clamp(-self.limit, self.limit) + 1)

    def exact(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """float64."""
        g = np.where(gate > self.limit, self.limit, gate)
        return (1 + np.where(abs(up) > self.limit, np.sign(up) * self.limit, up)) * g * (1 + np.tanh(self.alpha * g / 2)) / 2


WEIGHTS = {"all": OfAll, "chosen": OfChosen, "sigmoid": Sigmoid}
UNITS = {"gated": GatedUnit, "clamped": ClampedUnit}
ON = ("output", "input")


class Experts(torch.nn.Module):
    """sum over the k experts e with the highest router logits of weight_e down_e(unit(gate_e x, up_e x)), and a shared perceptron of x where there is one.

    Every expert is computed for every token and those not chosen are weighted by 0: one product of all experts, which every target has, at the cost of
    all of them.

    Args:
        width: model width E.
        experts: how many there are, N.
        chosen: how many act on a token, k.
        hidden: inner width of each.
        weights: "all", "chosen" or "sigmoid": what logits of chosen experts become.
        on: what the weight multiplies, the "output" of an expert or its "input".
        unit: {"name": "gated" or "clamped", ...}: of gate and up; gated with silu where None.
        bias: biases on router and experts.
        shared: inner width of a gated perceptron that acts on every token; 0 for none. It has the activation of the unit.

    Raises:
        ValueError: more chosen than there are, sizes below 1, an unknown name.
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
            raise ValueError(f"mlp experts: chosen is 1 .. experts, hidden at least 1, shared at least 0, got {chosen} of {experts}, {hidden} and {shared}")
        if weights not in WEIGHTS or on not in ON:
            raise ValueError(f"mlp experts: weights is one of {', '.join(WEIGHTS)}, on one of {', '.join(ON)}, got {weights!r} and {on!r}")
        unit = unit or {"name": "gated"}
        self.chosen, self.on_input = chosen, on == "input"
        self.router = torch.nn.Linear(width, experts, bias=bias)
        self.weigh, self.unit = WEIGHTS[weights](), registry.build("unit", UNITS, unit)
        for name, inputs, outputs in (("gates", width, hidden), ("ups", width, hidden), ("downs", hidden, width)):
            bound = inputs**-0.5  # as torch.nn.Linear
            self.register_parameter(name, torch.nn.Parameter(torch.empty(experts, inputs, outputs).uniform_(-bound, bound)))
            self.register_parameter(name + "_bias", torch.nn.Parameter(torch.zeros(experts, outputs)) if bias else None)
        self.shared = Gated(width, shared, unit.get("activation", "silu")) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """x [B,S,E] to [B,S,E]."""
        logits = self.router(x)
        top, chosen = torch.topk(logits, self.chosen, dim=-1)
        shares = torch.zeros_like(logits).scatter(-1, chosen, self.weigh(logits, top, chosen)).transpose(1, 2).unsqueeze(3)
        read = x.unsqueeze(1)
        if self.on_input:
            read = read * shares
        hidden = self.unit(_linear(read, self.gates, self.gates_bias), _linear(read, self.ups, self.ups_bias))
        given = _linear(hidden, self.downs, self.downs_bias)
        y = given.sum(1) if self.on_input else (given * shares).sum(1)
        return y if self.shared is None else y + self.shared(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """x [n,E], float64, one token and one expert at a time."""
        logits, y = exact.linear(self.router, x), np.zeros_like(x)
        for token, row in enumerate(x):
            chosen = np.argsort(-logits[token], kind="stable")[: self.chosen]
            for expert, weight in zip(chosen, self.weigh.exact(logits[token], chosen), strict=True):  # type: ignore[operator]
                y[token] += self._exact_expert(int(expert), row * weight) if self.on_input else weight * self._exact_expert(int(expert), row)
        return y if self.shared is None else y + self.shared.exact(x)

    def _exact_expert(self, expert: int, row: np.ndarray) -> np.ndarray:
        """One expert of one token, [E] to [E]."""

        def through(name: str, values: np.ndarray) -> np.ndarray:
            bias: Optional[Tensor] = getattr(self, name + "_bias")
            return values @ exact.numbers(getattr(self, name)[expert]) + (0.0 if bias is None else exact.numbers(bias[expert]))

        return through("downs", self.unit.exact(through("gates", row), through("ups", row)))


def _linear(x: Tensor, weights: Tensor, bias: Optional[Tensor]) -> Tensor:
    """x [B,1 or N,S,n] through all experts, weights [N,n,m] and bias [N,m], to [B,N,S,m]."""
    y = x @ weights
    return y if bias is None else y + bias.unsqueeze(1)
