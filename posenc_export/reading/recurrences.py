"""Recurrences of a module as one operation each, in traces of the whole module.

A loop over tokens or chunks, or a closed form of it, splits values along an axis of tokens, and
joins the results along such an axis. If these are those of the gated linear recurrence
S = e^g S + r k (v - S^T k)^T or S = e^g S + k v^T, y = S^T q, one operation replaces the loop.
"""

import torch
from torch import Tensor

from posenc_export.reading.causality import affordable
from posenc_export.reading.exact import in_float64
from posenc_export.reading.joined import Joined, Trace, traced_at
from posenc_export.reading.recurrent_groups import Cut, Form, near
from posenc_export.reading.whole import OneTensor, count_numbers, of_length

ROWS, LENGTHS = (3, 5, 11, 47, 53), (7, 9, 13, 17, 19, 23, 29, 31, 37)  # of the traces
TRACES = 3  # as many show how numbers depend on rows and tokens
PROVED = (1, 2, 33, 64, 65, 130, 257)  # numbers of tokens for which the result is compared


def recurrences(plain: OneTensor, x: Tensor, most: int) -> Joined:
    """Return the module with one operation in place of each recurrence.

    Args:
        plain: the module.
        x: [B,S] or [B,S,E].
        most: tokens that the module takes.

    Raises:
        ValueError: the module has no recurrence.
    """
    taken = {s for held in plain.state_dict().values() for s in held.shape} | set(x.shape[2:])
    free = ([n for n in all_of if n not in taken and n <= most] for all_of in (ROWS, LENGTHS))
    sizes = list(zip(*free, strict=False))[:TRACES]
    if len(sizes) < TRACES:
        raise ValueError("no sizes for traces")
    traces, forms = list[Trace](), list[Form]()
    for size in sizes:
        inputs = plain.inputs(_tokens(x, *size))
        traces.append(traced_at(plain, inputs))
        forms = Cut(traces[-1], inputs, forms).found
        if not forms:
            raise ValueError("no recurrence")
    found = Joined(traces, sizes)
    longest = affordable(count_numbers(plain.parameters()), most)
    for length in (length for length in PROVED if length <= longest):
        if not _is_same(found, plain, _tokens(x, 1 + length % 2, length)):
            raise ValueError("a recurrence at some lengths only")
    return found


def _is_same(found: Joined, plain: OneTensor, x: Tensor) -> bool:
    """Compare with the module in float64."""
    (_, *beside), copied = plain.inputs(x), plain.copied()
    got = in_float64(lambda x: found(x, *beside), x)
    return near(got, in_float64(lambda x: copied(x, *beside), x))


def _tokens(x: Tensor, rows: int, length: int) -> Tensor:
    """Repeat x to a number of rows and tokens."""
    return of_length(x[torch.arange(rows) % x.shape[0]], length).clone()
