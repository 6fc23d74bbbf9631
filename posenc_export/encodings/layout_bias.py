"""Biases from the order of tokens and the places of their boxes on a page (Xu et al. 2021,
LayoutLMv2, 2.2; Huang et al. 2022, LayoutLMv3, 3.2, its code).
"""

import math
from typing import Literal

import torch
from torch import Tensor

from posenc_export.encodings.shared.base import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.shared.buckets import bucket_edges, clipped, exact_bucket, of_distances
from posenc_export.encodings.shared.rotary import Place


class LayoutBias(PositionEncoding):
    """scores + (a_h[bucket(n_j - n_i)] + b_h[bucket(x_j - x_i)] + c_h[bucket(y_j - y_i)]) /
    sqrt(D), n the place in the text, x and y those of a box; a, b, c trained, buckets of T5.

    x is the left and y the lower edge of the box of a token (entries 0 and 3 of bbox). If size is
    0, n is a coordinate, too, because the patches of the image count from 0 again. All layers share
    the tables. Memory: the biases [B,H,S,S], once for all layers.

    Range: coordinates [3,B,S], each 0 .. max_positions - 1; with a size, the coordinates [4,B,S] of
    `boxes`, each 0 .. size - 1, and positions. Scores depend on the differences of both only.

    Args:
        geometry: heads H, head size D.
        buckets: rows of a, even; rel_pos_bins.
        max_distance: distance in tokens from which the last bucket is used; larger than all
            distances with a bucket of their own; max_rel_pos.
        box_buckets, box_max_distance: the same for b and c; rel_2d_pos_bins and max_rel_2d_pos.
        added: "scaled", as LayoutLMv3; "unscaled" without the division by sqrt(D), as LayoutLMv2.
        size: number of values of an edge, if boxes are read; 0 if n, x and y are read.

    Weights:
        of_text.weight, of_x.weight, of_y.weight: a, b, c, [buckets,H], the second half for later
            keys or larger coordinates; rel_pos_bias, rel_pos_x_bias and rel_pos_y_bias, transposed.
    """

    axes = 3
    grid_bias = True
    works_in = ("bidirectional",)
    most = {
        "buckets": 1 << 20,
        "max_distance": 1 << 20,
        "box_buckets": 1 << 20,
        "box_max_distance": 1 << 20,
        "size": 1 << 20,
    }
    least = {"size": 0}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        """q_positions [3,B,S], k_positions [3,B,T], with a size [5,B,S] and [5,B,T], or [B,S] and
        [B,T] for all axes, to [B,H,S,T] float32.
        """
        if q_positions.dim() == 2:
            q_positions, k_positions = q_positions.expand(3, -1, -1), k_positions.expand(3, -1, -1)
        elif self.with_position:  # and left and lower edge
            q_positions = torch.stack((q_positions[0], q_positions[1], q_positions[4]))
            k_positions = torch.stack((k_positions[0], k_positions[1], k_positions[4]))
        ahead = k_positions.unsqueeze(2) - q_positions.unsqueeze(3)  # [3,B,S,T]
        text = clipped(ahead[0], self.max_distance, False)
        boxes = clipped(ahead[1:], self.box_max_distance, False)
        of_text = self.by_distance(self.of_text.weight, self.of_distance)
        total = torch.nn.functional.embedding(text, of_text)
        for weight, index in ((self.of_x.weight, boxes[0]), (self.of_y.weight, boxes[1])):
            of_boxes = self.by_distance(weight, self.of_box_distance)
            total = total + torch.nn.functional.embedding(index, of_boxes)
        return total.permute(0, 3, 1, 2)

    def by_distance(self, weight: Tensor, of_distance: Tensor) -> Tensor:
        """Biases of buckets [n,H] to those of distances [N,H] float32."""
        scaled = weight.to(torch.float32) * self.factor
        return torch.nn.functional.embedding(of_distance, scaled)

    def edges(self) -> dict[str, int]:
        text = bucket_edges(self.of_distance, self.max_distance)
        boxes = bucket_edges(self.of_box_distance, self.box_max_distance)
        return {**text, **{f"{name} of boxes": at for name, at in boxes.items()}}

    def __init__(
        self,
        geometry: Geometry,
        buckets: int = 32,
        max_distance: int = 128,
        box_buckets: int = 64,
        box_max_distance: int = 256,
        added: Literal["scaled", "unscaled"] = "scaled",
        size: int = 0,
    ) -> None:
        super().__init__()
        self.coordinate_range, self.with_position = size, size > 0
        self.axes = 4 if size else 3
        self.max_distance, self.box_max_distance = max_distance, box_max_distance
        self.factor = 1 / math.sqrt(geometry.head_size) if added == "scaled" else 1.0
        self.of_distance: Tensor
        self.of_box_distance: Tensor
        index = of_distances("layout_bias", buckets, max_distance, False)
        self.register_buffer("of_distance", index, persistent=False)
        index = of_distances("layout_bias", box_buckets, box_max_distance, False, "box_")
        self.register_buffer("of_box_distance", index, persistent=False)
        # Initialised from N(0, 1), so that scores differ before training.
        self.of_text = torch.nn.Embedding(buckets, geometry.heads)
        self.of_x, self.of_y = (torch.nn.Embedding(box_buckets, geometry.heads) for _ in range(2))


class LayoutBiasOracle(Oracle, of=LayoutBias):
    def bias(self, head: int, query: Place, key: Place) -> float:
        e, total = self.encoding, 0.0
        for axis, table in enumerate(self.weights.values()):
            distance = e.box_max_distance if axis else e.max_distance
            entry = 4 if e.with_position and axis == 2 else axis
            i, j = (p if isinstance(p, int) else p[entry] for p in (query, key))
            total += table[exact_bucket(int(j - i), len(table), distance, False), head]
        return float(total * e.factor)
