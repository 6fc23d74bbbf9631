"""Steps on CUDA with a device whose memory is that of the host: inputs are bound once and copied
there, and outputs are those of the CPU.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from posenc_export.export import Sources, export
from posenc_export.export.read_module import ReadAs
from posenc_export.runtime import Model, Session, load
from posenc_export.runtime.graphs import cuda_steps
from posenc_export.runtime.graphs.cuda_steps import ON_HOST, UNCAPTURED, DeviceSteps
from posenc_export.runtime.session import buffers
from posenc_export.runtime.verification.grid_inputs import encoder_rows
from tests.cases import choice
from tests.reading import own_modules
from tests.tiny import decoder
from tests.traces import artefact


class FakeMemory:
    """Memory that stands for a tensor on the device: a copy, which changes only when it is written.
    It counts the bytes that come from the host or go there, and the times that it is written.
    """

    moved = written = 0

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.copy()

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def update_inplace(self, array: np.ndarray) -> None:
        FakeMemory.moved += array.nbytes
        FakeMemory.written += 1
        self.array[...] = array

    def numpy(self) -> np.ndarray:
        FakeMemory.moved += self.array.nbytes
        return self.array.copy()


class FakeRuntime:
    """The functions of the CUDA runtime that caches use, on memory of the host."""

    @staticmethod
    def cudaMemcpy2D(
        target: Any, target_pitch: Any, source: Any, pitch: Any, width: Any, height: Any, kind: int
    ) -> int:
        for piece in range(height.value):
            to, of = target.value + piece * target_pitch.value, source.value + piece * pitch.value
            ctypes.memmove(to, of, width.value)
        return 0

    @staticmethod
    def cudaMemset2D(target: Any, pitch: Any, value: int, width: Any, height: Any) -> int:
        for piece in range(height.value):
            ctypes.memset(target.value + piece * pitch.value, value, width.value)
        return 0

    @staticmethod
    def cudaMemcpy(target: Any, source: Any, size: Any, kind: int) -> int:
        ctypes.memmove(target.value, source.value, size.value)
        return 0

    @staticmethod
    def cudaStreamSynchronize(stream: Any) -> int:
        return 0


class Capturing:
    """A session that replays like one on CUDA: a run under an id that is known repeats the binding
    of the first run under it.

    Attributes:
        replays: ids of the runs that were replayed.
        fails: whether captures fail.
    """

    def __init__(self, session: Any, fails: bool = False) -> None:
        self.io_binding, self._run = session.io_binding, session.run_with_iobinding
        self.fails = fails
        self.captured: dict[int, Any] = {}
        self.replays: list[int] = []

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        number = int(options.get_run_config_entry("gpu_graph_id"))
        if number != UNCAPTURED and self.fails:
            raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")
        if number in self.captured:
            self.replays.append(number)
        self._run(binding if number == UNCAPTURED else self.captured.setdefault(number, binding))


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let tensors and bindings for device cuda be memory of the host. Return the names of inputs
    and outputs in the order in which they are bound.
    """
    bound: list[str] = []
    totals: list[np.ndarray] = []
    kept: list[FakeMemory] = []  # a graph that is replayed writes to the memory of its capture
    real = onnxruntime.OrtValue.ortvalue_from_numpy

    def made(array: np.ndarray, device: str = "cpu", index: int = 0) -> Any:
        return held(array) if device == "cuda" else real(array, device, index)

    def held(array: np.ndarray) -> FakeMemory:
        kept.append(FakeMemory(array))
        return kept[-1]

    def on_host(bind: Any) -> Any:
        def call(self: Any, name: str, device: str = "cpu", *rest: Any) -> None:
            bound.append(name)
            if name == ON_HOST:  # a kernel reads it when it is captured, not when it is replayed
                totals.append(np.frombuffer(ctypes.string_at(rest[-1], 4), np.int32).copy())
                rest = (*rest[:-1], totals[-1].ctypes.data)
            bind(self, name, "cpu", *rest)

        return call

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", staticmethod(made))
    unset = staticmethod(lambda shape, dtype, device, index: held(np.full(shape, 7, dtype)))
    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", unset)
    monkeypatch.setattr(buffers, "_runtime", FakeRuntime)
    for name in ("bind_input", "bind_output"):
        bind = getattr(onnxruntime.IOBinding, name)
        monkeypatch.setattr(onnxruntime.IOBinding, name, on_host(bind))
    return bound


def on_fake_device(folder: Path) -> Model:
    model = load(folder, provider="cpu", threads=1)
    model.graph.device = model.graph.provider = "cuda"
    model.graph.reads_device = True
    return model


def capturing(folder: Path, fails: bool = False) -> tuple[Model, Capturing]:
    model = on_fake_device(folder)
    model.graph.ort_session = session = Capturing(model.graph.ort_session, fails)
    model.graph.steps = DeviceSteps(session, captures=True)
    return model, session


def outputs(model: Model) -> dict[str, np.ndarray]:
    """Return outputs after calls that change the memory of caches."""
    ids = np.arange(40).reshape(2, 20) % 61
    session, result = model.session(batch=2, capacity=30), {}

    def steps(of: Session, first: int, end: int, rows: Any = (0, 1)) -> np.ndarray:
        return np.stack([of.step(ids[list(rows), column]) for column in range(first, end)])

    result["prefill"] = session.prefill([ids[0, :7], ids[1, :4]], logits_to_keep=1)
    result["steps"] = steps(session, 7, 12)
    session.rewind(3)
    result["after a rewind"] = steps(session, 12, 14)
    other = session.fork()
    result["admitted"] = session.admit(ids[:1, :5], logits_to_keep=1)
    result["three rows"] = steps(session, 5, 8, (0, 1, 1))
    session.retire(0)
    result["two rows"] = steps(session, 8, 10)
    result["fork"] = steps(other, 5, 8)
    return result


def differing(model: Model, folder: Path) -> list[str]:
    """Return the names of outputs that are not those of the CPU."""
    expected, found = outputs(load(folder, provider="cpu", threads=1)), outputs(model)
    pairs = {name: (found[name].astype(np.float32), expected[name]) for name in expected}
    return [n for n, (y, x) in pairs.items() if not np.abs(y - x).max() <= 0.01 * np.abs(x).max()]


def variants(*names: str) -> Any:
    """Return a mark that tests decoders with these encodings."""
    return pytest.mark.parametrize("variant", choice(names, names, grouped=True))


@variants("rope", "alibi", "fox")
def test_outputs_are_those_of_the_cpu(variant: str, bindings: list[str]) -> None:
    folder = artefact(decoder(variant), "ort-cuda")
    assert differing(on_fake_device(folder), folder) == []


@variants("rope", "alibi", "recurrent")
def test_replayed_graphs_give_the_outputs_of_the_cpu(variant: str, bindings: list[str]) -> None:
    folder = artefact(decoder(variant), "ort-cuda")
    model, session = capturing(folder)
    assert differing(model, folder) == []
    assert len(set(session.replays)) > 3 and len(session.replays) > len(session.captured)


@pytest.mark.xdist_group("rope")
def test_a_graph_that_is_replayed_for_other_caches_is_found(
    bindings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: ids that depend on the number of rows alone."""
    folder = artefact(decoder("rope"), "ort-cuda")
    monkeypatch.setattr(DeviceSteps, "id_of", lambda self, bound: bound[0][0][2][0])
    assert "fork" in differing(capturing(folder)[0], folder)


@pytest.mark.xdist_group("rope")
def test_steps_of_later_texts_replay_the_graph_of_the_first(bindings: list[str]) -> None:
    folder = artefact(decoder("rope"), "ort-cuda")
    model, fake = capturing(folder)
    session = model.session()
    for _ in range(3):
        session.reset()
        session.prefill(np.zeros((1, 5), np.int64))
        session.step(np.zeros(1, np.int64))
    assert list(fake.captured) == [1] and fake.replays == [1, 1]


@pytest.mark.xdist_group("rope")
def test_a_capture_that_fails_runs_uncaptured_with_one_warning(bindings: list[str]) -> None:
    folder = artefact(decoder("rope"), "ort-cuda")
    with pytest.warns(RuntimeWarning) as warned:
        assert differing(capturing(folder, fails=True)[0], folder) == []
    assert [str(one.message) for one in warned] == [
        "runtime: expected steps that can be captured as a CUDA graph, got CUDA failure 900: "
        "operation not permitted when stream is capturing; "
        "steps run without it; give load capture=False to do so from the start"
    ]


def test_ids_are_those_of_equal_addresses_and_end_at_the_limit() -> None:
    steps = DeviceSteps(None, captures=True)
    steps.most = 2
    assert [steps.id_of((name, 1)) for name in "abacb"] == [1, 2, 1, UNCAPTURED, 2]


@pytest.mark.xdist_group("alibi")
def test_a_step_binds_nothing_and_copies_its_inputs_together(bindings: list[str]) -> None:
    folder = artefact(decoder("alibi"), "ort-cuda")
    session = on_fake_device(folder).session()
    session.prefill(np.zeros((1, 5), np.int64))
    session.step(np.zeros(1, np.int64))
    bindings.clear()
    FakeMemory.written = 0
    session.step(np.zeros(1, np.int64))
    assert bindings == [] and FakeMemory.written == 1


@pytest.mark.xdist_group("rope")
def test_a_step_that_reads_an_input_on_both_sides_binds_anew(bindings: list[str]) -> None:
    folder = artefact(decoder("rope"), "ort-cuda")
    model = on_fake_device(folder)
    model.graph.reads_device = False  # as for artefacts of earlier versions with a bias
    session = model.session()
    session.prefill(np.zeros((1, 5), np.int64))
    session.step(np.zeros(1, np.int64))
    bindings.clear()
    session.step(np.zeros(1, np.int64))
    assert "input_ids" in bindings


@pytest.mark.xdist_group("fox")
def test_rows_that_come_and_go_do_not_move_caches_over_the_host(bindings: list[str]) -> None:
    folder = artefact(decoder("fox"), "ort-cuda")
    session = on_fake_device(folder).session(batch=2, capacity=200)
    session.prefill(np.zeros((2, 5), np.int64))
    session.step(np.zeros(2, np.int64))
    FakeMemory.moved = 0
    session.rewind(2)
    session.fork()
    session.retire(0)
    session.reset()
    assert FakeMemory.moved == 0


@pytest.mark.xdist_group("recurrent")
def test_states_that_each_call_replaces_are_copied_on_the_device(bindings: list[str]) -> None:
    folder = artefact(decoder("recurrent"), "ort-cuda")
    session = on_fake_device(folder).session(batch=3)
    session.prefill(np.zeros((2, 5), np.int64))
    session.step(np.zeros(2, np.int64))
    FakeMemory.moved, FakeMemory.written = 0, 0
    session.step(np.zeros(2, np.int64))  # the third row keeps its state
    assert FakeMemory.written == 1  # the inputs
    FakeMemory.moved = 0
    session.fork()
    assert FakeMemory.moved == 0


def test_keys_and_values_of_an_encoder_are_copied_to_the_device_once(
    tmp_path: Path, bindings: list[str]
) -> None:
    module = own_modules.seeded(own_modules.READING)
    example, memory = own_modules.inputs(module, 2, 12), own_modules.ReadsEncoder.memory
    how = ReadAs(example, own_modules.POSITIONS, memory=memory)
    export(Sources(module, how=how), "ort-cuda", tmp_path / "artefact", verify=False)
    results, folder = [], tmp_path / "artefact"
    for model in (load(folder, provider="cpu", threads=1), on_fake_device(folder)):
        session = model.session(batch=2)
        session.prefill(np.zeros((2, 3), np.int64), encoder=encoder_rows(model.manifest, 2))
        session.step(np.zeros(2, np.int64))
        FakeMemory.moved = 0
        results.append(session.step(np.ones(2, np.int64)).astype(np.float32))
    np.testing.assert_allclose(results[1], results[0], atol=0.01 * np.abs(results[0]).max())
    assert 0 < FakeMemory.moved <= 5 * cuda_steps.ALIGNMENT  # one for each input that changes
