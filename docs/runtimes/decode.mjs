// Run model.onnx with onnxruntime-node alone. Written by `posenc inspect FOLDER --runtime node`.
//
// model: decoder for target ort, float32, signature positions
// encoding: rope in 5 of 5 layers
// sizes: layers 5, width 128, heads 4, kv heads 2, head size 32, vocabulary 256, a step reads 955904 weights
// positions: 0 .. 4095
// interface: 1
//
// npm install onnxruntime-node
// node decode.mjs FOLDER 16 100 101 102   (16 tokens after a prompt of three)

import * as ort from "onnxruntime-node";
import { existsSync } from "node:fs";
import { pathToFileURL } from "node:url";

const print = console.log;

const CAPACITY = 1024; // slots of the caches: the limit of a row's tokens; can be set up to 4096
const POSITIONS = 4096; // 0 .. POSITIONS - 1
const STOP_IDS = [];
const VOCABULARY = 256;
// For each state: name of the input, name of the output to feed back as that input, dtype, shape and initial value.
const STATES = [
  ...[...Array(5).keys()].flatMap((n) => ["key", "value"].map((part) => [`past_key_values.${n}.${part}`, `present.${n}.${part}`, "float32", [1, 2, CAPACITY, 32], 0])),
];

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
  const extra = {
    "session.set_denormal_as_zero": "1", // subnormal numbers are slow
  };
  // Without logSeverityLevel, TensorScatter logs in every call that it copies its cache.
  return ort.InferenceSession.create(`${folder}/model.onnx`, { extra, logSeverityLevel: 3 });
}

// Returns the states of a row without tokens.
export function empty() {
  return Object.fromEntries(STATES.map(([past, , dtype, shape, fill]) => [past, tensor(dtype, shape, fill)]));
}

// Feeds x, new tokens of a row that holds `held` tokens. Returns the logits of the last token, and the states for the next call.
// The graph counts the tokens of a row, and its outputs depend on distances only: it takes no start.
export async function call(session, states, x, held) {
  const count = x.dims[1];
  if (count < 1) throw new RangeError("expected at least one token, got none");
  if (held + count > POSITIONS) throw new RangeError(`expected positions 0 .. ${POSITIONS - 1}, got ${held} .. ${held + count - 1}`);
  const wrong = x.data.find((token) => token < 0n || token >= BigInt(VOCABULARY));
  if (wrong !== undefined) throw new RangeError(`expected token ids 0 .. ${VOCABULARY - 1}, got ${wrong}`);
  if (held + count > CAPACITY) throw new RangeError(`expected at most ${CAPACITY} tokens in a row (CAPACITY), got ${held + count}`);
  const feeds = {
    input_ids: x,
    logits_index: tensor("int64", [1, 1], count - 1),
    seqlens_k: tensor("int32", [1], held + count - 1),
    total_sequence_length: tensor("int32", [], held + count),
  };
  const results = await session.run({ ...feeds, ...states });
  return [results["logits"], Object.fromEntries(STATES.map(([past, present]) => [past, results[present]]))];
}

// Converts the data of a float32 tensor to numbers.
const numbers = (data) => Array.from(data);

// Returns the ids that follow a prompt, by greedy decoding.
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
  print((await generate(await load(folder), prompt.map(Number), Number(count))).join(" "));
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  if (process.argv.length < 5) {
    console.error("usage: node decode.mjs FOLDER COUNT TOKEN...");
    process.exit(2);
  }
  if (!existsSync(`${process.argv[2]}/model.onnx`)) {
    console.error(`expected a folder with model.onnx, got ${process.argv[2]}`);
    process.exit(2);
  }
  await main(...process.argv.slice(2)).catch((error) => {
    if (!(error instanceof RangeError)) throw error;
    console.error(error.message);
    process.exit(1);
  });
}
