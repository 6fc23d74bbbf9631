"""Write a static web page that runs a decoder in the browser with onnxruntime-web."""

from posenc_export.page.folder import write

__all__ = ["write"]
