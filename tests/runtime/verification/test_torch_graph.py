"""The check "indices" of TorchScript and torch.export files: their own graphs are proved, and no
fault in their slots, positions or masks stays hidden.
"""

import json
from pathlib import Path
from typing import Any, Callable, Dict

import pytest

from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.read_module import as_model
from posenc_export.runtime import load
from posenc_export.runtime.artefact.archive import packed, read_entries
from posenc_export.runtime.verification import indices
from posenc_export.runtime.verification.claims import OPEN
from tests.cases import combinations
from tests.reading import own_modules
from tests.runtime.verification.test_indices import MASKS, checked, seeing, written
from tests.tiny import encoder
from tests.traces import sources

FILES = {"torchscript": "model.pt", "pt2": "model.pt2"}


def proved(result: Any) -> bool:
    """Return whether claims are proved, none is refuted, and none is open."""
    reasons = result.skipped.values()
    return result.compared > 3 and not result.failures and not any(OPEN in why for why in reasons)


@pytest.mark.parametrize(
    ("variant", "target", "mask", "signature"),
    combinations(
        ["rope", "alibi", "shaw", "rope_dynamic"],
        list(FILES),
        list(MASKS),
        ["positions", "mask"],
        besides=[("rope", "torchscript", "chunk", "mask"), ("alibi", "pt2", "window", "positions")],
    ),
)
def test_claims_of_an_honest_decoder_are_proved(
    variant: str, target: str, mask: str, signature: str, tmp_path: Path
) -> None:
    assert proved(checked(written(tmp_path, variant, target, mask, signature)))


@pytest.mark.parametrize("target", FILES)
def test_claims_of_an_honest_encoder_are_proved(target: str, tmp_path: Path) -> None:
    config = seeing(encoder("t5"), {"name": "near", "reach": 4})
    export(sources(config), target, tmp_path / "a", verify=False)
    assert proved(checked(tmp_path / "a"))


@pytest.mark.parametrize("target", FILES)
def test_the_mask_of_a_module_that_is_read_is_proved(target: str, tmp_path: Path) -> None:
    module = own_modules.seeded("a window")
    how = ReadAs(own_modules.inputs(module, 2, 16), own_modules.POSITIONS)
    export(Sources(as_model(module, how)), target, tmp_path / "a", verify=False)
    assert proved(checked(tmp_path / "a"))


def test_branches_by_the_values_of_positions_are_both_read(tmp_path: Path) -> None:
    path = written(tmp_path, "rope_dynamic", "torchscript")
    assert b"torch.lt(int(torch.max(" in b"".join(read_entries_of(path).values())
    assert proved(checked(path))


def read_entries_of(path: Path) -> Dict[str, bytes]:
    return read_entries((path / "model.pt").read_bytes())


def code(old: str, new: str) -> Callable[[Dict[str, bytes]], Dict[str, bytes]]:
    """Return a change of the code of a TorchScript file."""

    def change(entries: Dict[str, bytes]) -> Dict[str, bytes]:
        changed = {name: part.replace(old.encode(), new.encode()) for name, part in entries.items()}
        assert changed != entries
        return changed

    return change


def argument(target: str, index: int, value: Any, number: int = 0) -> Any:
    """Return a change of an argument of a node of a torch.export program."""

    def change(entries: Dict[str, bytes]) -> Dict[str, bytes]:
        (name,) = (name for name in entries if name.endswith("models/model.json"))
        program = json.loads(entries[name])
        nodes = program["graph_module"]["graph"]["nodes"]
        node = [node for node in nodes if node["target"].endswith(target)][number]
        assert node["inputs"][index]["arg"] != value
        node["inputs"][index]["arg"] = value
        return {**entries, name: json.dumps(program).encode()}

    return change


ROWS, USED = "torch.clamp(position_ids0, 0)", "torch.sum(torch.ge(past_positions, 0), [1])"
LATE = "torch.add({0}, torch.to(torch.gt({0}, {1}), 4))"
FIRST = "torch.expand(torch.slice({0}, 0, 0, 1), [torch.size(past_positions, 0)])"
FAULTS: Dict[str, Any] = {
    "window one longer": ("torchscript", "window", code("queries, 8)", "queries, 9)")),
    "window one shorter": ("torchscript", "window", code("queries, 8)", "queries, 7)")),
    "chunk one longer": ("torchscript", "chunk", code(", 12, ", ", 13, ")),
    "causal mask one short": ("torchscript", "causal", code("torch.le(keys", "torch.lt(keys")),
    "padding is seen": ("torchscript", "causal", code("torch.ge(keys, 0)", "torch.ge(keys, -1)")),
    "rows shift from 300 on": ("torchscript", "causal", code(ROWS, LATE.format(ROWS, 299))),
    "slots shift from 41 on": ("torchscript", "causal", code(USED, LATE.format(USED, 40))),
    "slot of one token": (
        "torchscript", "causal", code("eeze(_0, 1)", "eeze(torch.add(_0, 1), 1)"),
    ),
    "slots of several tokens": (
        "torchscript", "causal", code("torch.add(_2, ", "torch.add(torch.add(_2, 1), ")
    ),
    "first row's length": ("torchscript", "causal", code(USED, FIRST.format(USED))),
    "padding of a mask is a key": ("torchscript", "causal", code(", 0), -1)", ", 0), 0)"), "mask"),
    "window of pt2 one longer": ("pt2", "window", argument("sub.Tensor", 1, {"as_int": 9})),
    "chunk of pt2 one longer": ("pt2", "chunk", argument("div.Tensor_mode", 1, {"as_int": 13})),
    "rows of pt2 one on": ("pt2", "causal", argument("clamp.default", 1, {"as_int": 1})),
    "past of pt2 with padding": ("pt2", "causal", argument("ge.Scalar", 1, {"as_int": -1})),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_written_file_is_found(fault: str, tmp_path: Path) -> None:
    target, mask, change, *signature = FAULTS[fault]
    path = written(tmp_path, "rope", target, mask, *signature)
    model, file = load(path, threads=1), path / FILES[target]
    file.write_bytes(packed(change(read_entries(file.read_bytes()))))
    assert indices.check(path, model).failures


def test_a_program_that_writes_otherwise_is_not_called_proved(tmp_path: Path) -> None:
    path = written(tmp_path, "rope", "torchscript", "window")
    model, change = load(path, threads=1), code("torch.sub(queries, 8)", "torch.sub_(queries, 8)")
    (path / "model.pt").write_bytes(packed(change(read_entries_of(path))))
    result = indices.check(path, model)
    assert "sub_, which writes" in result.skipped["positions"] and not result.failures
