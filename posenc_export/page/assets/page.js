// Runs the decoder of page.json with onnxruntime-web: text, attention of its heads, and the check of its certificate.

import * as ort from "./onnxruntime-web/ort.wasm.min.mjs";

// The address may give text and temperature: index.html?temperature=0&text=import
const asked = new URLSearchParams(location.search);
const START = asked.get("text") ?? "def read_lines(path):\n    \"\"\"Return the lines of a file.\"\"\"\n    with open(path) as file:\n";
const [LENGTH, WAIT, CHUNK, PAUSE] = [96, 150, 128, 12]; // bytes to add, ms after a key, tokens of a call, ms between two looks at the keyboard
const LIKELIEST = 12; // bytes to choose among
const ARRAYS = { float32: Float32Array, int64: BigInt64Array };
const $ = (id) => document.getElementById(id);

const page = await (await fetch("page.json")).json();
const [encoder, decoder] = [new TextEncoder(), new TextDecoder()];

// The model: tokens in at any offset, logits, states and attention out.

function tensor(dtype, shape, value) {
  const size = shape.reduce((a, b) => a * b, 1);
  return new ort.Tensor(dtype, new ARRAYS[dtype](size).fill(dtype === "int64" ? BigInt(value) : value), shape);
}

const integers = (values, shape) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);

const FEEDS = {
  input_ids: (tokens) => integers(tokens, [1, tokens.length]),
  position_ids: (tokens, first) => {
    const places = Array.from(tokens, (_, index) => first + index);
    return page.axes ? integers(Array(1 + page.axes).fill(places).flat(), [1 + page.axes, 1, tokens.length]) : integers(places, [1, tokens.length]);
  },
  attention_mask: (tokens, first, held) => tensor("int64", [1, held + tokens.length], 1),
};

function open() {
  ort.env.wasm.wasmPaths = new URL("./onnxruntime-web/", import.meta.url).href;
  ort.env.wasm.numThreads = 1; // more need headers that a plain file server does not send
  const extra = { session: { set_denormal_as_zero: "1" } }; // subnormal numbers are slow
  return ort.InferenceSession.create("model.onnx", { externalData: [{ path: "model.onnx.data", data: "model.onnx.data" }], extra, logSeverityLevel: 3 });
}

const empty = (start = 0) => ({ tokens: [], start, states: Object.fromEntries(page.states.map(({ past, dtype, shape, fill }) => [past, tensor(dtype, shape, fill)])) });

// What is cached with `tokens` behind it, their logits and attention; the cache that was given stays as it is.
async function read(session, cache, tokens) {
  const held = cache.tokens.length;
  const feeds = Object.fromEntries(page.inputs.map((name) => [name, FEEDS[name](tokens, cache.start + held, held)]));
  const results = await session.run({ ...feeds, ...cache.states });
  const states = Object.fromEntries(page.states.map(({ past, present }) => [past, results[present]]));
  const attention = page.attention.map((layer) => results[`attention.${layer}`]);
  return { cache: { ...cache, tokens: [...cache.tokens, ...tokens], states }, logits: results[page.output], attention };
}

const last = (logits) => logits.data.subarray(logits.data.length - logits.dims[2]);

// Numbers in [0, 1), the same for the same seed (mulberry32).
function numbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

// The likeliest id at temperature 0, else a draw; ties go to the lower id.
function choose(scores, temperature, random) {
  const order = Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a] || a - b);
  if (!temperature) return order[0];
  const shares = order.slice(0, LIKELIEST).map((id) => Math.exp((scores[id] - scores[order[0]]) / temperature));
  let left = random() * shares.reduce((a, b) => a + b);
  return order[Math.max(0, shares.findIndex((share) => (left -= share) < 0))];
}

// Attention by distance, summed over the queries that have a key so far back.

class Distances {
  constructor() {
    this.sums = [];
    this.counts = new Float64Array(page.distances);
  }

  add(attention) {
    attention.forEach((weights, layer) => {
      const [, heads, queries, keys] = weights.dims;
      this.sums[layer] ??= Array.from({ length: heads }, () => new Float64Array(page.distances));
      for (let head = 0; head < heads; head++)
        for (let query = 0; query < queries; query++) {
          const own = keys - queries + query;
          const at = (head * queries + query) * keys + own;
          for (let back = 0; back <= own && back < page.distances; back++) this.sums[layer][head][back] += weights.data[at - back];
        }
    });
    const { dims } = attention[0] ?? { dims: [0, 0, 0, 0] };
    for (let query = 0; query < dims[2]; query++)
      for (let back = 0; back <= dims[3] - dims[2] + query && back < page.distances; back++) this.counts[back]++;
  }

  copy() {
    const other = new Distances();
    other.sums = this.sums.map((heads) => heads.map((sums) => sums.slice()));
    other.counts = this.counts.slice();
    return other;
  }

  mean(layer, head) {
    return Array.from(this.sums[layer][head], (sum, back) => (this.counts[back] ? sum / this.counts[back] : 0));
  }
}

// The editor: what is typed, and behind it what the model adds.

const view = { typed: "", added: "", skipped: 0, attention: [], layer: 0, head: 0 }; // skipped: bytes in front that were not read
let session, base, timer, turn = 0, seed = 0;

// Reads the text, only what is new where it goes on from the text before.
async function readTyped(mine, tokens) {
  const known = base?.cache.tokens ?? [];
  const goesOn = known.length && known.length < tokens.length && known.every((token, index) => token === tokens[index]);
  if (base && known.length === tokens.length && known.every((token, index) => token === tokens[index])) return base;
  let state = goesOn ? base : { cache: empty(), distances: new Distances() };
  for (let from = state.cache.tokens.length; from < tokens.length; from += CHUNK) {
    const made = await read(session, state.cache, tokens.slice(from, from + CHUNK));
    if (mine !== turn) return null;
    const distances = state.distances.copy();
    distances.add(made.attention);
    state = { ...made, distances };
  }
  return (base = state);
}

async function goOn() {
  const mine = ++turn;
  const bytes = Array.from(encoder.encode($("typed").value || "\n"));
  const tokens = bytes.slice(LENGTH - page.context);
  Object.assign(view, { typed: $("typed").value, added: "", skipped: bytes.length - tokens.length });
  const began = performance.now();
  let state = await readTyped(mine, tokens);
  if (!state) return;
  const from = performance.now();
  const [added, temperature, random] = [[], Number($("temperature").value), numbers(seed)];
  const distances = state.distances.copy();
  for (let looked = from; added.length < LENGTH; ) {
    const token = choose(last(state.logits), temperature, random);
    if (page.stop_ids.includes(token)) break;
    added.push(token);
    state = await read(session, state.cache, [token]);
    distances.add(state.attention);
    if (performance.now() - looked < PAUSE) continue;
    view.added = decoder.decode(Uint8Array.from(added));
    drawText();
    await new Promise((resolve) => setTimeout(resolve));
    if (mine !== turn) return;
    looked = performance.now();
  }
  Object.assign(view, { added: decoder.decode(Uint8Array.from(added)), attention: state.attention });
  drawText();
  drawHeads(distances);
  const [speed, place] = [added.length / ((performance.now() - from) / 1000), state.cache.tokens.length];
  $("status").textContent = `${speed.toFixed(0)} tokens per second · text read in ${(from - began).toFixed(0)} ms · position ${place} of ${page.positions}`;
  document.body.dataset.speed = speed.toFixed(1);
  document.body.dataset.added = view.added;
}

function schedule(delay = WAIT) {
  turn++;
  clearTimeout(timer);
  Object.assign(view, { typed: $("typed").value, added: "", attention: [] });
  drawText();
  timer = setTimeout(goOn, delay);
}

// Text in spans of a character, tinted with what the chosen head reads at the last byte.
function drawText() {
  const shown = $("shown");
  shown.replaceChildren();
  const weights = view.attention[view.layer];
  if (!weights) {
    const ghost = Object.assign(document.createElement("span"), { className: "ghost", textContent: view.added });
    shown.append(view.typed, ghost, "\n");
    return;
  }
  const keys = weights.dims[3];
  const given = weights.data.subarray(view.head * keys, (view.head + 1) * keys);
  const strongest = given.reduce((a, b) => Math.max(a, b), 0);
  const text = Array.from(view.typed + view.added);
  const typed = Array.from(view.typed).length;
  let byte = -view.skipped;
  text.forEach((character, index) => {
    const from = Math.max(byte, 0);
    byte += encoder.encode(character).length;
    const weight = given.subarray(from, Math.max(byte, 0)).reduce((a, b) => Math.max(a, b), 0) / strongest;
    const span = Object.assign(document.createElement("span"), { textContent: character });
    span.className = `${index < typed ? "" : "ghost"} ${index === text.length - 1 ? "last" : ""}`;
    if (weight > 0.02) span.style.background = `rgb(var(--tint) / ${(0.55 * weight).toFixed(3)})`;
    shown.append(span);
  });
  shown.append("\n");
}

// A small chart for each head: attention by distance, and the pattern of the encoding.
function drawHeads(distances) {
  if (!page.attention.length) return;
  $("attention").hidden = false;
  $("heads").replaceChildren();
  page.attention.forEach((layer, index) => {
    const row = Object.assign(document.createElement("div"), { className: "row" });
    distances.sums[index].forEach((_, head) => row.append(chart(distances.mean(index, head), page.patterns[layer]?.heads[head], index, head)));
    $("heads").append(Object.assign(document.createElement("div"), { className: "layer", textContent: `layer ${layer + 1}` }), row);
  });
}

function chart(measured, pattern, layer, head) {
  const far = page.distances;
  const most = Math.max(...measured, 1e-9);
  const bars = measured.map((value, back) => `M${back + 0.1} 40v${-(38 * value) / most}h.8V40z`).join("");
  const line = pattern ? `<path class="pattern" d="M${pattern.map((value, back) => `${back + 0.5} ${40 - 38 * value}`).join("L")}"/>` : "";
  const button = Object.assign(document.createElement("button"), { className: "head", title: `layer ${page.attention[layer] + 1}, head ${head + 1}: at most ${(100 * most).toFixed(0)} %` });
  button.setAttribute("aria-label", button.title);
  button.setAttribute("aria-pressed", String(layer === view.layer && head === view.head));
  button.innerHTML = `<svg viewBox="0 0 ${far} 42" preserveAspectRatio="none" aria-hidden="true"><path class="measured" d="${bars}"/>${line}</svg>`;
  button.onclick = () => {
    Object.assign(view, { layer, head });
    for (const each of document.querySelectorAll(".head")) each.setAttribute("aria-pressed", String(each === button));
    drawText();
  };
  return button;
}

function accept() {
  $("typed").value += view.added;
  schedule(0);
}

// What was measured at export, and the same claim measured here: one call, chunks of 5, single tokens, and a start far away.

function line(list, title, text, state = "") {
  $(list).append(Object.assign(document.createElement("dt"), { textContent: title }), Object.assign(document.createElement("dd"), { textContent: text, className: state }));
}

async function cut(tokens, size, start) {
  let cache = empty(start);
  const rows = [];
  for (let from = 0; from < tokens.length; from += size) {
    const made = await read(session, cache, tokens.slice(from, from + size));
    cache = made.cache;
    rows.push(...made.logits.data);
  }
  return rows;
}

async function check() {
  const tokens = Array.from(encoder.encode(START)).slice(0, 60);
  const whole = await cut(tokens, tokens.length, 0);
  const largest = whole.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  let worst = 0;
  for (const size of [1, 5, 17]) {
    const rows = await cut(tokens, size, 0);
    worst = rows.reduce((found, value, index) => Math.max(found, Math.abs(value - whole[index]) / largest), worst);
    if (rows.some(Number.isNaN)) worst = NaN;
  }
  const bound = page.certificate?.tolerance ?? 1e-4;
  const holds = worst <= bound;
  line("certificate", "in this browser", `${tokens.length} bytes in one call, by 17, by 5 and one by one: largest difference ${worst.toExponential(1)} of the largest logit, ${holds ? "within" : "beyond"} ${bound.toExponential(1)}`, holds ? "good" : "bad");
  document.body.dataset.checked = String(holds);
}

function describe() {
  document.title = `${page.name} · posenc`;
  $("name").textContent = page.name;
  $("lead").textContent = `A decoder with ${page.summary.encoding}, ${page.weights.toLocaleString("en")} weights, exported by posenc.`;
  $("far").textContent = String(page.distances - 1);
  const said = page.patterns.find((pattern) => pattern)?.says;
  $("legend").hidden = !said;
  $("says").textContent = said ?? "";
  const made = page.certificate;
  if (made) {
    line("certificate", "at export", `${made.cells} ways to cut a text: largest error ${made.worst.toExponential(1)} of the largest logit, ${made.passed ? "within" : "beyond"} ${made.tolerance.toExponential(1)}`, made.passed ? "good" : "bad");
    line("certificate", "measured on", made.machine);
    if (made.against) line("certificate", "compared with", made.against);
  } else line("certificate", "at export", "not measured");
  for (const [title, text] of Object.entries(page.summary)) line("model", title, text);
  line("model", "digest", page.digest);
  line("model", "runtime", `onnxruntime-web ${page.onnxruntime_web}, WebAssembly, one thread`);
}

$("typed").value = view.typed = START;
$("temperature").value = asked.get("temperature") ?? "0.5";
$("chosen").textContent = Number($("temperature").value).toFixed(1);
$("typed").addEventListener("input", () => schedule());
$("typed").addEventListener("keydown", (event) => {
  if (event.key !== "Tab" || event.shiftKey || !view.added) return;
  event.preventDefault();
  accept();
});
$("accept").onclick = accept;
$("again").onclick = () => {
  seed++;
  schedule(0);
};
$("temperature").addEventListener("input", () => {
  $("chosen").textContent = Number($("temperature").value).toFixed(1);
  schedule();
});
describe();
drawText();
try {
  session = await open();
  await goOn();
  await check();
} catch (error) {
  $("status").textContent = `The model does not run here: ${error.message}`;
  throw error;
}
