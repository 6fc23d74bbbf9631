"""Artefacts after random edits: with the old digests none loads. With all digests recomputed, each
is refused in one line, fails verification, or gives the outputs that it gave before.
"""

import contextlib
import functools
import json
import shutil
from pathlib import Path
from random import Random
from typing import Any, Callable

import numpy as np
import pytest

from posenc_export.runtime import GraphError, load, verify
from posenc_export.runtime.artefact.manifest import FILE_NAME
from posenc_export.shared.numerics import worst_error
from tests.fuzz.edits import edited, reseal
from tests.tiny import block
from tests.traces import artefact

TOGETHER = 20  # edits of a test
# Verification reads inputs of at most sqrt(3); those here are up to twice as large.
REACH = 2.0
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 50))]


def _outputs(folder: Path) -> list[np.ndarray] | None:
    """Return the outputs of a few calls; None if one is refused."""
    try:
        session = load(folder, provider="cpu", threads=1).session()
        x = np.random.default_rng(7).standard_normal((2, 20, 48), np.float32)
        results = [session.prefill(x[:, :9], start=[3, 11]), session.prefill(x[:, 9:13], chunk=3)]
        session.rewind([2, 0])
        return [*results, *(session.step(x[:, 13 + index]) for index in range(3))]
    except (ValueError, GraphError):
        return None


def _is_refused(call: Callable[[], Any]) -> bool:
    """Return whether a call is refused. Any other error than ours is raised."""
    try:
        call()
    except (ValueError, RuntimeError) as refusal:
        line = str(refusal)
        assert line.startswith(("artefact ", "runtime: ", "session: ", "verify: ")), line
        assert "\n" not in line and len(line) < 2000
        return True
    return False


def _contents(folder: Path) -> dict[str, Any]:
    """Return the contents of all files; of the manifest its values."""
    contents: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    with contextlib.suppress(KeyError, ValueError, RecursionError):
        contents[FILE_NAME] = json.loads(contents[FILE_NAME])
    return contents


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", ["ort", "torchscript"])
def test_an_edited_artefact_is_refused_fails_verification_or_gives_the_same_outputs(
    target: str, seed: int, tmp_path: Path
) -> None:
    source = artefact(block("nope", max_positions=64), target)
    expected = _outputs(source)
    assert expected is not None
    for number in range(TOGETHER):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        name = edited(folder, Random(f"{seed} {number}"))
        if _contents(folder) == _contents(source):
            continue
        opened = functools.partial(load, folder, provider="cpu", threads=1)
        assert _is_refused(opened), (number, name)
        reseal(folder)
        proved: list[Any] = []
        if _is_refused(opened) or _is_refused(
            lambda into=proved, of=folder: into.append(verify(of, provider="cpu", record=False))  # type: ignore[misc]
        ):
            continue
        if proved[0]["passed"]:
            pairs = zip(_outputs(folder) or (), expected, strict=True)
            bound = REACH * proved[0]["tolerance"]
            assert all(worst_error(*pair) <= bound for pair in pairs), (number, name)
