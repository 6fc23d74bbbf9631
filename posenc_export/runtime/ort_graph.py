"""Load model.onnx with ONNX Runtime."""

import platform
from pathlib import Path
from typing import Optional

try:
    import onnxruntime
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("runtime: expected onnxruntime, got none; pip install 'posenc-export[cpu]' or 'posenc-export[gpu]'", name="onnxruntime") from error

from posenc_export.runtime.manifest import Manifest
from posenc_export.runtime.onnx_files import check_external, refused
from posenc_export.runtime.ort_caches import OrtCaches
from posenc_export.runtime.rules import check_graph

# SkipLayerNormalization takes 1.7 to 7 times as long on a CPU as the Add and LayerNormalization that it replaces (ONNX Runtime 1.31, widths 256 to 1536).
SLOWER = {"cpu": ["SkipLayerNormFusion"], "cuda": []}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def choose_provider(name: str, manifest: Manifest) -> str:
    """Return the provider for an artefact, "cpu" or "cuda". "auto" chooses cuda if ONNX Runtime has it and the artefact can run on it.

    Raises:
        ValueError: the name is unknown, ONNX Runtime lacks the provider, or the artefact has operators without kernels for it.
    """
    present = [short for short, long in PROVIDERS.items() if long in onnxruntime.get_available_providers()]
    host_only = manifest.operators.get("GroupQueryAttention", 0) > 0 and manifest.dtype == "float32"
    if name == "auto":
        return "cuda" if "cuda" in present and not host_only else "cpu"
    if name not in PROVIDERS:
        raise ValueError(f"runtime: expected provider to be one of auto, {', '.join(PROVIDERS)}, got {name!r}; choose among these")
    if name not in present:
        raise ValueError(f"runtime: expected an ONNX Runtime with provider {name}, got one with {', '.join(present)}; pip install 'posenc-export[gpu]'")
    if name == "cuda" and host_only:
        raise ValueError(f"runtime: expected provider cpu for target {manifest.target} in float32, got cuda; export target ort-cuda")
    return name


def _saturates() -> bool:
    """Whether products of unsigned and signed bytes may saturate: on x86 CPUs without VNNI. True on x86 if the CPU's features are not known."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        return "vnni" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


class OrtGraph:
    """A loaded model.onnx.

    Args:
        path: the file model.onnx.
        manifest: description of the graph.
        provider: "cpu" or "cuda".
        threads: threads per operator; None uses all cores.
    """

    def __init__(self, path: Path, manifest: Manifest, provider: str, threads: Optional[int]) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Under ALiBi, attention weights of distant keys are below 1e-38. As subnormal numbers they slow the product with the values by 1.7x at 8192 keys.
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        if manifest.operators.get("MatMulIntegerToFloat") and _saturates():
            options.add_session_config_entry("session.x64quantprecision", "1")  # uses products of unsigned bytes, which are exact but slower
        if threads:
            options.intra_op_num_threads = threads
        self.manifest, self.device = manifest, provider
        check_external(path, manifest)
        with refused(path):
            self.session = onnxruntime.InferenceSession(
                str(path), options, providers=[PROVIDERS[provider]], enable_fallback=0, disabled_optimizers=SLOWER[provider]
            )
            check_graph(manifest, self.session.get_inputs(), self.session.get_outputs())
        if PROVIDERS[provider] not in self.session.get_providers():
            raise ValueError(f"runtime: expected provider {provider} to load, got {', '.join(self.session.get_providers())}; check its libraries, or give cpu")

    def open(self, rows: int, capacity: int) -> OrtCaches:
        """Allocate empty caches for `rows` rows of `capacity` slots."""
        return OrtCaches.open(self.session, self.manifest, self.device, rows, capacity)
