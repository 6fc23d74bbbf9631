"""Write a program in JavaScript for ONNX Runtime in Node (onnxruntime-node)."""

from string import Template
from typing import Dict, List

from posenc_export.clients.states import Group, capacity, gives, groups, heading
from posenc_export.runtime.artefact.manifest import Manifest

# By graph input: its value for a call with `count` tokens on one row that holds `held` tokens, the first of them at position `start`.
FEEDS: Dict[str, str] = {
    "input_ids": "x",
    "hidden_states": "x",
    "token_type_ids": 'tensor("int64", [1, count], 0)',
    "position_ids": "integers(slots.map((slot) => start + slot), [1, count])",
    "attention_mask": 'tensor("int64", [1, held + count], 1)',
    "logits_index": 'tensor("int64", [1, 1], count - 1)',
    "cache_position": "integers(slots, [1, count])",
    "first_position": 'tensor("int64", [1, 1], start)',
    "seqlens_k": 'tensor("int32", [1], held + count - 1)',
    "total_sequence_length": 'tensor("int32", [], held + count)',
    "slots": "integers([...Array(held + count).keys()], [held + count])",
}
PROGRAM = Template("""// Run model.onnx with onnxruntime-node alone. Written by `posenc inspect FOLDER --runtime node`.
//
$heading
//
// npm install onnxruntime-node
// node $usage

import * as ort from "onnxruntime-node";
import { pathToFileURL } from "node:url";

$constants// For each state: name of the input, name of the output to feed back as that input, dtype, shape and initial value.
const STATES = [
$states];

// Creates a tensor filled with one value; a float16 value is given as its 16 bits.
const ARRAYS = { float32: Float32Array, float16: Uint16Array, int8: Int8Array, int32: Int32Array, int64: BigInt64Array };
function tensor(dtype, shape, value) {
  const size = shape.reduce((a, b) => a * b, 1);
  return new ort.Tensor(dtype, new ARRAYS[dtype](size).fill(dtype === "int64" ? BigInt(value) : value), shape);
}

export function integers(values, shape) {
  return new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
}

export function load(folder) {
  const extra = { session: { set_denormal_as_zero: "1" } }; // subnormal numbers are slow
  // Without logSeverityLevel, TensorScatter logs in every call that it copies its cache.
  return ort.InferenceSession.create(`$${folder}/model.onnx`, { extra, logSeverityLevel: 3 });
}

// Returns the states of a row without tokens.
export function empty() {
  return Object.fromEntries(STATES.map(([past, , dtype, shape, fill]) => [past, tensor(dtype, shape, fill)]));
}

// Feeds x, new tokens of a row that holds `held` tokens. Returns $gives, and the states for the next call.
export async function call(session, states, x, held, start = 0) {
  const count = x.dims[1];
$slots  const feeds = {
$feeds  };
  const results = await session.run({ ...feeds, ...states });
  return [results["$output"], Object.fromEntries(STATES.map(([past, present]) => [past, results[present]]))];
}

$number$main
if (import.meta.url === pathToFileURL(process.argv[1]).href) await main(...process.argv.slice(2));
""")
SLOTS = "  const slots = Array.from({ length: count }, (_, index) => held + index);\n"
FLOAT = "// Converts the data of a float32 tensor to numbers.\nconst numbers = (data) => Array.from(data);\n\n"
HALF = """// Converts the data of a float16 tensor, 16 bits per element, to numbers.
function numbers(data) {
  return Array.from(data, (bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
    return bits >> 15 ? -size : size;
  });
}

"""
DECODE = """// Returns the ids that follow a prompt, by greedy decoding.
export async function generate(session, prompt, count) {
  let [states, held, tokens] = [empty(), 0, prompt];
  const made = [];
  while (made.length < count) {
    const [logits, next] = await call(session, states, integers(tokens, [1, tokens.length]), held);
    const last = numbers(logits.data.slice(-logits.dims[2]));
    made.push(last.indexOf(last.reduce((a, b) => Math.max(a, b))));
    held += tokens.length;
    states = next;
    if (STOP_IDS.includes(made.at(-1))) break;
    tokens = made.slice(-1);
  }
  return made;
}

async function main(folder, count, ...prompt) {
  console.log((await generate(await load(folder), prompt.map(Number), Number(count))).join(" "));
}
"""
STEPS = """async function main(folder) {
  let [session, states, held] = [await load(folder), empty(), 0];
  for (const count of [8, 1, 1, 1]) { // a prompt, then single tokens
    const [output, next] = await call(session, states, tensor("$dtype", [1, count, WIDTH], $half), held);
    [states, held] = [next, held + count];
    console.log(held, numbers(output.data.slice(-WIDTH)).slice(0, 4));
  }
}
"""
WHOLE = """async function main(folder) {
  const x = $x;
  const [output] = await call(await load(folder), {}, x, 0);
  console.log(output.dims, numbers(output.data.slice(-output.dims[2])).slice(0, 4));
}
"""


def program(manifest: Manifest) -> str:
    """Return the text of the program."""
    feeds = "".join(f"    {value.name}: {_feed(value.name, manifest)},\n" for value in manifest.inputs)
    decodes = manifest.kind == "decoder"
    return PROGRAM.substitute(
        heading="\n".join(f"// {line}" for line in heading(manifest)),
        usage="decode.mjs FOLDER 16 100 101 102   (16 tokens after a prompt of three)" if decodes else "run.mjs FOLDER",
        constants="".join(f"{line}\n" for line in _constants(manifest)),
        states="".join(f"  {_states(group)},\n" for group in groups(manifest)),
        slots=SLOTS if "slots" in feeds else "",
        feeds=feeds,
        gives=gives(manifest),
        output=manifest.outputs[0].name,
        number=HALF if manifest.dtype == "float16" else FLOAT,
        main=_main(manifest),
    )


def _feed(name: str, manifest: Manifest) -> str:
    if name == "position_ids" and manifest.axes:
        planes = f"Array({1 + manifest.axes}).fill(slots.map((slot) => start + slot)).flat()"
        return f"integers({planes}, [{1 + manifest.axes}, 1, count])"
    return FEEDS[name]


def _constants(manifest: Manifest) -> List[str]:
    lines = []
    if capacity(manifest):
        lines.append(f"const CAPACITY = {capacity(manifest)}; // slots of the caches: the limit of a row's tokens; can be set up to {manifest.max_positions}")
    if manifest.kind == "decoder":
        lines.append(f"const STOP_IDS = {list(manifest.stop_ids)};")
    if manifest.kind == "block":
        lines.append(f"const WIDTH = {manifest.inputs[0].axes[-1]};")
    return lines


def _states(group: Group) -> str:
    """Return the entry of STATES for a state, or an expression that gives one entry for each layer and part."""
    rest = f'"{group.example.dtype}", [{", ".join(group.shape)}], {group.example.fill}'
    if not group.layers:
        return f'["{group.parts[0]}", "{group.parts[1]}", {rest}]'
    ordered = group.layers == tuple(range(len(group.layers)))
    layers = f"[...Array({len(group.layers)}).keys()]" if ordered else str(list(group.layers))
    parts = "[" + ", ".join(f'"{part}"' for part in group.parts) + "]"
    entry = f"[`past_key_values.${{n}}.${{part}}`, `present.${{n}}.${{part}}`, {rest}]"
    return f"...{layers}.flatMap((n) => {parts}.map((part) => {entry}))"


def _main(manifest: Manifest) -> str:
    half = "0x3800" if manifest.dtype == "float16" else "0.5"  # 0x3800 is 0.5 in float16
    if manifest.kind == "decoder":
        return DECODE
    if manifest.states:
        return Template(STEPS).substitute(dtype=manifest.dtype, half=half)
    tokens = "integers([...Array(8).keys()], [1, 8])"
    return Template(WHOLE).substitute(x=f'tensor("{manifest.dtype}", [1, 8, WIDTH], {half})' if manifest.kind == "block" else tokens)
