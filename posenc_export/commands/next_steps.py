"""What `posenc export` prints below its table: sizes of the artefacts, and commands to run next."""

from pathlib import Path
from typing import Dict, Iterable, List

from posenc_export.runtime.artefact import rules, tokenizer
from posenc_export.runtime.artefact.manifest import Manifest

PROGRAMS = {"model.onnx": ("python", "run.py"), "model.pt": ("libtorch", "run.cpp")}
TOKENIZER = "tokenizer.json"


def sizes(manifests: Iterable[Manifest]) -> List[str]:
    """Return a line for each artefact: positions, slots of caches and opset."""
    lines = []
    for manifest in manifests:
        parts = [f"{manifest.target}: positions 0 .. {manifest.max_positions - 1}"]
        if manifest.in_place:
            parts.append(f"caches of at most {manifest.max_positions} slots")
        elif any(state.grows for state in manifest.states):
            parts.append("caches that grow")
        if manifest.opset:
            opset = [f"{domain or 'ai.onnx'} {number}" for domain, number in manifest.opset.items()]
            parts.append(f"opset {' and '.join(opset)}")
        lines.append(", ".join(parts))
    return lines


def next_steps(manifests: Dict[Path, Manifest]) -> List[str]:
    """Return commands for artefacts by folder: check the last of them, run it, and time all."""
    folder, manifest = list(manifests.items())[-1]
    cuda = manifest.target.endswith("-cuda")
    lines = [
        f"posenc verify {folder}{' --provider cuda' if cuda else ''}",
        _run(folder, manifest),
        f"posenc bench {' '.join(map(str, manifests))}",
    ]
    return ["next:", *(f"  {line}" for line in lines if line)]


def _run(folder: Path, manifest: Manifest) -> str:
    """Return the command that runs an artefact; empty if no command does."""
    if "sentence_embedding" in [output.name for output in manifest.outputs]:
        return f"posenc embed {folder} texts.txt"
    if manifest.encoder:
        return f"posenc generate {folder} --encoder FOLDER --prompt 'text for the encoder'"
    readable = manifest.vocabulary == tokenizer.BYTES or TOKENIZER in manifest.files
    if manifest.kind == "decoder" and readable:
        return f"posenc generate {folder} --prompt 'Once upon a time'"
    if rules.graph_file(manifest) in PROGRAMS:
        language, program = PROGRAMS[rules.graph_file(manifest)]
        return f"posenc inspect {folder} --runtime {language} > {program}"
    return ""
