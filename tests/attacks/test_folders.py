"""No file of a checkpoint folder runs, imports, fetches or writes anything, and none takes memory
or time beyond its size. Every attack is read, or refused in one line.
"""

import resource
import sys
import time
from pathlib import Path
from typing import Any, List

import pytest

from posenc_export.models.pretrained import from_pretrained
from tests.attacks.folders import attacks, checkpoint, code

pytest.importorskip("gguf", reason="gguf is not installed")
ATTACKS = attacks()
KINDS = sorted({name.split()[0] for name in ATTACKS})
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.", "os.remove")
LONGEST, SECONDS, MEMORY = 1500, 30.0, 1 << 20  # characters; on a busy machine; in KiB
HEARD: List[str] = []
WATCHED: List[Path] = []  # the folder of the attack that is read


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


def _wrong(path: Path, trace: Path) -> List[str]:
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


REACHING = ("_attn_implementation", "attn_implementation", "auto_map", "kernel_config")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hidden", [False, True])
def test_transformers_as_reference_imports_and_fetches_nothing(
    hidden: bool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from posenc_export.auditing.modules import of_transformers

    folder, trace = tmp_path / "attack", tmp_path / "trace"
    folder.mkdir()
    names = {"AutoConfig": "evil.Model", "AutoModel": "org/evil--evil.Model"}
    values = {**dict.fromkeys(REACHING, "org/evil"), "auto_map": names, "kernel_config": {}}
    checkpoint(folder, **values)
    code(folder, trace)
    HEARD.clear()
    WATCHED.append(folder)
    try:
        assert "Llama" in type(of_transformers(str(folder), hidden)).__name__
    finally:
        WATCHED.clear()
    assert not trace.exists() and not [
        text for text in HEARD if "opened" not in text or "evil" in text
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["pipeline"]}, "architectures to be a model of transformers, got 'pipe"),
        ({"quantization_config": {"quant_method": "gptq"}}, "without quantization_config and adap"),
    ],
)
def test_a_reference_of_transformers_that_would_load_more_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from posenc_export.auditing.modules import of_transformers

    with pytest.raises(ValueError, match=message):
        of_transformers(str(checkpoint(tmp_path, **change)), False)
