"""Angles of any size, reduced to one turn."""

import math

import torch
from torch import Tensor


def reduced_angle(radians: Tensor) -> Tensor:
    """Reduce float64 angles of any size to one turn, float32. Reducing in float32 would lose the
    digits of large angles.
    """
    # 1 / (2 pi) is given in two parts, which are float32 numbers: the exporter of torch 2.13 rounds
    # scalars of float64 expressions to float32.
    turns = radians * 0.15915493667125702 + radians * 6.4206384e-09
    return ((turns - turns.floor()) * (2 * math.pi)).to(torch.float32)
