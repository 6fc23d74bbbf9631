"""Semantic operations: eager reference, and the graph nodes that a lowering replaces. Encodings
and models use them as `ops.name`.

Inside `graph.semantic_graph()`, each operation emits one node of the domain `posenc`, which export/
rewrites for the target. Everywhere else, TorchScript included, it computes its reference.

Shapes: B batch, S new tokens, T slots of a cache, N heads (H or K), H query heads, K kv heads, D
head size, M table rows, r rotary size.
"""

from posenc_export.ops.attention import (  # noqa: F401
    attend,
    attend_with_weights,
    attention_mask,
    attention_weights,
    products,
    scale,
    select_tokens,
    split_heads,
    weighted_values,
)
from posenc_export.ops.caches import (  # noqa: F401
    TokenPlaces,
    append,
    append_positions,
    fit_positions,
    refuse_gaps,
    write_index,
)
from posenc_export.ops.experts import weighted_experts  # noqa: F401
from posenc_export.ops.layers import layer  # noqa: F401
from posenc_export.ops.recurrence import gated_delta  # noqa: F401
from posenc_export.ops.rotations import apply_rotation, reduced_angle, rotate_both, rotate_pairs  # noqa: F401
from posenc_export.ops.scores import (  # noqa: F401
    collect_by_distance,
    distances,
    layers_of_ratio,
    pick,
    rows_at_counts,
    suffix_sum,
    sums_between,
    wave_products,
)
