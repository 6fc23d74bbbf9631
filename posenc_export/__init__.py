"""Position encodings as deployable attention blocks, exact at every offset.

Public names are imported on first use: importing this package imports neither torch nor
onnxruntime.
"""

import importlib
from typing import TYPE_CHECKING

from posenc_export.shared.version import VERSION

if TYPE_CHECKING:
    from posenc_export import encodings
    from posenc_export.auditing import Audit, audit
    from posenc_export.catalogue.plots import draw
    from posenc_export.export import export as export_model
    from posenc_export.export.comparison import compare
    from posenc_export.models.block import AttentionBlock
    from posenc_export.models.config_json import from_json as config_from_json
    from posenc_export.models.config_json import to_json as config_to_json
    from posenc_export.models.presets import load_preset, seeded
    from posenc_export.models.pretrained import from_pretrained
    from posenc_export.models.short_forms import block_config, decoder_config, encoder_config
    from posenc_export.models.stack import Stack
    from posenc_export.runtime import Conversation, Manifest, Model, Session, grids, load, verify

__version__ = VERSION

# Module that defines each public name. A name that differs in that module follows a colon.
_HOME = {
    "load": "posenc_export.runtime",
    "verify": "posenc_export.runtime",
    "export_model": "posenc_export.export:export",
    "Audit": "posenc_export.auditing",
    "audit": "posenc_export.auditing",
    "draw": "posenc_export.catalogue.plots",
    "compare": "posenc_export.export.comparison",
    "from_pretrained": "posenc_export.models.pretrained",
    "Model": "posenc_export.runtime",
    "Session": "posenc_export.runtime",
    "Conversation": "posenc_export.runtime",
    "grids": "posenc_export.runtime",
    "Manifest": "posenc_export.runtime",
    "AttentionBlock": "posenc_export.models.block",
    "Stack": "posenc_export.models.stack",
    "block_config": "posenc_export.models.short_forms",
    "decoder_config": "posenc_export.models.short_forms",
    "encoder_config": "posenc_export.models.short_forms",
    "config_from_json": "posenc_export.models.config_json:from_json",
    "config_to_json": "posenc_export.models.config_json:to_json",
    "load_preset": "posenc_export.models.presets",
    "seeded": "posenc_export.models.presets",
}

__all__ = [
    "AttentionBlock",
    "Audit",
    "Conversation",
    "Manifest",
    "Model",
    "Session",
    "Stack",
    "audit",
    "block_config",
    "compare",
    "config_from_json",
    "config_to_json",
    "decoder_config",
    "draw",
    "encoder_config",
    "encodings",
    "export_model",
    "from_pretrained",
    "grids",
    "load",
    "load_preset",
    "seeded",
    "verify",
]


def __getattr__(name: str) -> object:
    if name == "encodings":
        return importlib.import_module("posenc_export.encodings")
    if name not in _HOME:
        raise AttributeError(f"module posenc_export has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
