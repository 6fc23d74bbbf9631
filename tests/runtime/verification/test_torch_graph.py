"""The check "indices" of torch.export files: their own graphs are proved, and no fault in their
slots, positions or masks stays hidden.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from posenc_export.export import ReadAs, Sources, export
from posenc_export.export.read_module import as_model
from posenc_export.runtime import load
from posenc_export.runtime.artefact.archive import packed, read_entries
from posenc_export.runtime.verification import checks
from posenc_export.runtime.verification.claims import OPEN
from tests.cases import combinations
from tests.reading import own_modules
from tests.runtime.verification.test_indices import MASKS, checked, written
from tests.tiny import attending, encoder
from tests.traces import sources


def proved(result: Any) -> bool:
    """Return whether claims are proved, none is refuted, and none is open."""
    reasons = result.skipped.values()
    return result.compared > 3 and not result.failures and not any(OPEN in why for why in reasons)


@pytest.mark.parametrize(
    ("variant", "mask", "signature"),
    combinations(
        ["rope", "alibi", "shaw", "rope_dynamic", "hierarchical"],
        list(MASKS),
        ["positions", "mask"],
    ),
)
def test_claims_of_an_honest_decoder_are_proved(
    variant: str, mask: str, signature: str, tmp_path: Path
) -> None:
    assert proved(checked(written(tmp_path, variant, "pt2", mask, signature)))


def test_claims_of_an_honest_encoder_are_proved(tmp_path: Path) -> None:
    config = attending(encoder("t5"), sees={"name": "near", "reach": 4})
    export(sources(config), "pt2", tmp_path / "a", verify=False)
    assert proved(checked(tmp_path / "a"))


def test_the_mask_of_a_module_that_is_read_is_proved(tmp_path: Path) -> None:
    module = own_modules.seeded("a window")
    how = ReadAs(own_modules.inputs(module, 2, 16), own_modules.POSITIONS)
    export(Sources(as_model(module, how)), "pt2", tmp_path / "a", verify=False)
    assert proved(checked(tmp_path / "a"))


def test_torchscript_is_not_called_proved(tmp_path: Path) -> None:
    result = checked(written(tmp_path, "rope", "torchscript"))
    assert not result.compared and "not proved in TorchScript" in result.skipped["positions"]


def nodes_of(program: Any, target: str) -> Any:
    """Return the nodes of a torch.export program with an operator."""
    nodes = program["graph_module"]["graph"]["nodes"]
    return [node for node in nodes if node["target"].endswith(target)]


def argument(target: str, index: int, value: Any, number: int = 0) -> Any:
    """Return a change of an argument of a node with an operator."""

    def change(program: Any) -> None:
        of = nodes_of(program, target)[number]["inputs"][index]
        assert of["arg"] != value
        of["arg"] = value

    return change


def operator(target: str, other: str, number: int = 0) -> Any:
    """Return a change of the operator of a node."""

    def change(program: Any) -> None:
        node = nodes_of(program, target)[number]
        node["target"] = node["target"].removesuffix(target) + other

    return change


def hiding_later_keys(program: Any) -> None:
    """Let attention count columns from the first key, besides its mask."""
    for node in nodes_of(program, "attention.default"):
        node["inputs"].append({"name": "is_causal", "arg": {"as_bool": True}, "kind": 2})


FAULTS: dict[str, Any] = {
    "window one longer": ("window", argument("sub.Tensor", 1, {"as_int": 9})),
    "window one shorter": ("window", argument("sub.Tensor", 1, {"as_int": 7})),
    "chunk one longer": ("chunk", argument("div.Tensor_mode", 1, {"as_int": 13})),
    "causal mask one short": ("causal", operator("le.Tensor", "lt.Tensor")),
    "padding is seen": ("causal", argument("ge.Scalar", 1, {"as_int": -1}, 1)),
    "rows one on": ("causal", argument("clamp.default", 1, {"as_int": 1})),
    "slots one on": ("causal", operator("add.Tensor", "sub.Tensor")),
    "a mask of the operator's own": ("causal", hiding_later_keys),
}  # fmt: skip


def changed(path: Path, change: Any) -> Any:
    """Return the check of an artefact whose file was changed."""
    model, file = load(path, threads=1), path / "model.pt2"
    entries = read_entries(file.read_bytes())
    (name,) = (name for name in entries if name.endswith("models/model.json"))
    program = json.loads(entries[name])
    change(program)
    file.write_bytes(packed({**entries, name: json.dumps(program).encode()}))
    return checks.indices(path, model)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_written_file_is_found(fault: str, tmp_path: Path) -> None:
    mask, change = FAULTS[fault]
    assert changed(written(tmp_path, "rope", "pt2", mask), change).failures


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (operator("sub.Tensor", "sub_.Tensor"), "sub_, which writes"),
        (argument("ge.Scalar", 1, {"as_int": -1}), "ReduceSum of values without a known sum"),
    ],
)
def test_a_program_that_is_not_understood_is_not_called_proved(
    change: Any, why: str, tmp_path: Path
) -> None:
    result = changed(written(tmp_path, "rope", "pt2", "window"), change)
    assert any(why in text for text in result.skipped.values()) and not proved(result)
