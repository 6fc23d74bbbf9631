"""`posenc describe` and `posenc inspect` print every setting of a description."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import pytest

from posenc_export import export_model
from posenc_export.commands.cli import main
from posenc_export.models.config_json import to_json
from posenc_export.models.presets import PRESETS, seeded
from posenc_export.models.short_forms import block_config
from posenc_export.runtime.artefact.summary import lines
from tests.models.test_parts import MODELS as OF_PARTS

SMALL = block_config(16, 2, 8, encoding={"name": "rope", "theta": 500.0})


def _described() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the descriptions of models of all parts."""
    yield from (
        (name, to_json(config)) for name, (config, _) in {**OF_PARTS, "block": (SMALL, 1)}.items()
    )


def _settings(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in nested mappings and lists that is no mapping or list
    itself.
    """
    entries = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else None
    )
    if entries is None:
        yield path
    else:
        for key, value in entries:
            yield from _settings(value, (*path, key))


def _changed(values: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """Return the description with another value at a path."""
    changed = copy.deepcopy(values)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    value = place[path[-1]]
    place[path[-1]] = (
        not value
        if isinstance(value, bool)
        else {"name": "other"}
        if value is None
        else value + "s"
        if isinstance(value, str)
        else 3 * value + 5
    )
    return changed


def test_every_setting_is_printed() -> None:
    described = dict(_described())
    assert len(described) > 10
    silent: list[str] = []
    for name, values in described.items():
        printed = lines(values)
        silent += [
            f"{name}: {path}"
            for path in _settings(values)
            if lines(_changed(values, path)) == printed
        ]
    assert silent == []


def test_a_setting_that_is_new_to_the_printer_is_printed() -> None:
    values = to_json(PRESETS["tiny-rope"])
    values["layers"]["layer"]["drop"] = 0.25
    values["layers"]["layer"]["attention"]["temper"] = 0.5
    values["guard"] = 7
    assert {("  drop", "0.25"), ("guard", "7")} <= set(lines(values)) and any(
        "temper 0.5" in text for _, text in lines(values)
    )


def test_equal_layers_are_printed_once_with_their_indices() -> None:
    values = to_json(PRESETS["tiny-rope"])
    kind = values["layers"]["layer"]
    values |= {"layers": {"near": kind, "far": kind}, "order": ["near", "near", "far", "near"]}
    assert [title for title, _ in lines(values) if title.startswith("layer")] == [
        "layers 0-1, 3",
        "layer 2",
    ]


def test_values_of_an_unexpected_form_raise_no_error() -> None:
    values = to_json(PRESETS["tiny-rope"])
    for path in [
        *_settings(values),
        ("tokens",),
        ("layers",),
        ("order",),
        ("layers", "layer"),
        ("layers", "layer", "norms"),
        ("norm",),
    ]:
        for value in (None, [], {}, "\x1b[2J\n", [[[[[[[1]]]]]]], {"name": {"name": {}}}):
            changed = copy.deepcopy(values)
            place: Any = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = value
            assert all(text.isprintable() for line in lines(changed) for text in line)


def test_describe_prints_a_checkpoint_and_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    values = {"model_type": "llama", "vocab_size": 61, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))  # no weights
    for arguments, expected in (
        ([str(tmp_path)], ["name LlamaForCausalLM", "tokens vocabulary 61"]),
        (["tiny-alibi"], ["encodings [alibi", "mlp gated"]),
    ):
        assert main(["describe", *arguments]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert max(map(len, printed)) <= 100
        whole = " ".join(" ".join(printed).split())
        assert all(text in whole for text in expected)


def test_describe_refuses_an_unknown_name_in_one_line(capsys: pytest.CaptureFixture) -> None:
    assert main(["describe", "tiny-rop"]) == 2
    refused = capsys.readouterr().err
    assert "did you mean tiny-rope?" in refused and len(refused.splitlines()) == 1


def test_inspect_prints_the_layers_of_an_artefact_without_torch(tmp_path: Path) -> None:
    export_model(seeded(SMALL), "torchscript", tmp_path / "block", verify=False)
    program = (
        "import sys; from posenc_export.commands.cli import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, "inspect", str(tmp_path / "block")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sees causal" in printed
