"""Position encodings as deployable attention blocks, exact at every offset. Names load on first use: importing this imports neither torch nor onnxruntime."""

import importlib
from typing import Any

# Where each stands, with its name there if that is another.
_HOME = {
    "load": "posenc_export.runtime",
    "verify": "posenc_export.runtime",
    "export_model": "posenc_export.export:export",
    "from_pretrained": "posenc_export.models.pretrained",
    "Session": "posenc_export.runtime",
    "Manifest": "posenc_export.runtime",
    "AttentionBlock": "posenc_export.models.block",
    "Stack": "posenc_export.models.stack",
    "OwnModule": "posenc_export.models.own",
    "block_config": "posenc_export.models.short",
    "decoder_config": "posenc_export.models.short",
    "encoder_config": "posenc_export.models.short",
    "load_preset": "posenc_export.models.presets",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module posenc_export has no attribute {name!r}")
    module, _, there = _HOME[name].partition(":")
    return getattr(importlib.import_module(module), there or name)
