"""Buckets of distances: single ones near, ranges that grow logarithmically far (Raffel et al. 2020,
T5, 2.1; borders as in its published code).
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from posenc_export.shared.refusal import refusal


def of_distances(
    where: str, buckets: int, max_distance: int, causal: bool, prefix: str = ""
) -> Tensor:
    """Buckets [n] int64 of the entries of `clipped`, key minus query. ValueError: too few buckets,
    or a max_distance not above those of single distances.

    prefix: of the names of both parameters, in messages.
    """
    sides = 1 if causal else 2
    if buckets < 2 * sides or buckets % sides:
        rule = f"{prefix}buckets of at least {2 * sides} and divisible by {sides}"
        raise refusal(where, rule, buckets, f"set {prefix}buckets=N")
    exact = buckets // sides // 2
    if max_distance <= exact:
        rule = f"{prefix}max_distance above {exact}, the number of buckets of single distances"
        raise refusal(where, rule, max_distance, f"set {prefix}max_distance=N")
    index = _one_side(np.arange(max_distance + 1), buckets // sides, max_distance)
    if not causal:
        index = np.concatenate((index[:0:-1], index[:1], index[1:] + buckets // 2))
    return torch.from_numpy(index)


def clipped(ahead: Tensor, max_distance: int, causal: bool) -> Tensor:
    """Distances ahead, key minus query, as indices of `of_distances` in ahead's dtype."""
    if causal:
        return (-ahead).clamp(0, max_distance)
    return ahead.clamp(-max_distance, max_distance) + max_distance


def row_rules(of_distance: Tensor, max_distance: int, causal: bool) -> list[str]:
    """Rules of the index that `clipped` gives, and of the bucket that it finds in `of_distance`."""
    if causal:
        return [f"min(max(q - k, 0), {max_distance})", counted("q - k", of_distance)]
    before, after = of_distance[: max_distance + 1].flip(0), of_distance[max_distance:]
    first = int(after[1]) - 1  # the bucket of the distance 1 follows it
    sides = counted("q - k", before), counted("k - q", after[1:] - first, 1)
    place = f"min(max(k - q, -{max_distance}), {max_distance}) + {max_distance}"
    return [place, f"{sides[0]} if k <= q else {first} + {sides[1]}"]


def counted(distance: str, buckets: Tensor, begin: int = 0) -> str:
    """The bucket of a distance, as a rule: buckets [n] grow from the distance `begin` on."""
    steps = torch.diff(buckets, prepend=torch.zeros(1, dtype=buckets.dtype)).tolist()
    borders = [str(begin + at) for at, step in enumerate(steps) for _ in range(step)]
    return f"count({', '.join((distance, *borders))})"


def bucket_edges(of_distance: Tensor, max_distance: int) -> dict[str, int]:
    """The distances at which the last bucket begins and distances are clipped."""
    one_side = of_distance[-max_distance - 1 :]
    border = int(one_side.ne(one_side[-1]).sum())
    return {"last bucket": border, "max distance": max_distance}


@functools.lru_cache(maxsize=1 << 16)
def exact_bucket(ahead: int, buckets: int, max_distance: int, causal: bool) -> int:
    """The bucket of one distance, for oracles."""
    count = buckets if causal else buckets // 2
    first = count if ahead > 0 and not causal else 0
    return first + int(_one_side(np.array([abs(ahead)]), count, max_distance)[0])


def _one_side(distances: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Buckets [n] int64 of distances [n] on one side."""
    exact = buckets // 2
    # In torch: numpy's float32 logarithm may differ in the last digit.
    ratio = torch.from_numpy(np.maximum(distances, 1)).to(torch.float32) / exact
    steps = torch.log(ratio) / math.log(max_distance / exact) * (buckets - exact)
    far = np.minimum(exact + steps.to(torch.int64).numpy(), buckets - 1)
    return np.where(distances < exact, distances, far)
