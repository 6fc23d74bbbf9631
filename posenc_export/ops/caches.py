"""Semantic operations on caches. Their eager references write caches in place; those of other
operations do not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from posenc_export.ops import graph
from posenc_export.ops.graph import emitting


class TokenPlaces(NamedTuple):
    """Where the tokens of a call are, int64."""

    positions: Tensor  # [B,S]; -1 at padding
    coordinates: Tensor  # that encodings read: the positions [B,S], or [A,B,S]
    key_positions: Tensor  # [B,T] of the tokens in caches, with those of the call
    write_index: Tensor  # slots of the new tokens, from `write_index`


def write_index(used: Tensor, positions: Tensor) -> Tensor:
    """Return the cache slots [B,S] int64 of new tokens with positions [B,S], for rows in which the
    first `used` [B] int64 slots are in use.

    The result is only for `append` and `append_positions`. In a semantic graph it is `used`.
    """
    if not torch.jit.is_scripting() and emitting():
        return used
    # Fewer operations for one token; torch.export cannot branch on sizes.
    if torch.jit.is_scripting() and positions.size(1) == 1:
        return used.unsqueeze(1)
    return torch.arange(positions.size(1), device=used.device) + used.unsqueeze(1)


def append(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Write new [B,S,N,D] into past [B,N,T,D] at write_index and return past. Targets with growing
    caches return the concatenation of past and new instead.

    T = 0 means that there is no cache: the result is new [B,N,S,D], through which gradients flow.
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [past.size(0), past.size(1), past.size(2) + new.size(1), past.size(3)]
        return graph.Append.emit(past, shape, past, new, write_index)
    if past.size(2) == 0:
        return new.transpose(1, 2)
    _write(past.transpose(1, 2), new, write_index)
    return past


def append_positions(past: Tensor, new: Tensor, write_index: Tensor) -> Tensor:
    """Write new key positions [B,S] int64 into past [B,T] and return past, in the same way as
    `append`. -1 marks padding and slots that were never written.
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [past.size(0), past.size(1) + new.size(1)]
        return graph.AppendPositions.emit(past, shape, past, new, write_index)
    if past.size(1) == 0:
        return new
    _write(past, new, write_index)
    return past


def fit_positions(key_positions: Tensor, past: Tensor, new: Tensor) -> Tensor:
    """Pad key positions of the first slots with -1 to the slots of past [B,N,T,D]: [B,T].
    Targets with growing caches, and T = 0, leave them unchanged.
    """
    if not torch.jit.is_scripting() and emitting():
        shape = [key_positions.size(0), past.size(2) + new.size(1)]
        return graph.FitPositions.emit(key_positions, shape, key_positions, past)
    if past.size(2) == 0:
        return key_positions
    missing = past.size(2) - key_positions.size(1)
    return torch.nn.functional.pad(key_positions, [0, missing], value=-1.0)


def refuse_gaps(count: Tensor) -> Tensor:
    """Return 0 [1] int64 if count [] int64 is 0; if it is larger, the look-up of row 1 of a table
    with one row fails. In an ONNX graph the name of its node says why.
    """
    row = count.clamp(max=1).unsqueeze(0)
    if not torch.jit.is_scripting() and emitting():
        return graph.RefuseGaps.emit(row, [1], row)
    return torch.zeros_like(row).index_select(0, row)


def _write(past: Tensor, new: Tensor, write_index: Tensor) -> None:
    """Write new [B,S,*] into past [B,T,*] at slots write_index [B,S]."""
    # Fewer operations for one row; torch.export cannot branch on sizes.
    if torch.jit.is_scripting() and write_index.size(0) == 1:
        past.index_copy_(1, write_index[0], new)
    else:
        rows = torch.arange(write_index.size(0), device=write_index.device).unsqueeze(1)
        past.index_put_((rows, write_index), new)
