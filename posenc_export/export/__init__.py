"""Export a model to a deployment target and verify the artefact."""

try:
    import onnx_ir  # noqa: F401
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"export: expected {error.name} to be installed, got none; pip install "
        "'posenc-export[export]'",
        name=error.name,
    ) from None

from posenc_export.export.artefact import check_export, export_all, folders
from posenc_export.export.artefact import export_model as export
from posenc_export.export.options import ExportOptions
from posenc_export.export.read_module import ReadAs
from posenc_export.export.sources import Sources
from posenc_export.export.verify import VerificationError, verify
from posenc_export.runtime.artefact.schema import TARGETS

__all__ = [
    "TARGETS",
    "ExportOptions",
    "ReadAs",
    "Sources",
    "VerificationError",
    "check_export",
    "export",
    "export_all",
    "folders",
    "verify",
]
