"""What `load` says where CUDA cannot run: without the provider, with half of its libraries,
without a driver, a device or cuDNN.
"""

import ctypes
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import onnxruntime
import pytest

from posenc_export.export import export
from posenc_export.runtime import load
from posenc_export.runtime.graphs import cuda, ort_options
from tests import traces
from tests.tiny import block
from tests.traces import sources

pytestmark = [
    pytest.mark.xdist_group("rope"),
    pytest.mark.skipif(sys.platform != "linux", reason="names of libraries"),
]
GPU = "pip install 'posenc-export[gpu]', or give provider cpu"


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    for cached in (cuda.obstacle, ort_options._warn_once):
        cached.cache_clear()
    yield
    for cached in (cuda.obstacle, ort_options._warn_once):
        cached.cache_clear()


@pytest.fixture
def artefact() -> Path:
    return traces.artefact(block("rope"), "ort-cuda")


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this ONNX Runtime say that it is built with CUDA. Return a function that sets what is
    missing.
    """
    real = onnxruntime.InferenceSession

    def without(library: str = "", failure: str = "") -> None:
        def loaded(name: str, mode: int = 0) -> None:
            if library and (
                library == name or ("cudnn" not in library and "providers_cuda" in name)
            ):
                raise OSError(f"{library}: cannot open shared object file: No such file")

        def opened(model: Any, options: Any, providers: Any, **others: Any) -> Any:
            if not isinstance(model, bytes):
                return real(model, options, providers=["CPUExecutionProvider"], **others)
            if failure:
                raise RuntimeError(f"/src/cuda_call.cc:154 {failure} ; GPU=-1 ; hostname=box ; ")
            return type("Trial", (), {"get_providers": lambda self: [cuda.NAME]})()

        both, failed = [cuda.NAME, "CPUExecutionProvider"], "Failed to load something"
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
        monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print(failed), raising=False)
        monkeypatch.setattr(ctypes, "CDLL", loaded)
        monkeypatch.setattr(onnxruntime, "InferenceSession", opened)

    return without


def test_an_onnx_runtime_without_cuda_is_named_with_its_remedy(artefact: Path) -> None:
    if cuda.NAME in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime is built with CUDA")
    said = r"pip uninstall onnxruntime, then pip install 'posenc-export\[gpu\]'$"
    with pytest.raises(ValueError, match=f"got an ONNX Runtime without it; {said}"):
        load(artefact, provider="cuda")
    assert load(artefact).provider == "cpu"


LESS = "CUDA failure 100: no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        (
            {"library": "libcublasLt.so.13"},
            f"got no libcublasLt.so.13, a library that it needs; {GPU}",
        ),
        (
            {"library": "libcuda.so.1"},
            "got no driver of NVIDIA (libcuda.so.1); install the driver, or give provider cpu",
        ),
        ({"failure": LESS}, f"got {LESS}; check the device with nvidia-smi, or give provider cpu"),
    ],
)
def test_what_cuda_lacks_is_one_line_with_its_remedy(
    missing: Any, line: str, artefact: Path, built_for_cuda: Any, capsys: Any
) -> None:
    built_for_cuda(**missing)
    with pytest.raises(ValueError) as refused:
        load(artefact, provider="cuda")
    assert str(refused.value) == f"runtime: expected a machine that can run provider cuda, {line}"
    with pytest.warns(RuntimeWarning) as warned:
        assert load(artefact).provider == "cpu"
    assert [str(one.message) for one in warned] == [
        f"runtime: provider auto chose cpu, because provider cuda cannot run here: {line}"
    ]
    assert warned[0].filename == __file__ and capsys.readouterr().out == ""


def test_auto_warns_once_and_cpu_never(artefact: Path, built_for_cuda: Any) -> None:
    built_for_cuda(library="libcublasLt.so.13")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(artefact, provider="cpu").provider == "cpu"
    with pytest.warns(RuntimeWarning):
        load(artefact)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(artefact)


def test_missing_cudnn_is_named_with_the_operator_that_needs_it(
    tmp_path: Path, built_for_cuda: Any
) -> None:
    export(sources(block("conditional_conv")), "ort-cuda", tmp_path / "artefact", verify=False)
    built_for_cuda(library="libcudnn.so.9")
    said = "got no libcudnn.so.9, which operator Conv needs; pip install 'posenc-export"
    with pytest.raises(ValueError, match=said):
        load(tmp_path / "artefact", provider="cuda")


def test_float32_of_target_ort_is_refused_on_cuda_with_the_targets_that_run_there(
    tmp_path: Path, built_for_cuda: Any
) -> None:
    built_for_cuda()
    export(sources(block("rope")), "ort", tmp_path / "artefact", verify=False)
    remedy = "export target onnx-static, or ort-cuda for half precision"
    said = f"expected provider cpu for target ort in float32, got cuda; {remedy}"
    with pytest.raises(ValueError, match=said):
        load(tmp_path / "artefact", provider="cuda")
    assert load(tmp_path / "artefact").provider == "cpu"
