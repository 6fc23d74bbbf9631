"""Write a static web page that runs a decoder in the browser with onnxruntime-web."""

from posenc_export.page.folder import write_page

__all__ = ["write_page"]
