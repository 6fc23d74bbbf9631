"""Semantic operations: eager reference, and the graph nodes that a lowering replaces. Encodings
and models use them as `ops.name`.
"""

from posenc_export.ops.core import (  # noqa: F401
    append,
    append_positions,
    apply_rotation,
    attend,
    attend_with_weights,
    attention_mask,
    attention_weights,
    collect_by_distance,
    distances,
    fit_positions,
    pick,
    products,
    rotate_both,
    rotate_pairs,
    rows_at_counts,
    select_tokens,
    split_heads,
    suffix_sum,
    wave_products,
    weighted_values,
    write_index,
)
