"""No file of a checkpoint folder runs, imports, fetches or writes anything, and none takes memory
or time beyond its size. Every attack is read, or refused in one line.
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from posenc_export.models.pretrained import from_pretrained
from tests.attacks.folders import attacks

pytest.importorskip("gguf", reason="gguf is not installed")
ATTACKS = attacks()
KINDS = sorted({name.split()[0] for name in ATTACKS})
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.", "os.remove")
LONGEST, SECONDS, MEMORY = 1500, 30.0, 1 << 20  # characters; on a busy machine; in KiB
HEARD: list[str] = []
WATCHED: list[Path] = []  # the folder of the attack that is read


def _hear(event: str, arguments: Any) -> None:
    if not WATCHED:
        return
    if event.startswith(FORBIDDEN):
        HEARD.append(f"{event} {arguments!r:.200}")
    if event == "open" and isinstance(arguments[0], (str, Path)):
        path, written = Path(arguments[0]), str(arguments[1] or "r")[0] in "wax+"
        if written or path.name == "secret" or path.name.startswith("evil"):
            HEARD.append(f"opened {path} {arguments[1]}")


@pytest.fixture(scope="module", autouse=True)
def hook() -> None:
    sys.addaudithook(_hear)


def _wrong(path: Path, trace: Path) -> list[str]:
    """Read an attack, and return what is wrong."""
    HEARD.clear()
    begun, wrong = time.monotonic(), list[str]()
    WATCHED.append(path)
    try:
        from_pretrained(path)
    except ValueError as error:
        text = str(error)
        if not text.isprintable() or ": expected " not in text or len(text) > LONGEST:
            wrong.append(f"not one line: {text!r:.300}")
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error!s:.200}")
    finally:
        WATCHED.clear()
    if time.monotonic() - begun > SECONDS:
        wrong.append("more time than it may")
    return wrong + HEARD + (["the attack succeeded"] if trace.exists() else [])


@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_on_a_checkpoint_succeeds(kind: str, tmp_path: Path) -> None:
    findings = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index, (name, write) in enumerate(ATTACKS.items()):
        if name.split()[0] == kind:
            folder, trace = tmp_path / str(index) / "attack", tmp_path / str(index) / "trace"
            folder.mkdir(parents=True)
            findings += [f"{name}: {text}" for text in _wrong(write(folder, trace), trace)]
    assert not findings, "\n".join(findings)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
