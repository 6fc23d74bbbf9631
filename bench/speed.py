"""Compare the speed of blocks and decoders with hand-written graphs and other runtimes; write bench/results/speed.json and docs/speed.md.

    python -m bench.speed [--only PART] [--without RUNTIME] [--json bench/results/speed.json] [--markdown docs/speed.md]

Each part is measured in one run, in which its contestants take turns, and replaces that part of the JSON file. Artefacts are exported once to --artefacts and
used again by later runs; remove that folder after a change to the export. onnxruntime-genai, openvino and transformers take part if they are installed.
"""

import argparse
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

from bench import speed_page
from posenc_export.benchmark import Report, run
from posenc_export.benchmark.runtimes import RUNTIMES
from posenc_export.models.config import AnyConfig
from posenc_export.models.short import block_config, decoder_config
from posenc_export.runtime.providers import AOTINDUCTOR, OPENVINO
from posenc_export.terminal import Progress

ENCODINGS = ("rope", "alibi", "t5", "nope")


@dataclass(frozen=True)
class Part:
    """Models of one size, one for each of ENCODINGS.

    Args:
        targets: targets of the model with rope; the others are exported for `ort`. Target aotinductor is compiled from the artefact of pt2 before it.
        contexts: tokens in the cache at decode.
        prompts: tokens of a prompt at prefill.
        runtimes: other runtimes, which take part if they are installed.
        seconds: time per contestant and number of tokens.
        providers: further providers of the artefacts; those of OpenVINO take part if openvino is installed.
    """

    targets: Tuple[str, ...]
    contexts: Tuple[int, ...]
    prompts: Tuple[int, ...]
    runtimes: Tuple[str, ...]
    seconds: float
    providers: Tuple[str, ...] = ()


LOADERS = ("genai", "openvino")  # runtimes that load an artefact folder of signature mask
PARTS: Dict[str, Part] = {
    "block": Part(
        ("ort", "onnx", "onnx-static", "torchscript", "pt2", AOTINDUCTOR), (128, 1024, 8192), (1024,), ("hand-written", "hand-written-torchscript"), 1.5, (AOTINDUCTOR,)
    ),
    "layers": Part(("ort", "onnx", "onnx-static", "torchscript"), (128, 1024), (1024,), ("hand-written", "transformers", *LOADERS), 1.5, OPENVINO),
    "model": Part(("ort",), (128, 1024), (1024,), ("hand-written", "transformers", *LOADERS), 3.0),
}


def described(part: str, encoding: str) -> AnyConfig:
    """Return the model of a part: a block of width 512 with 8 heads, a decoder of 4 layers of width 256, or one of Llama's architecture with 134M parameters."""
    spec = {"name": encoding}
    if part == "block":
        return block_config(512, 8, 16384, encoding=spec)
    if part == "layers":
        return decoder_config(4096, 4, 704, block_config(256, 4, 2048, encoding=spec))
    return decoder_config(49152, 30, 1536, block_config(576, 9, 2048, kv_heads=3, encoding=spec))


def exported(part: str, folder: Path, runtimes: Sequence[str], say: Progress) -> List[Path]:
    """Export the artefacts of a part, unless they exist, and return their folders, named by encoding and target."""
    from posenc_export.export import Sources, compile_artefact, export
    from posenc_export.models.presets import seeded

    wanted = [("rope", target, "positions") for target in PARTS[part].targets] + [(name, "ort", "positions") for name in ENCODINGS if name != "rope"]
    wanted += [("rope", target, "mask") for name, target in (("genai", "ort"), ("openvino", "onnx")) if name in runtimes]
    made: Dict[str, Sources] = {}
    paths = []
    for encoding, target, signature in wanted:
        path = folder / part / "-".join((encoding, target, *(["mask"] if signature == "mask" else [])))
        paths.append(path)
        if path.is_dir():
            continue
        say(f"export {part} {path.name}")
        if target == AOTINDUCTOR:
            compile_artefact(path.with_name(f"{encoding}-pt2"), path)
            continue
        if encoding not in made:
            made = {encoding: Sources(seeded(described(part, encoding)))}  # only one model at a time, because models have up to 540 MB
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.onnx and torch.jit warn at every export
            export(made[encoding], target, path, signature=signature, verify=target == "pt2")  # only verified artefacts are compiled
    return paths


def measured(name: str, folder: Path, threads: int, without: Sequence[str], say: Progress) -> Report:
    """Measure all contestants of a part in one run. without: names of runtimes to omit."""
    part = PARTS[name]
    runtimes = [runtime for runtime in part.runtimes if runtime not in without and not RUNTIMES[runtime].missing()]
    folders = exported(name, folder, runtimes, say)
    absent = OPENVINO if "openvino" in without or RUNTIMES["openvino"].missing() else ()
    providers = [provider for provider in part.providers if provider not in absent]
    works = part.contexts, part.prompts
    return run(folders, runtimes, *works, threads=threads, seconds=part.seconds, different_models=True, providers=providers, progress=say)


def main(arguments: Sequence[str]) -> int:
    """Measure the parts and write the results; return exit status 0, or 1 if disturbed samples had to be kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="measure only this part; may be given several times (default: all)")
    parser.add_argument("--without", action="append", default=[], choices=RUNTIMES, help="omit this runtime; may be given several times")
    parser.add_argument("--json", type=Path, default=Path("bench/results/speed.json"))
    parser.add_argument("--markdown", type=Path, default=Path("docs/speed.md"))
    parser.add_argument("--artefacts", type=Path, default=Path("build/speed"))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    say, disturbed = Progress(), 0
    for name in options.only or PARTS:
        report = measured(name, options.artefacts, options.threads, options.without, say)
        say.close()
        print(f"{name}\n{report.table()}", flush=True)
        reports = {**committed(options.json), name: report}
        options.json.write_text(json.dumps({part: each.to_json() for part, each in reports.items()}, indent=1) + "\n", encoding="utf-8")
        options.markdown.write_text(speed_page.page(reports), encoding="utf-8")
        disturbed += report.disturbed
    return 1 if disturbed else 0


def committed(path: Path) -> Dict[str, Report]:
    """Return the reports of a JSON file by part; an empty dict if the file does not exist."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: Report.from_json(report) for name, report in content.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
