"""The value of each graph input in a program: an expression for a call with `new` or `count` tokens
x on one row that holds `held` tokens, whose first token is at position `start`.
"""

from typing import Dict

# By file of templates/ and name of the input.
FEEDS: Dict[str, Dict[str, str]] = {
    "python.py": {
        "input_ids": "x",
        "hidden_states": "x",
        "token_type_ids": "np.zeros_like(x)",
        "position_ids": "start + slots",
        "attention_mask": "np.ones((1, held + new), np.int64)",
        "logits_index": "np.array([[new - 1]], np.int64)",
        "cache_position": "slots",
        "first_position": "np.array([[start]], np.int64)",
        "seqlens_k": "np.array([held + new - 1], np.int32)",
        "total_sequence_length": "np.array(held + new, np.int32)",
        "slots": "np.arange(held + new)",
    },
    "node.mjs": {
        "input_ids": "x",
        "hidden_states": "x",
        "token_type_ids": 'tensor("int64", [1, count], 0)',
        "position_ids": "integers(slots.map((slot) => start + slot), [1, count])",
        "attention_mask": 'tensor("int64", [1, held + count], 1)',
        "logits_index": 'tensor("int64", [1, 1], count - 1)',
        "cache_position": "integers(slots, [1, count])",
        "first_position": 'tensor("int64", [1, 1], start)',
        "seqlens_k": 'tensor("int32", [1], held + count - 1)',
        "total_sequence_length": 'tensor("int32", [], held + count)',
        "slots": "integers([...Array(held + count).keys()], [held + count])",
    },
    "c.c": {
        "input_ids": "copied(INT64, x, SIZES(1, count))",
        "hidden_states": "copied(TYPE, x, SIZES(1, count, WIDTH))",
        "token_type_ids": "zeros(INT64, SIZES(1, count))",
        "position_ids": "integers(INT64, START + held, 1, SIZES(1, count))",
        "attention_mask": "integers(INT64, 1, 0, SIZES(1, held + count))",
        "logits_index": "integers(INT64, count - 1, 0, SIZES(1, 1))",
        "cache_position": "integers(INT64, held, 1, SIZES(1, count))",
        "first_position": "integers(INT64, START, 0, SIZES(1, 1))",
        "seqlens_k": "integers(INT32, held + count - 1, 0, SIZES(1))",
        "total_sequence_length": "integers(INT32, held + count, 0, NULL, 0)",
        "slots": "integers(INT64, 0, 1, SIZES(held + count))",
    },
    "libtorch.cpp": {
        "input_ids": "x",
        "hidden_states": "x",
        "token_type_ids": "at::zeros({1, count}, at::kLong)",
        "position_ids": "start + at::arange(held, held + count).unsqueeze(0)",
        "attention_mask": "at::ones({1, held + count}, at::kLong)",
        "logits_index": "at::full({1, 1}, count - 1, at::kLong)",
    },
}
# `position_ids` with coordinates, which are PLANES planes.
WITH_COORDINATES = {
    "python.py": "np.repeat((start + slots)[None], PLANES, 0)",
    "node.mjs": (
        "integers(Array(PLANES).fill(slots.map((slot) => start + slot)).flat(), [PLANES, 1, count])"
    ),
    "c.c": "planes(START + held, count)",
    "libtorch.cpp": (
        "(start + at::arange(held, held + count).unsqueeze(0)).expand({PLANES, 1, count})"
    ),
}
