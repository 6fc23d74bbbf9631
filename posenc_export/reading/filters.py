"""Causal filters: windows that sum up the last tokens of each channel with constant weights."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from posenc_export.reading.axes import Roles, axis_of, constants, kinds, same, split
from posenc_export.reading.properties import Properties
from posenc_export.reading.steps import Window
from posenc_export.reading.values import inputs_of

# With 4 weights, products of 768 channels take 0.12 of the time of a convolution in ONNX Runtime
# for 1 token and 0.85 for 128, with 8 weights 0.17 and 1.5; the graph grows with them.
MOST = 8
FAR = 1e3  # factor on numbers of the example, at which a bound such as a clamp would show


class Filter(NamedTuple):
    """y_t = b + sum_m w_m x_(t-r+m) of each of C channels, m = 0 .. r.

    Attributes:
        weight: constant whose C(r+1) entries are the w of each channel in turn.
        bias: constant whose C entries are b; None for 0.
    """

    weight: Node
    bias: Node | None


def by_token(roles: Roles) -> list[int]:
    """Return the factors of a value in the order rows, tokens, then constant ones."""
    return [kinds(roles).index("B"), kinds(roles).index("Q"), *constants(roles)]


def filter_of(properties: Properties, end: Node, step: Window) -> Filter | None:
    """Return the filter that gives the numbers of a window, or None for more than MOST weights."""
    values, root, reach, roles = properties.values, step.root, step.reach, step.roles
    inside, counts = values.of[root], values.counts
    if roles != properties.steps[root].roles or not inside.is_floating_point() or reach >= MOST:
        return None

    def columns(x: Tensor) -> Tensor:  # [B,S,C]
        x = split(x, roles, counts).permute(by_token(roles))
        return x.unsqueeze(2) if x.dim() == 2 else x.flatten(2)

    impulse = torch.zeros_like(inside)
    still = columns(properties.run_region(step.region, root, impulse))[0, 0]
    impulse.narrow(axis_of(roles, "Q"), 0, 1).fill_(1)
    answer = columns(properties.run_region(step.region, root, impulse))[0, : reach + 1] - still
    weights = answer.flip(0).T  # [C,r+1]
    held = dict.fromkeys(a for n in step.region for a in inputs_of(n) if values.kind[a] == "const")

    def constant(numbers: Tensor) -> Node | None:
        of = {node: values.of[node] for node in held if isinstance(values.of[node], Tensor)}
        alike = (node for node, value in of.items() if value.numel() == numbers.numel())
        return next((n for n in alike if same(of[n].reshape(numbers.shape), numbers)), None)

    weight, bias = constant(weights), constant(still) if bool(still.any()) else None
    if weight is None or (bias is None and bool(still.any())):
        return None

    def is_sum(inside: Tensor) -> bool:
        x = torch.nn.functional.pad(columns(inside), (0, 0, reach, 0))
        y = still + sum(x[:, m : m + counts["Q"]] * weights[:, m] for m in range(reach + 1))
        return same(y, columns(properties.run_region(step.region, root, inside)))

    return Filter(weight, bias) if is_sum(inside) and is_sum(FAR * inside) else None
