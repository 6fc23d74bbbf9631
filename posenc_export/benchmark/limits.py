"""Lower bound of the bytes that a decode step reads from memory."""

from posenc_export.runtime.artefact.manifest import Manifest

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
# Bytes per weight, with its share of a float32 scale
FORMAT_BYTES = {"int8": 1.0, "int8-32": 1 + 4 / 32, "int4": 0.5 + 4 / 32, "int4-128": 0.5 + 4 / 128}
FORMAT_BYTES["keep"] = FORMAT_BYTES["int4"]


def cache_bytes(manifest: Manifest, context: int) -> int:
    """Return the size in bytes of the valid part of all key and value caches of one row."""
    caches = [state for state in manifest.states if not state.replaced and len(state.axes) == 4]
    return context * sum(
        ITEM_BYTES[state.dtype] * int(state.axes[1]) * int(state.axes[3]) for state in caches
    )


def step_bytes(manifest: Manifest, context: int, batch: int = 1) -> int:
    """Return the bytes that a decode step of `batch` rows must read with `context` tokens in the
    cache: the weights once, and the valid cache of each row.
    """
    of_weight: float = ITEM_BYTES[manifest.dtype]
    if manifest.weights is not None:  # each weight may have a format of its own
        names = manifest.formats.values() or (manifest.weights.format,)
        of_weight = min(FORMAT_BYTES[name] for name in names)
    weights = round(of_weight * (manifest.step_weights - _idle_weights(manifest)))
    return weights + batch * cache_bytes(manifest, context)


def _idle_weights(manifest: Manifest) -> int:
    """Return the number of weights of experts that a step does not compute."""
    config = manifest.config
    mlps = [config["layers"][name]["mlp"] for name in config.get("order", ())]
    mixtures = [mlp for mlp in mlps if mlp["name"] == "experts"]
    if len(mixtures) > manifest.operators.get("MoE", 0) + manifest.operators.get("QMoE", 0):
        return 0
    return sum(
        3 * mlp["hidden"] * config["width"] * (mlp["experts"] - mlp["chosen"]) for mlp in mixtures
    )
