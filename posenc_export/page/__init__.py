"""A static page that runs a decoder in the browser with onnxruntime-web, and shows where its heads look."""

from posenc_export.page.folder import write

__all__ = ["write"]
