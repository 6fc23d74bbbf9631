"""Check "indices" of targets without ONNX nodes: the functions of torch that give a module its
masks, positions and slots, compared with what its layers declare.

Shapes: B rows, S new tokens, T keys.
"""

from typing import Dict, Iterator, Set, Tuple

import numpy as np
import torch
from torch import Tensor

from posenc_export import ops
from posenc_export.export.read_module import Model
from posenc_export.export.signatures import counted_from
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification import described
from posenc_export.shared.places import evaluate

FEW = 64  # positions that are all compared, besides those at edges
SLOTS = 32  # of a cache whose rows have every number of cached and new tokens
DEEPEST = 4096  # cached tokens at an edge


def of_module(model: Model, manifest: Manifest) -> Dict[str, Check]:
    """Return the check, by name, of a module whose target has no ONNX graph; else nothing."""
    if not manifest.in_torch:
        return {}
    if manifest.places is None:
        return {"indices": described.unproved("values")}
    compared, failures, skipped = 0, {}, {}
    positions = torch.tensor([*_positions(manifest)])[None]
    known: Set[Tuple[str, int, int, int]] = set()
    pairs = zip(model.attentions(), manifest.places.sees, strict=True)
    for layer, (attention, sees) in enumerate(pairs):
        rule = getattr(attention, "visibility", None)
        if rule is None:
            skipped[f"layer {layer}"] = "sees an encoder's tokens, or sums over all earlier ones"
            continue
        key = sees, rule.before, rule.after, rule.chunk
        if key in known:
            continue
        known.add(key)
        mask = ops.attention_mask(positions, positions, None, torch.zeros(1), *key[1:])
        q, k = positions[:, :, None].numpy(), positions[:, None, :].numpy()
        wanted = np.logical_and(evaluate(sees, {"q": q, "k": k}), k >= 0)
        wrong = np.argwhere((mask[:, 0].eq(0).numpy() != wanted) & (q >= 0))
        compared += mask.numel()
        if len(wrong):
            query, key_at = (int(positions[0, index]) for index in wrong[0][1:])
            failures[f"layer {layer}"] = f"the key at {key_at} and the query at {query}: not {sees}"
    for name, got, right in _calls(manifest):
        compared += right.numel()
        if not torch.equal(got, right):
            failures[name] = "other numbers than those of the tokens' slots"
    return {"indices": Check(compared, "values", failures=failures, skipped=skipped)}


def _positions(manifest: Manifest) -> Iterator[int]:
    """Yield -1, the first positions, and those on both sides of each edge."""
    few = range(-1, min(FEW, manifest.max_positions))
    edges = (n for n in described.edges(manifest) if FEW <= n < manifest.max_positions)
    return iter((*few, *edges))


def _calls(manifest: Manifest) -> Iterator[Tuple[str, Tensor, Tensor]]:
    """Yield numbers of the module's signature, and what they are, for rows with every number of
    cached and new tokens, and with one new token at each edge.
    """
    tokens = [(c, n) for c in range(SLOTS) for n in range(1, SLOTS + 1 - c)]
    tokens += [(n - 1, 1) for n in described.edges(manifest) if SLOTS < n <= DEEPEST]
    cached, new = (torch.tensor(numbers)[:, None] for numbers in zip(*tokens, strict=True))
    slots = torch.arange(int(cached.max()) + SLOTS)
    if manifest.signature == "mask":  # tokens between padding
        mask = torch.where(slots.ge(cached) & slots.lt(cached + new), 1, -1)
        yield "positions", counted_from(mask), torch.where(mask.gt(0), slots - cached, -1)
        return
    if not described.has_cache(manifest):
        return
    past = torch.where(slots < cached, slots, -1)
    columns = torch.arange(SLOTS)
    positions = torch.where(columns < new, cached + columns, -1)
    places = ops.write_index(past.ge(0).sum(1), positions)
    yield "slots of tokens", places, cached + columns
    keys = ops.append_positions(past, positions, cached + columns)
    yield "positions of keys", keys, torch.where(slots < cached + new, slots, -1)
