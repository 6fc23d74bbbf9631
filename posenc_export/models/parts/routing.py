"""Routers of mixtures of experts: chosen experts and their weights (Shazeer et al. 2017)."""

from typing import Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export.models.parts import float64
from posenc_export.shared.refusal import refusal


class SoftmaxOverAll(torch.nn.Module):
    """Softmax over the logits of all experts (Qwen 3 without norm_topk_prob)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        """logits [B,S,N], those of the chosen top [B,S,k], chosen [B,S,k] to weights [B,S,k]."""
        return torch.softmax(logits, -1).gather(-1, chosen)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """logits [N] of a token, chosen [k] to weights [k], float64."""
        return np.array([1 / np.exp(logits - logits[expert]).sum() for expert in chosen])


class SoftmaxOverChosen(torch.nn.Module):
    """Softmax over the logits of the chosen experts (Mixtral, gpt-oss)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        return torch.softmax(top, -1)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return np.array([1 / np.exp(logits[chosen] - logits[expert]).sum() for expert in chosen])


class Sigmoid(torch.nn.Module):
    """Sigmoid of each logit (Llama 4)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        return torch.sigmoid(top)

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        return (1 + np.tanh(logits[chosen] / 2)) / 2


class SigmoidOfChosen(torch.nn.Module):
    """Sigmoids divided by their sum over the chosen experts (DeepSeek-V3 with norm_topk_prob)."""

    def forward(self, logits: Tensor, top: Tensor, chosen: Tensor) -> Tensor:
        weights = torch.sigmoid(top)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20)  # as DeepSeek-V3

    def exact(self, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        weights = [(1 + np.tanh(logits[expert] / 2)) / 2 for expert in chosen]
        return np.array([weight / sum(weights) for weight in weights])


class TopExperts(torch.nn.Module):
    """The k of N experts with the highest logits."""

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


class TopExpertsOfBestGroups(torch.nn.Module):
    """The k experts e with the highest score_e = sigmoid(logit_e) + correction_e in the best groups
    (DeepSeek-AI 2024, DeepSeek-V3, 2.1.2).

    A group's rank is the sum of its two highest scores. `correction` balances the load and does not
    affect the weights of experts.

    Args:
        experts, chosen: N and k.
        groups: number of groups of consecutive experts, all of the same size.
        kept: number of groups from which experts are chosen.

    Raises:
        ValueError: groups of different sizes or with a single expert, fewer experts in the kept
            groups than are chosen.
    """

    def __init__(self, experts: int, chosen: int, groups: int, kept: int) -> None:
        super().__init__()
        if groups < 1 or experts % groups or experts // groups < 2:
            rule = "groups to divide the experts, with at least 2 in each"
            raise refusal("choice groups", rule, f"{groups} groups of {experts} experts")
        if not 1 <= kept <= groups or kept * (experts // groups) < chosen:
            rule = f"kept to be 1 .. {groups} groups with at least {chosen} experts together"
            raise refusal("choice groups", rule, f"{kept} groups of {experts // groups} each")
        self.chosen, self.groups, self.kept = chosen, groups, kept
        self.correction = torch.nn.Parameter(torch.zeros(experts))

    def forward(self, logits: Tensor) -> Tuple[Tensor, Tensor]:
        scores = torch.sigmoid(logits) + self.correction
        grouped = scores.unflatten(-1, [self.groups, -1])  # [B,S,groups,N/groups]
        best = torch.topk(grouped, 2, dim=-1)[0].sum(-1)  # [B,S,groups]
        in_best = torch.zeros_like(best)
        in_best = in_best.scatter(-1, torch.topk(best, self.kept, dim=-1)[1], 1.0).unsqueeze(-1)
        allowed = torch.where(in_best > 0, grouped, float("-inf")).flatten(-2)  # [B,S,N]
        chosen = torch.topk(allowed, self.chosen, dim=-1)[1]
        return logits.gather(-1, chosen), chosen

    def exact(self, logits: np.ndarray) -> np.ndarray:
        scores = (1 + np.tanh(logits / 2)) / 2 + float64.numbers(self.correction)
        members = np.split(np.arange(len(scores)), self.groups)
        ranked = sorted(members, key=lambda group: -sum(sorted(scores[group])[-2:]))
        allowed = [int(expert) for group in ranked[: self.kept] for expert in group]
        return np.array(sorted(allowed, key=lambda expert: -scores[expert])[: self.chosen])


WEIGHTS = {
    "all": SoftmaxOverAll,
    "chosen": SoftmaxOverChosen,
    "sigmoid": Sigmoid,
    "sigmoid_of_chosen": SigmoidOfChosen,
}
CHOICES = {"highest": TopExperts, "groups": TopExpertsOfBestGroups}
