// Runs the decoder of page.json with onnxruntime-web: feeds tokens after cached ones and returns
// logits, states and attention.

const LIKELIEST = 12; // number of most probable ids to sample from
const ARRAYS = { float32: Float32Array, int32: Int32Array, int64: BigInt64Array };

export const page = await (await fetch("page.json")).json();

function tensor(ort, dtype, shape, value) {
  const size = shape.reduce((a, b) => a * b, 1);
  return new ort.Tensor(
    dtype,
    new ARRAYS[dtype](size).fill(dtype === "int64" ? BigInt(value) : value),
    shape,
  );
}

const integers = (ort, values, shape) =>
  new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);

// Graph inputs for new tokens after `held` cached tokens, and the logits of the last `kept`.
const FEEDS = {
  input_ids: (ort, tokens) => integers(ort, tokens, [1, tokens.length]),
  position_ids: (ort, tokens, held) => {
    const positions = Array.from(tokens, (_, index) => held + index);
    return page.axes
      ? integers(
          ort,
          Array(1 + page.axes)
            .fill(positions)
            .flat(),
          [1 + page.axes, 1, tokens.length],
        )
      : integers(ort, positions, [1, tokens.length]);
  },
  logits_index: (ort, tokens, held, kept) =>
    integers(
      ort,
      Array.from({ length: kept }, (_, index) => tokens.length - kept + index),
      [1, kept],
    ),
  attention_mask: (ort, tokens, held) => tensor(ort, "int64", [1, held + tokens.length], 1),
  cache_position: (ort, tokens, held) =>
    integers(
      ort,
      Array.from(tokens, (_, index) => held + index),
      [1, tokens.length],
    ),
  first_position: (ort) => tensor(ort, "int64", [1, 1], 0),
  seqlens_k: (ort, tokens, held) => tensor(ort, "int32", [1], held + tokens.length - 1),
  total_sequence_length: (ort, tokens, held) => tensor(ort, "int32", [], held + tokens.length),
  window_start: (ort) => tensor(ort, "int32", [1], 0),
};

// Loads the model. Returns onnxruntime-web and its session.
export async function open() {
  const ort = await import("./onnxruntime-web/ort.wasm.min.mjs");
  ort.env.wasm.wasmPaths = new URL("./onnxruntime-web/", import.meta.url).href;
  // Threads need cross-origin isolation headers, which a plain file server does not send.
  ort.env.wasm.numThreads = 1;
  const extra = { session: { set_denormal_as_zero: "1" } }; // subnormal numbers are slow
  const externalData = [{ path: "model.onnx.data", data: "model.onnx.data" }];
  const how = { externalData, executionProviders: ["wasm"], extra, logSeverityLevel: 3 };
  return { ort, session: await ort.InferenceSession.create("model.onnx", how) };
}

// Returns the cache of a row without tokens.
export const empty = ({ ort }) => ({
  tokens: [],
  states: Object.fromEntries(
    page.states.map(({ past, dtype, shape, fill }) => [past, tensor(ort, dtype, shape, fill)]),
  ),
});

// Feeds `tokens` after those in `cache`. Returns a new cache, the logits of at least the last
// `kept` tokens and attention; the given cache is not changed.
export async function read({ ort, session }, cache, tokens, kept = tokens.length) {
  const held = cache.tokens.length;
  const feeds = Object.fromEntries(
    page.inputs.map((name) => [name, FEEDS[name](ort, tokens, held, kept)]),
  );
  const results = await session.run({ ...feeds, ...cache.states });
  const states = Object.fromEntries(
    page.states.map(({ past, present }) => [past, results[present]]),
  );
  const attention = page.attention.map((layer) => results[`attention.${layer}`]);
  return {
    cache: { tokens: [...cache.tokens, ...tokens], states },
    logits: results[page.output],
    attention,
  };
}

// Returns the logits of the last token.
export const last = (logits) => logits.data.subarray(logits.data.length - logits.dims[2]);

// Returns a random generator of numbers in [0, 1) with a seed (mulberry32).
export function numbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// Returns the most probable id at temperature 0, otherwise a sample. Ties go to the lower id.
export function choose(scores, temperature, random) {
  const order = [];
  for (let id = 0; id < scores.length; id++) {
    if (order.length === LIKELIEST && scores[id] <= scores[order[LIKELIEST - 1]]) continue;
    const place = order.findIndex((other) => scores[id] > scores[other]);
    order.splice(place < 0 ? order.length : place, 0, id);
    order.length = Math.min(order.length, LIKELIEST);
  }
  if (!temperature) return order[0];
  const shares = order.map((id) => Math.exp((scores[id] - scores[order[0]]) / temperature));
  let remaining = random() * shares.reduce((a, b) => a + b);
  return order[
    Math.max(
      0,
      shares.findIndex((share) => (remaining -= share) < 0),
    )
  ];
}
