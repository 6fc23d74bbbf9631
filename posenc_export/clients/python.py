"""Write programs in Python for ONNX Runtime and other libraries that read model.onnx."""

from dataclasses import dataclass
from string import Template
from typing import Dict, List

from posenc_export.clients.states import Group, capacity, gives, groups, heading
from posenc_export.runtime.artefact.manifest import Manifest

# By graph input: its value for a call with `new` tokens on one row that holds `held` tokens, the first of them at position `start`.
FEEDS: Dict[str, str] = {
    "input_ids": "x",
    "hidden_states": "x",
    "token_type_ids": "np.zeros_like(x)",
    "position_ids": "start + slots",
    "attention_mask": "np.ones((1, held + new), np.int64)",
    "logits_index": "np.array([[new - 1]], np.int64)",
    "cache_position": "slots",
    "first_position": "np.array([[start]], np.int64)",
    "seqlens_k": "np.array([held + new - 1], np.int32)",
    "total_sequence_length": "np.array(held + new, np.int32)",
    "slots": "np.arange(held + new)",
}
PROGRAM = Template('''"""Run model.onnx with $title and numpy alone. Written by `posenc inspect FOLDER --runtime $language`.

$heading

pip install $packages
python $usage
"""

import sys

$imports

$constants# For each state: name of the input, name of the output to feed back as that input, dtype, shape and initial value.
STATES = [
$states]


def load(folder):
$load


def empty():
    """Return the states of a row without tokens."""
    return {past: np.full(shape, fill, dtype) for past, _, dtype, shape, fill in STATES}


def call(session, states, x, held, start=0):
    """Feed x, new tokens of a row that holds `held` tokens. Return $gives, and the states for the next call."""
    new = x.shape[1]
$slots    feeds = {
$feeds    }
$run
    return output, dict(zip(states, present, strict=True))


$main

if __name__ == "__main__":
    main(*sys.argv[1:])
''')


@dataclass(frozen=True)
class Library:
    """The parts of a program that depend on the library.

    Args:
        title: name of the library.
        packages: packages to install with pip.
        imports: import statements, sorted.
        load: body of the function that opens an artefact.
        run: statements that set `output` and `present` from `feeds` and `states`.
    """

    title: str
    packages: str
    imports: str
    load: str
    run: str


BY_NAME = '    output, *present = session.run(["$output", *(name for _, name, *_ in STATES)], {**feeds, **states})'
LIBRARIES: Dict[str, Library] = {
    "python": Library(
        "ONNX Runtime",
        "onnxruntime numpy",
        "import numpy as np\nimport onnxruntime",
        """    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")  # subnormal numbers are slow
    options.log_severity_level = 3  # without this, TensorScatter logs in every call that it copies its cache
    return onnxruntime.InferenceSession(f"{folder}/model.onnx", options, providers=["CPUExecutionProvider"])""",
        BY_NAME,
    ),
    "openvino": Library(
        "OpenVINO",
        "openvino numpy",
        "import numpy as np\nimport openvino",
        """    precise = {"INFERENCE_PRECISION_HINT": "f32"}  # the default on CPUs with bfloat16 is bfloat16
    return openvino.Core().compile_model(f"{folder}/model.onnx", "CPU", precise)""",
        """    results = session({**feeds, **states})
    output, *present = (results[name].copy() for name in ["$output", *(name for _, name, *_ in STATES)])""",
    ),
    "tract": Library(
        "tract",
        "tract numpy",
        "import numpy as np\nimport tract",
        """    return tract.onnx().load(f"{folder}/model.onnx").into_model().into_runnable()""",
        """    # Arguments are positional: inputs, then states, in the order of the graph.
    output, *present = (tensor.to_numpy() for tensor in session.run([*feeds.values(), *states.values()]))""",
    ),
    "reference": Library(
        "the reference evaluator of onnx",
        "onnx numpy",
        "import numpy as np\nfrom onnx.reference import ReferenceEvaluator",
        """    return ReferenceEvaluator(f"{folder}/model.onnx")""",
        BY_NAME,
    ),
}
SLOTS = "    slots = np.arange(held, held + new, dtype=np.int64)[None]\n"
DECODE = '''def generate(session, prompt, count):
    """Return the ids that follow a prompt, by greedy decoding."""
    states, held, tokens, made = empty(), 0, list(prompt), []
    while len(made) < count:
        logits, states = call(session, states, np.array([tokens], np.int64), held)
        held += len(tokens)
        made.append(int(logits[0, -1].argmax()))
        if made[-1] in STOP_IDS:
            break
        tokens = made[-1:]
    return made


def main(folder, count, *prompt):
    print(*generate(load(folder), [int(token) for token in prompt], int(count)))
'''
STEPS = '''def main(folder):
    session, states, held = load(folder), empty(), 0
    for new in (8, 1, 1, 1):  # a prompt, then single tokens
        x = np.full((1, new, WIDTH), 0.5, DTYPE)
        output, states = call(session, states, x, held)
        held += new
        print(held, output[0, -1, :4])
'''
WHOLE = '''def main(folder):
    x = $x
    output, _ = call(load(folder), {}, x, 0)
    print(output.shape, output[0, -1, :4])
'''


def program(manifest: Manifest, language: str) -> str:
    """Return the text of a program for a key of LIBRARIES."""
    named = [(value.name, _feed(value.name, manifest)) for value in manifest.inputs]
    feeds = "".join(f'        "{name}": {text},\n' for name, text in named)
    decodes, library = manifest.kind == "decoder", LIBRARIES[language]
    return PROGRAM.substitute(
        title=library.title,
        language=language,
        packages=library.packages,
        imports=library.imports,
        load=library.load,
        run=Template(library.run).substitute(output=manifest.outputs[0].name),
        heading="\n".join(heading(manifest)),
        usage="decode.py FOLDER 16 100 101 102   # 16 tokens after a prompt of three" if decodes else "run.py FOLDER",
        constants="".join(f"{line}\n" for line in _constants(manifest)),
        states="".join(f"    {_states(group)},\n" for group in groups(manifest)),
        slots=SLOTS if "slots" in feeds else "",
        feeds=feeds,
        gives=gives(manifest),
        main=_main(manifest),
    )


def _feed(name: str, manifest: Manifest) -> str:
    if name == "position_ids" and manifest.axes:
        return f"np.repeat((start + slots)[None], {1 + manifest.axes}, 0)"
    return FEEDS[name]


def _constants(manifest: Manifest) -> List[str]:
    lines = []
    if capacity(manifest):
        lines.append(f"CAPACITY = {capacity(manifest)}  # slots of the caches: the limit of a row's tokens; can be set up to {manifest.max_positions}")
    if manifest.kind == "decoder":
        lines.append(f"STOP_IDS = {list(manifest.stop_ids)}")
    if manifest.kind == "block":
        lines.append(f'WIDTH, DTYPE = {manifest.inputs[0].axes[-1]}, "{manifest.dtype}"')
    return lines


def _states(group: Group) -> str:
    """Return the entry of STATES for a state, or an expression that gives one entry for each layer and part."""
    shape = ", ".join(group.shape) + ("," if len(group.shape) == 1 else "")
    rest = f'"{group.example.dtype}", ({shape}), {group.example.fill}'
    if not group.layers:
        return f'("{group.parts[0]}", "{group.parts[1]}", {rest})'
    ordered = group.layers == tuple(range(len(group.layers)))
    layers = f"range({len(group.layers)})" if ordered else str(list(group.layers))
    parts = "(" + ", ".join(f'"{part}"' for part in group.parts) + ("," if len(group.parts) == 1 else "") + ")"
    return f'*((f"past_key_values.{{n}}.{{part}}", f"present.{{n}}.{{part}}", {rest}) for n in {layers} for part in {parts})'


def _main(manifest: Manifest) -> str:
    if manifest.kind == "decoder":
        return DECODE
    if manifest.states:
        return STEPS
    x = "np.full((1, 8, WIDTH), 0.5, DTYPE)" if manifest.kind == "block" else "np.arange(8, dtype=np.int64)[None]"
    return Template(WHOLE).substitute(x=x)
