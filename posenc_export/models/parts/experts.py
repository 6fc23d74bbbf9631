"""Mixture of experts: a router selects a few experts for each token (Shazeer et al. 2017, Outrageously Large Neural Networks)."""

from typing import Any, Mapping, Optional, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import registry
from posenc_export.models.parts import exact
from posenc_export.models.parts.activations import activation as activation_of
from posenc_export.models.parts.mlps import Gated


class SoftmaxOverAll(torch.nn.Module):
    """Expert weights from the softmax over the logits of all experts (Qwen 3 without norm_topk_prob)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """logits [B,S,N], logits of the chosen experts top [B,S,k], their indices chosen [B,S,k] to weights [B,S,k]."""
        return torch.softmax(logits, -1).gather(-1, chosen)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """logits [N] of a token, chosen [k] to weights [k], float64."""
        return np.array([1 / np.exp(logits - logits[one]).sum() for one in chosen])


class SoftmaxOverChosen(torch.nn.Module):
    """Expert weights from the softmax over the logits of the chosen experts (Mixtral, gpt-oss)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """As SoftmaxOverAll.forward."""
        return torch.softmax(top, -1)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """As SoftmaxOverAll.exact."""
        return np.array([1 / np.exp(logits[chosen] - logits[one]).sum() for one in chosen])


class Sigmoid(torch.nn.Module):
    """Expert weights from the sigmoid of each logit (Llama 4)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """As SoftmaxOverAll.forward."""
        return torch.sigmoid(top)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """As SoftmaxOverAll.exact."""
        return (1 + np.tanh(logits[chosen] / 2)) / 2


class SigmoidOfChosen(torch.nn.Module):
    """Expert weights from the sigmoid of each logit, divided by the sum over the chosen experts (DeepSeek-V3 with norm_topk_prob)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """As SoftmaxOverAll.forward."""
        found = torch.sigmoid(top)
        return found / (found.sum(-1, keepdim=True) + 1e-20)  # as DeepSeek-V3

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """As SoftmaxOverAll.exact."""
        found = [(1 + np.tanh(logits[one] / 2)) / 2 for one in chosen]
        return np.array([one / sum(found) for one in found])


class Highest(torch.nn.Module):
    """The experts with the highest logits.

    Args:
        experts, chosen: number of experts N and of chosen experts k.
    """

    def __init__(self, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen

    def forward(self, logits: Tensor) -> Tuple[Tensor, Tensor]:
        """logits [B,S,N] to logits [B,S,k] and indices [B,S,k] of the chosen experts."""
        top, chosen = torch.topk(logits, self.chosen, dim=-1)
        return top, chosen

    def exact(self, logits: np.ndarray) -> np.ndarray:
        """logits [N] of a token, float64, to indices [k] of the chosen experts."""
        return np.argsort(-logits, kind="stable")[: self.chosen]


class HighestInGroups(torch.nn.Module):
    """The experts e with the highest score_e = sigmoid(logit_e) + correction_e in the best groups (DeepSeek-AI 2024, DeepSeek-V3, 2.1.2).

    A group's rank is the sum of its two highest scores. `correction` balances the load and does not affect the weights of experts.

    Args:
        experts, chosen: number of experts N and of chosen experts k.
        groups: number of groups of consecutive experts, all of the same size.
        kept: number of groups from which experts are chosen.

    Raises:
        ValueError: groups of different sizes or with a single expert, fewer experts in the kept groups than are chosen.
    """

    def __init__(self, experts: int, chosen: int, groups: int, kept: int) -> None:
        super().__init__()
        if groups < 1 or experts % groups or experts // groups < 2:
            raise ValueError(f"choice groups: expected groups to divide the experts, with at least 2 in each, got {groups} groups of {experts} experts")
        if not 1 <= kept <= groups or kept * (experts // groups) < chosen:
            rule = f"choice groups: expected kept to be 1 .. {groups} groups with at least {chosen} experts together"
            raise ValueError(f"{rule}, got {kept} groups of {experts // groups} each")
        self.chosen, self.groups, self.kept = chosen, groups, kept
        self.correction = torch.nn.Parameter(torch.zeros(experts))

    def forward(self, logits: Tensor) -> Tuple[Tensor, Tensor]:
        """As Highest.forward."""
        scores = torch.sigmoid(logits) + self.correction
        grouped = scores.unflatten(-1, [self.groups, -1])
        best = torch.topk(grouped, 2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(best).scatter(-1, torch.topk(best, self.kept, dim=-1)[1], 1.0).unsqueeze(-1)
        chosen = torch.topk(torch.where(kept > 0, grouped, float("-inf")).flatten(-2), self.chosen, dim=-1)[1]
        return logits.gather(-1, chosen), chosen

    def exact(self, logits: np.ndarray) -> np.ndarray:
        """As Highest.exact."""
        scores = (1 + np.tanh(logits / 2)) / 2 + exact.numbers(self.correction)
        members = np.split(np.arange(len(scores)), self.groups)
        ranked = sorted(members, key=lambda group: -sum(sorted(scores[group])[-2:]))
        allowed = [int(one) for group in ranked[: self.kept] for one in group]
        return np.array(sorted(allowed, key=lambda one: -scores[one])[: self.chosen])


class GatedUnit(torch.nn.Module):
    """act(gate) up (Shazeer 2020, GLU Variants Improve Transformer).

    Args:
        activation: key of ACTIVATIONS in parts/activations.py.
    """

    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation_of(activation)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up of one shape to that shape."""
        return self.activation(gate) * up

    def exact(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """float64."""
        return up * self.activation.exact(gate)  # type: ignore[operator]


class ClampedUnit(torch.nn.Module):
    """g sigmoid(alpha g) (u + 1) with g = min(gate, limit) and u = up clamped to -limit .. limit (OpenAI 2025, gpt-oss).

    Args:
        alpha: slope of the sigmoid.
        limit: bound of gate and up.

    Raises:
        ValueError: a limit that is not above 0.
    """

    def __init__(self, alpha: float = 1.702, limit: float = 7.0) -> None:
        super().__init__()
        if not limit > 0:
            raise ValueError(f"unit clamped: expected limit to be above 0, got {limit}")
        self.alpha, self.limit = float(alpha), float(limit)

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate and up of one shape to that shape."""
        g = gate.clamp(max=self.limit)
        return g * torch.sigmoid(self.alpha * g) * (up.clamp(-self.limit, self.limit) + 1)

    def exact(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """float64."""
        g = np.where(gate > self.limit, self.limit, gate)
        return (1 + np.where(abs(up) > self.limit, np.sign(up) * self.limit, up)) * g * (1 + np.tanh(self.alpha * g / 2)) / 2


WEIGHTS = {"all": SoftmaxOverAll, "chosen": SoftmaxOverChosen, "sigmoid": Sigmoid, "sigmoid_of_chosen": SigmoidOfChosen}
CHOICES = {"highest": Highest, "groups": HighestInGroups}
UNITS = {"gated": GatedUnit, "clamped": ClampedUnit}
ON = ("output", "input")


class Experts(torch.nn.Module):
    """factor times the sum over k chosen experts e of weight_e down_e(unit(gate_e x, up_e x)), plus a shared expert if there is one.

    All experts are computed for all tokens, and those not chosen get weight 0. This needs only batched matrix products, which every target supports, but
    costs as much as all experts together.

    Args:
        width: model width E.
        experts: number of experts N.
        chosen: number of experts for each token k.
        hidden: hidden width of each expert.
        weights: how weights follow from router logits: "all", "chosen", "sigmoid" or "sigmoid_of_chosen".
        on: whether the weight multiplies the "output" or the "input" of an expert.
        unit: {"name": "gated" or "clamped", ...}, the function of gate and up; None for "gated" with silu.
        bias: whether router and experts have biases.
        shared: hidden width of a gated MLP that is added for every token, with the activation of the unit; 0 for none.
        choice: {"name": "highest" or "groups", ...}, the rule that chooses experts; None for the highest logits.
        factor: factor on weights.

    Raises:
        ValueError: more chosen experts than experts, sizes below 1, a factor that is not above 0, an unknown name.
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
        choice: Optional[Mapping[str, Any]] = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        if not 1 <= chosen <= experts or hidden < 1 or shared < 0:
            rule = "mlp experts: expected chosen to be 1 .. experts, hidden at least 1 and shared at least 0"
            raise ValueError(f"{rule}, got {chosen} of {experts}, {hidden} and {shared}")
        if weights not in WEIGHTS or on not in ON:
            raise ValueError(f"mlp experts: expected weights to be one of {', '.join(WEIGHTS)}, on one of {', '.join(ON)}, got {weights!r} and {on!r}")
        if not 0 < factor < float("inf"):
            raise ValueError(f"mlp experts: expected factor to be a finite number above 0, got {factor}")
        unit = unit or {"name": "gated"}
        self.factor, self.on_input = float(factor), on == "input"
        self.choose = registry.build("choice", CHOICES, choice or {"name": "highest"}, experts, chosen)
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
        top, chosen = self.choose(logits)
        weights = self.weigh(logits, top, chosen)
        if self.factor != 1.0:
            weights = weights * self.factor
        shares = torch.zeros_like(logits).scatter(-1, chosen, weights).transpose(1, 2).unsqueeze(3)
        read = x.unsqueeze(1)
        if self.on_input:
            read = read * shares
        hidden = self.unit(_linear(read, self.gates, self.gates_bias), _linear(read, self.ups, self.ups_bias))
        given = _linear(hidden, self.downs, self.downs_bias)
        y = given.sum(1) if self.on_input else (given * shares).sum(1)
        return y if self.shared is None else y + self.shared(x)

    def exact(self, x: np.ndarray) -> np.ndarray:
        """Compute x [n,E] to [n,E], float64, one token and one expert at a time."""
        logits, y = exact.linear(self.router, x), np.zeros_like(x)
        for token, row in enumerate(x):
            chosen = self.choose.exact(logits[token])
            for expert, weight in zip(chosen, self.factor * self.weigh.exact(logits[token], chosen), strict=True):  # type: ignore[operator]
                y[token] += self._exact_expert(int(expert), row * weight) if self.on_input else weight * self._exact_expert(int(expert), row)
        return y if self.shared is None else y + self.shared.exact(x)

    def _exact_expert(self, expert: int, row: np.ndarray) -> np.ndarray:
        """Apply one expert to one token [E], to [E]."""

        def through(name: str, values: np.ndarray) -> np.ndarray:
            bias: Optional[Tensor] = getattr(self, name + "_bias")
            return values @ exact.numbers(getattr(self, name)[expert]) + (0.0 if bias is None else exact.numbers(bias[expert]))

        return through("downs", self.unit.exact(through("gates", row), through("ups", row)))


def _linear(x: Tensor, weights: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Apply the linear layers of all experts, weights [N,n,m] and bias [N,m], to x [B,1 or N,S,n], to [B,N,S,m]."""
    y = x @ weights
    return y if bias is None else y + bias.unsqueeze(1)
