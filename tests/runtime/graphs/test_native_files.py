"""Artefacts with native code are loaded only by name, and only where they were compiled. No test
here compiles or runs native code.
"""

import shutil
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
from msgspec.structs import replace

from posenc_export.benchmark import contestants
from posenc_export.commands.cli import main
from posenc_export.export import compile_artefact, export
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files, machine
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.machine import Compiled
from posenc_export.runtime.artefact.manifest import Manifest
from tests.tiny import block
from tests.traces import sources

pytestmark = pytest.mark.xdist_group("native code")  # one worker, which exports for them once
NAME = "model.native.pt2"
Change = Callable[[Manifest], Manifest]


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "pt2"
    export(sources(block("rope")), "pt2", folder, verify=False)
    return folder


@pytest.fixture
def native(portable: Path, tmp_path: Path) -> Path:
    """An artefact as `posenc compile` writes it, with other bytes in place of the code."""
    folder = tmp_path / "native"
    shutil.copytree(portable, folder)
    (folder / "model.pt2").rename(folder / NAME)
    (folder / NAME).write_bytes(b"no code")
    read = manifests.read(portable)
    kept = {name: listed for name, listed in read.files.items() if name != "model.pt2"}
    compiled = machine.on_this_machine(read.digest)
    manifests.write(
        read.replace(
            target="aotinductor",
            compiled=compiled,
            files={**kept, NAME: files.entry(folder / NAME)},
        ),
        folder,
    )
    return folder


def _changed(folder: Path, change: Change) -> Path:
    manifests.write(change(manifests.read_alone(folder)), folder)
    return folder


@pytest.mark.parametrize("provider", ["auto", "cpu", "cuda", "openvino"])
def test_native_code_is_not_loaded_without_its_provider(provider: str, native: Path) -> None:
    with pytest.raises(
        ValueError,
        match=f"expected provider aotinductor for target aotinductor, got {provider}; give "
        "aotinductor only if you trust the origin",
    ):
        load(native, provider=provider)


def test_native_code_is_not_timed_without_its_provider(native: Path) -> None:
    with pytest.raises(
        ValueError, match="expected provider aotinductor for target aotinductor, got cpu"
    ):
        contestants.gather([native], ())
    assert [
        each.provider for each in contestants.gather([native], (), providers=("aotinductor",))
    ] == ["aotinductor"]


def test_the_provider_of_native_code_is_refused_for_other_targets(portable: Path) -> None:
    with pytest.raises(
        ValueError,
        match="expected target aotinductor for provider aotinductor, got pt2; compile a pt2 "
        "artefact with `posenc compile`",
    ):
        load(portable, provider="aotinductor")


def _with(**fields: Any) -> Callable[[Compiled], Compiled]:
    return lambda compiled: replace(compiled, **fields)


OTHERS: Dict[str, Callable[[Compiled], Compiled]] = {
    r"expected torch 2\.9\.1 that the native code was compiled for, got 2\.": _with(torch="2.9.1"),
    r"expected the processor Some Processor that the native code was compiled for, got ": _with(
        processor="Some Processor"
    ),
    (
        r"expected the instruction sets that the native code was compiled for, got a processor "
        r"without zz1"
    ): lambda made: replace(made, instructions=[*made.instructions, "zz1"]),
    (
        r"expected the instruction sets that the native code was compiled for, got a processor "
        r"with [a-z0-9_]+"
    ): lambda made: replace(made, instructions=made.instructions[1:]),
}


@pytest.mark.parametrize("message", OTHERS)
def test_native_code_of_another_machine_is_refused(message: str, native: Path) -> None:
    _changed(native, lambda read: read.replace(compiled=OTHERS[message](read.compiled)))
    with pytest.raises(
        ValueError, match=f"runtime: {message}.*; run `posenc compile` again on this machine"
    ):
        load(native, provider="aotinductor")


def test_native_code_is_compared_with_its_digest_before_it_is_loaded(native: Path) -> None:
    (native / NAME).write_bytes(b"other code")
    with pytest.raises(
        ValueError, match=f"expected {NAME} with 7 bytes and sha256 .*, got 10 bytes"
    ):
        load(native, provider="aotinductor")


def test_a_damaged_package_is_refused_in_one_line(native: Path) -> None:
    with pytest.raises(
        ValueError, match=f"runtime: {NAME}: expected a zip archive, got .*; export again"
    ) as refusal:
        load(native, provider="aotinductor")
    assert "\n" not in str(refusal.value)


def test_inspect_shows_what_native_code_was_compiled_from(
    native: Path, portable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(native)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"compiled from the pt2 artefact {manifests.read(portable).digest}, for "
        f"{machine.processor()} and torch 2."
    ) in said and "proof none: not verified" in said


CONTRADICTIONS: Dict[str, Change] = {
    "compiled exactly for target aotinductor, got none for target aotinductor": lambda read: (
        read.replace(compiled=None)
    ),
    "files to hold one graph, model.pt2 for target pt2": lambda read: read.replace(
        target="pt2", compiled=None
    ),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_manifest_that_contradicts_its_native_code_is_refused(message: str, native: Path) -> None:
    _changed(native, CONTRADICTIONS[message])
    with pytest.raises(ValueError, match=f"expected {message}"):
        load(native, provider="aotinductor")


def test_a_missing_compiler_is_named_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["compile", str(tmp_path / "missing"), "-o", str(tmp_path / "made")]) == 2
    assert (
        "posenc: compile: expected the C++ compiler no-such-compiler, got none of this name; "
        "install it"
    ) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_native_code_is_not_written_into_an_artefact(
    portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "sh")  # any program; nothing is compiled
    shutil.copytree(portable, tmp_path / "a")
    _changed(tmp_path / "a", lambda read: read.replace(certificate=PASSED))
    with pytest.raises(ValueError, match="outside any artefact, got .*native in the artefact"):
        compile_artefact(tmp_path / "a", tmp_path / "a" / "native")


PASSED = {
    "passed": True,
    "tolerance": 1e-6,
    "provider": "cpu",
    "machine": "a processor",
    "cells": {"a cell": 0.0},
}
REFUSED: Dict[str, Change] = {
    "expected a verified artefact, got .* without a passed certificate": lambda read: read,
    "expected a verified artefact, got .* without a passed certificate; export": lambda read: (
        read.replace(certificate={**PASSED, "passed": False})
    ),
    "expected a folder other than that of the pt2 artefact": lambda read: read.replace(
        certificate=PASSED
    ),
    "expected an artefact of target pt2, got target torchscript; export with --target pt2": (
        lambda read: read.replace(target="torchscript", files={"model.pt": read.files["model.pt2"]})
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_only_verified_artefacts_of_target_pt2_are_compiled_and_never_in_place(
    message: str, portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "sh")  # any program; nothing is compiled
    folder = tmp_path / "a"
    shutil.copytree(portable, folder)
    _changed(folder, REFUSED[message])
    with pytest.raises(ValueError, match=f"compile: {message}"):
        compile_artefact(folder, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
