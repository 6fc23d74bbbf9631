"""The zoo as artefacts: sessions of every target give what the modules give on sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from posenc_export import load
from posenc_export.export import ExportOptions, ReadAs, export_all
from posenc_export.shared.numerics import tolerance
from tests.cases import choice
from tests.reading.compare import outputs
from tests.reading.test_zoo import by_name, sequence
from tests.reading.zoo import OPTIONS, ZOO

pytestmark = [
    pytest.mark.xdist_group("zoo on targets"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
TOLERANCE = tolerance("float32", depth=2, reduction=64)
TARGETS = ["onnx", "onnx-static", "ort", "ort-native", "torchscript"]
QUICK = ["shift-by-pad", "padding-as-bias"]
CERTIFIED = [
    ("window-beside-first", "positions"),
    ("window-beside-first", "mask"),
    ("contextual-positions", "positions"),
]


@pytest.mark.parametrize("name", by_name(QUICK))
def test_sessions_of_all_targets_give_what_the_module_gives(name: str, tmp_path: Path) -> None:
    module, example, positions = ZOO[name]()
    x = sequence(example)
    with torch.no_grad():
        wanted = outputs(module, x).numpy()
    how = ReadAs(example, positions, **OPTIONS[name])
    export_all(module, TARGETS, tmp_path / "made", ExportOptions(verify=False), read=how)
    for target in TARGETS:
        error = session_error(tmp_path / "made" / target, x.numpy(), wanted)
        assert error <= TOLERANCE, target


@pytest.mark.parametrize(("name", "signature"), choice(CERTIFIED, CERTIFIED[1:]))
def test_a_module_of_the_zoo_is_certified(name: str, signature: str, tmp_path: Path) -> None:
    module, example, positions = ZOO[name]()
    options, how = ExportOptions(signature), ReadAs(example, positions, **OPTIONS[name])
    (made,) = export_all(module, ["ort"], tmp_path / "made", options, read=how)
    assert made.certificate is not None and made.certificate["passed"]


def session_error(folder: Path, x: np.ndarray, wanted: np.ndarray) -> float:
    """Largest error, relative to the largest output, of a prompt, steps and a chunk of one row, and
    of a prompt and steps of two rows of different lengths.
    """
    model = load(folder)
    session = model.session()
    found = [session.prefill(x[:1, :7])]
    found += [session.step(x[:1, i])[:, None] for i in range(7, 15)]
    found.append(session.prefill(x[:1, 15:]))
    pairs = [(np.concatenate(found, axis=1)[0], wanted[0])]
    session = model.session()
    prompt = session.prefill([x[0, :9], x[1, :4]])
    pairs += [(prompt[0], wanted[0, :9]), (prompt[1, :4], wanted[1, :4])]
    for i in range(4):
        y = session.step(np.stack((x[0, 9 + i], x[1, 4 + i])))
        pairs += [(y[0], wanted[0, 9 + i]), (y[1], wanted[1, 4 + i])]
    return max(float(np.abs(y - want).max()) for y, want in pairs) / float(np.abs(wanted).max())
