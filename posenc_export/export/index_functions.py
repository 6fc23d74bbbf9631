"""Check "indices" of targets without ONNX nodes: the module's own functions at the same edges."""

import json
from typing import Any, Dict, Tuple

import numpy as np
import torch

from posenc_export import ops
from posenc_export.export.read_module import Model
from posenc_export.export.signatures import counted_from
from posenc_export.runtime.artefact.certificate import Check
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.verification import described, integer_calls
from posenc_export.runtime.verification.integer_calls import Places

Limits = Tuple[int, int, int]  # before, after and chunk of a rule of visibility


def of_module(model: Model, manifest: Manifest) -> Dict[str, Check]:
    """Return the check, by name, of a module whose target has no ONNX graph; else nothing."""
    if not manifest.in_torch:
        return {}
    if described.is_read(manifest):
        return {"indices": described.unproved("values")}
    compared, failures, skipped = 0, {}, {}
    parts = described.attentions(manifest)
    known: Dict[Tuple[str, Limits], Tuple[int, str]] = {}
    for layer, (attention, part) in enumerate(zip(model.attentions(), parts, strict=True)):
        rule = getattr(attention, "visibility", None)
        if rule is None:
            skipped[f"layer {layer}"] = "sees an encoder's tokens, or sums over all earlier ones"
            continue
        limits = rule.before, rule.after, rule.chunk
        key = json.dumps(part["sees"], sort_keys=True), limits
        if key not in known:
            known[key] = _compared(part, limits, manifest)
        count, fault = known[key]
        compared += count
        if fault:
            failures[f"layer {layer}"] = fault
    return {"indices": Check(compared, "values", failures=failures, skipped=skipped)}


def _compared(part: described.Described, limits: Limits, manifest: Manifest) -> Tuple[int, str]:
    """Return how many values were compared, and the first fault."""
    count = 0
    caches = described.has_cache(manifest)
    for call in integer_calls.calls(manifest):
        places = integer_calls.placed(manifest, call)
        queries, keys = _positions(manifest, places, caches)
        wanted = torch.from_numpy(places.keys)[:, : keys.shape[1]]
        what = ""
        if not torch.equal(queries, torch.from_numpy(places.queries)):
            what = "positions of tokens"
        elif not torch.equal(keys, wanted):
            what = "positions of keys"
        before, after, chunk = limits
        mask = ops.attention_mask(queries, keys, None, torch.zeros(1), before, after, chunk)
        seen = mask[:, 0].eq(0).numpy()
        expected = described.visible(part, places.queries, keys.numpy())
        if ((seen != expected) & (places.queries[:, :, None] >= 0)).any():
            what = "visible keys"
        count += seen.size + keys.numel() + queries.numel()
        if what:
            return count, f"{what} of rows with up to {call.cached.max()} cached tokens"
    return count, ""


def _positions(manifest: Manifest, places: Places, caches: bool) -> Tuple[Any, Any]:
    """Return positions of tokens [B,S] and of keys [B,T], computed by the module's signature."""
    feeds = {name: torch.from_numpy(np.array(x)) for name, x in places.feeds.items()}
    if manifest.signature == "mask":
        counted = counted_from(feeds["attention_mask"])
        return counted[:, counted.size(1) - places.call.width :], counted
    queries = feeds["position_ids"][0] if manifest.axes else feeds["position_ids"]
    if not caches:
        return queries, queries
    past = feeds["past_positions"]
    slots = ops.write_index(past.ge(0).sum(1), queries)
    return queries, ops.append_positions(past, queries, slots)
