"""What the arrays of a saved session must be for the artefact that reads them."""

import math
from typing import Any, Dict, Mapping, Tuple

import numpy as np

from posenc_export.runtime.artefact.schema import Manifest, State
from posenc_export.runtime.session.buffer import ELEMENTS
from posenc_export.runtime.session.encoder_outputs import MASK

ENCODER, STATE = "encoder.", "state."  # begin the names of arrays of these kinds
Form = Tuple[str, Tuple[int, ...]]  # dtype and shape of an array


def check(manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> None:
    """Check the arrays of a saved session, by name. Raise ValueError, with the rule and the value,
    if one is missing or unknown, has another dtype or shape, or rows that no session has.
    """
    rows, columns = _size(arrays, "length", 0), _size(arrays, "slots", 1)
    by_columns = manifest.by_columns or not rows
    forms: Dict[str, Form] = {
        "length": ("int64", (rows,)),
        "start": ("int64", (rows,)),
        "slots": ("bool", (rows, columns if by_columns else 0)),
    }
    _compare({name: arrays[name] for name in forms if name in arrays}, forms)
    length = arrays["length"].tolist()
    _check_rows(manifest, length, arrays["start"].tolist(), arrays["slots"])
    if "tokens" in arrays:
        forms["tokens"] = ("int64", (sum(length),))
    if rows:
        used = columns if by_columns else max(length)
        forms |= _encoder_forms(manifest, rows, _size(arrays, ENCODER + MASK, 1))
        forms |= {STATE + state.past: _form(state, rows, used) for state in manifest.states}
    _compare(arrays, forms)
    ids = arrays.get("tokens", np.zeros(0, np.int64))
    if ids.size and not 0 <= ids.min() <= ids.max() < manifest.vocabulary:
        most = manifest.vocabulary - 1
        raise ValueError(f"expected token ids 0 .. {most}, got {ids.min()} .. {ids.max()}")


def _check_rows(manifest: Manifest, length: Any, start: Any, slots: np.ndarray) -> None:
    most = manifest.max_positions
    for first, count in zip(start, length, strict=True):
        if count < 0 or not 0 <= first < most or first + count > most:
            raise ValueError(
                f"expected rows within positions 0 .. {most - 1}, got {count} tokens from {first}"
            )
    if slots.view(np.uint8).max(initial=0) > 1:
        raise ValueError("expected slots to be bytes of 0 and 1, got others")
    if slots.shape[1] and slots.sum(1).tolist() != length:
        raise ValueError(f"expected slots for rows of {length} tokens, got {slots.sum(1).tolist()}")


def _encoder_forms(manifest: Manifest, rows: int, source: int) -> Dict[str, Form]:
    """Return the forms of encoder outputs of `source` columns. Their axes are rows and columns."""
    sizes = {"batch_size": rows, "encoder_sequence_length": source}
    forms: Dict[str, Form] = {}
    for value in manifest.encoder:
        shape = tuple(axis if isinstance(axis, int) else sizes[axis] for axis in value.axes)
        forms[ENCODER + value.name] = value.dtype, shape
    return forms


def _form(state: State, rows: int, used: int) -> Form:
    """Return the form of a state of `used` slots, as it is saved."""
    shape = (rows, *(axis if isinstance(axis, int) else used for axis in state.axes[1:]))
    dtype, _ = ELEMENTS.get(state.dtype, (state.dtype, 0))
    return dtype, (math.prod(shape),) if state.grows else shape


def _compare(arrays: Mapping[str, np.ndarray], forms: Mapping[str, Form]) -> None:
    if set(arrays) != set(forms):
        wrong = sorted(set(arrays) ^ set(forms))[0]
        raise ValueError(
            f"expected the arrays {', '.join(forms)}, got {'' if wrong in arrays else 'no '}{wrong}"
        )
    for name, (dtype, shape) in forms.items():
        array = arrays[name]
        if (array.dtype, array.shape) != (np.dtype(dtype), shape):
            raise ValueError(
                f"expected {name} {dtype} {list(shape)}, got {array.dtype} {list(array.shape)}"
            )


def _size(arrays: Mapping[str, np.ndarray], name: str, axis: int) -> int:
    """Return the size of an array along an axis; 0 if it has none, which `_compare` refuses."""
    shape = arrays[name].shape if name in arrays else ()
    return shape[axis] if axis < len(shape) else 0
