"""Kill the replacement of an artefact at every system call that changes files: `python -m
tests.runtime.artefact.strace_kills`. Needs strace; run by hand.

test_publish.py kills between the operations that Python's audit events report; this program kills
before system calls.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.manifest import Manifest, Value

CALLS = ("write", "fsync", "mkdir", "rename", "renameat2", "unlink", "unlinkat", "rmdir")
MOST = 400  # most occurrences of one system call; an export makes far fewer


def _artefact(folder: Path, content: bytes) -> Path:
    """Write a folder that manifests.read accepts; its graph is never loaded."""
    folder.mkdir()
    values = [
        Value(name, "float32", ("batch_size", "sequence_length", 8))
        for name in ("hidden_states", "output")
    ]
    config = {"kind": "block", "width": 8, "max_positions": 16}
    (folder / "model.onnx").write_bytes(content)
    manifest = Manifest(
        "block",
        "onnx",
        "positions",
        "float32",
        "columns",
        config,
        values[:1],
        values[1:],
        [],
        16,
        0,
        0,
        False,
    )
    manifests.write(
        manifest.replace(files={"model.onnx": files.entry(folder / "model.onnx")}), folder
    )
    return folder


def publish(source: Path, place: Path) -> None:
    """Publish a folder like an export, without importing torch."""
    path = Path(manifests.__file__).with_name("publish.py")
    specification = importlib.util.spec_from_file_location("publish", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    staging = module.StagingFolder([place])
    with staging as folder:
        result = folder / "made"
        result.mkdir()
        files.write(result / "model.onnx", (source / "model.onnx").read_bytes())
        manifests.write(manifests.read(source), result)
        staging.publish([result])


def main() -> int:
    """Return the number of kills, or report the first that left a broken artefact."""
    if shutil.which("strace") is None:
        print("skipped: strace is not installed")
        return 0
    kills = 0
    with tempfile.TemporaryDirectory() as temporary:
        parent = Path(temporary)
        old, new, place = (
            _artefact(parent / "old", b"old"),
            _artefact(parent / "new", b"new"),
            parent / "out" / "artefact",
        )
        for call in CALLS:
            for number in range(1, MOST):
                shutil.rmtree(parent / "out", ignore_errors=True)
                publish(old, place)
                command = [
                    *"strace -f -o".split(),
                    os.devnull,
                    "-e",
                    f"trace={call}",
                    "-e",
                    f"inject={call}:signal=KILL:when={number}",
                ]
                ended = subprocess.run(
                    [
                        *command,
                        sys.executable,
                        "-m",
                        "tests.runtime.artefact.strace_kills",
                        str(new),
                        str(place),
                    ],
                    check=False,
                    capture_output=True,
                )
                if ended.returncode == 0:
                    break
                if manifests.read(place) not in (manifests.read(old), manifests.read(new)):
                    print(f"broken after a kill at {call} {number}")
                    return 1
                publish(old, place)
                if sorted(path.name for path in place.parent.iterdir()) != ["artefact"]:
                    print(f"not swept after a kill at {call} {number}")
                    return 1
                kills += 1
    print(f"{kills} kills, each left a whole artefact")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3:
        publish(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(main())
