"""The block of `posenc export block`, with random weights or those of a file."""

from typing import Any, Dict

from posenc_export.commands.options import BLOCK, check_only
from posenc_export.commands.terminal import note

NO_HEADS = "export: expected the number of heads with --weights, got none; give --heads H"
OF_WEIGHTS = "weights prefix encoding heads kv_heads max_positions attention layout".split()


def model_of_block(chosen: Dict[str, Any]) -> Any:
    """Return the block that the options describe. Raise ValueError for others."""
    if "weights" in chosen:
        return _block_of_weights(chosen)
    from posenc_export import encodings
    from posenc_export.models.presets import seeded
    from posenc_export.models.short_forms import block_config

    check_only("export", tuple(BLOCK), chosen, "options of a block with random weights")
    values: Dict[str, Any] = {**BLOCK, **chosen}
    seed, spec = values.pop("seed"), encodings.parse(values.pop("encoding"))
    causal = values.pop("attention") == "causal"
    return seeded(block_config(encoding=spec, causal=causal, **values), seed)


def _block_of_weights(chosen: Dict[str, Any]) -> Any:
    from posenc_export.models.block import AttentionBlock
    from posenc_export.models.from_weights import complete, read_file

    rule = "options of a block with --weights, which determine the sizes"
    check_only("export", OF_WEIGHTS, chosen, rule)
    if "heads" not in chosen:
        raise ValueError(NO_HEADS)
    projections = read_file(chosen["weights"], chosen.get("prefix", ""))
    values = {**BLOCK, **chosen}
    block = AttentionBlock.from_weights(
        heads=values["heads"],
        max_positions=values["max_positions"],
        kv_heads=chosen.get("kv_heads"),
        encoding=values["encoding"],
        layout=chosen.get("layout"),
        encoding_weights=projections.trained,
        causal=values["attention"] == "causal",
        **complete(projections.weights),
    )
    own, default = block.attention, "" if "encoding" in chosen else " (the default)"
    sizes = f"heads {own.heads}, kv heads {own.kv_heads}, head size {own.head_size}"
    for line in projections.lines:
        note(f"weights: {line}")
    note(f"block: encoding {values['encoding']}{default}, {sizes}, {values['attention']}")
    note(
        "block: certificates compare with this block; posenc_export.compare compares it with "
        "the module that the weights come from"
    )
    return block
