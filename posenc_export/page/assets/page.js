// The page: continues text while the user types, draws the attention of each head, and repeats
// the check of the certificate.

import { check, describe } from "./certificate.js";
import { choose, empty, last, numbers, open, page, read } from "./model.js";

// The URL may set text and temperature: index.html?temperature=0&text=import
const asked = new URLSearchParams(location.search);
const EXAMPLE =
  'def read_lines(path):\n    """Return the lines of a file."""\n    with open(path) as file:\n';
const LENGTH = Math.min(96, page.context >> 1); // bytes to generate
// Ms from a key press to generation, tokens per call, ms between two checks for input events.
const [WAIT, CHUNK, PAUSE] = [150, 128, 12];
const $ = (id) => document.getElementById(id);

const [encoder, decoder] = [new TextEncoder(), new TextDecoder()];
// Bytes that are read in calls of different lengths.
const sample = Array.from(encoder.encode(EXAMPLE)).slice(0, Math.min(60, page.context));

// Mean attention by distance in tokens, over all queries that have a key at that distance.

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
          for (let back = 0; back <= own && back < page.distances; back++)
            this.sums[layer][head][back] += weights.data[at - back];
        }
    });
    const { dims } = attention[0] ?? { dims: [0, 0, 0, 0] };
    for (let query = 0; query < dims[2]; query++)
      for (let back = 0; back <= dims[3] - dims[2] + query && back < page.distances; back++)
        this.counts[back]++;
  }

  copy() {
    const other = new Distances();
    other.sums = this.sums.map((heads) => heads.map((sums) => sums.slice()));
    other.counts = this.counts.slice();
    return other;
  }

  mean(layer, head) {
    return Array.from(this.sums[layer][head], (sum, back) =>
      this.counts[back] ? sum / this.counts[back] : 0,
    );
  }
}

// The editor: the user's text, followed by the text that the model generates.

// Skipped: bytes at the start that were not fed.
const view = { typed: "", added: "", skipped: 0, attention: [], layer: 0, head: 0 };
let runtime,
  base,
  timer,
  turn = 0,
  seed = 0;

// Feeds the text, or only its new part if it continues the text of the last call. Returns null
// if another call has started meanwhile.
async function readTyped(started, tokens) {
  const known = base?.cache.tokens ?? [];
  const continues =
    known.length &&
    known.length < tokens.length &&
    known.every((token, index) => token === tokens[index]);
  if (
    base &&
    known.length === tokens.length &&
    known.every((token, index) => token === tokens[index])
  )
    return base;
  let state = continues ? base : { cache: empty(runtime), distances: new Distances() };
  for (let from = state.cache.tokens.length; from < tokens.length; from += CHUNK) {
    const made = await read(runtime, state.cache, tokens.slice(from, from + CHUNK));
    if (started !== turn) return null;
    const distances = state.distances.copy();
    distances.add(made.attention);
    state = { ...made, distances };
  }
  return (base = state);
}

async function generate() {
  const started = ++turn;
  const bytes = Array.from(encoder.encode($("typed").value || "\n"));
  const tokens = bytes.slice(LENGTH - page.context);
  Object.assign(view, {
    typed: $("typed").value,
    added: "",
    skipped: bytes.length - tokens.length,
  });
  const began = performance.now();
  let state = await readTyped(started, tokens);
  if (!state) return;
  const from = performance.now();
  const [added, temperature, random] = [[], Number($("temperature").value), numbers(seed)];
  const distances = state.distances.copy();
  for (let looked = from; added.length < LENGTH;) {
    const token = choose(last(state.logits), temperature, random);
    if (page.stop_ids.includes(token)) break;
    added.push(token);
    state = await read(runtime, state.cache, [token]);
    distances.add(state.attention);
    if (performance.now() - looked < PAUSE) continue;
    view.added = decoder.decode(Uint8Array.from(added));
    drawText();
    await new Promise((resolve) => setTimeout(resolve));
    if (started !== turn) return;
    looked = performance.now();
  }
  Object.assign(view, {
    added: decoder.decode(Uint8Array.from(added)),
    attention: state.attention,
  });
  drawText();
  drawHeads(distances);
  // Some browsers round their clock to coarse steps.
  const milliseconds = Math.max(performance.now() - from, 1);
  const [speed, place] = [(1000 * added.length) / milliseconds, state.cache.tokens.length];
  $("status").textContent =
    `${speed.toFixed(0)} tokens per second · text read in ${(from - began).toFixed(0)} ms · ` +
    `position ${place} of ${page.positions}`;
  document.body.dataset.speed = speed.toFixed(1);
  document.body.dataset.added = view.added;
}

function schedule(delay = WAIT) {
  turn++;
  clearTimeout(timer);
  Object.assign(view, { typed: $("typed").value, added: "", attention: [] });
  drawText();
  timer = setTimeout(generate, delay);
}

// Draws the text, one span per character, shaded by the attention of the last byte in the
// selected head.
function drawText() {
  const shown = $("shown");
  shown.replaceChildren();
  const weights = view.attention[view.layer];
  if (!weights) {
    const ghost = Object.assign(document.createElement("span"), {
      className: "ghost",
      textContent: view.added,
    });
    shown.append(view.typed, ghost, "\n");
    return;
  }
  const [, , queries, keys] = weights.dims;
  const row = (view.head + 1) * queries - 1; // index of the last byte's query
  const given = weights.data.subarray(row * keys, (row + 1) * keys);
  const strongest = given.reduce((a, b) => Math.max(a, b), 0);
  const text = Array.from(view.typed + view.added);
  const typed = Array.from(view.typed).length;
  let byte = -view.skipped;
  text.forEach((character, index) => {
    const from = Math.max(byte, 0);
    byte += encoder.encode(character).length;
    const weight =
      given.subarray(from, Math.max(byte, 0)).reduce((a, b) => Math.max(a, b), 0) / strongest;
    const span = Object.assign(document.createElement("span"), { textContent: character });
    span.className = `${index < typed ? "" : "ghost"} ${index === text.length - 1 ? "last" : ""}`;
    if (weight > 0.02) span.style.background = `rgb(var(--tint) / ${(0.55 * weight).toFixed(3)})`;
    shown.append(span);
  });
  shown.append("\n");
}

// Draws a small chart for each head: attention by distance.
function drawHeads(distances) {
  if (!page.attention.length) return;
  $("attention").hidden = false;
  $("heads").replaceChildren();
  page.attention.forEach((layer, index) => {
    const row = Object.assign(document.createElement("div"), { className: "row" });
    distances.sums[index].forEach((_, head) =>
      row.append(chart(distances.mean(index, head), index, head)),
    );
    $("heads").append(
      Object.assign(document.createElement("div"), {
        className: "layer",
        textContent: `layer ${layer + 1}`,
      }),
      row,
    );
  });
}

function chart(measured, layer, head) {
  const far = page.distances;
  const most = Math.max(...measured, 1e-9);
  const bars = measured
    .map((value, back) => `M${back + 0.1} 40v${-(38 * value) / most}h.8V40z`)
    .join("");
  const name = `layer ${page.attention[layer] + 1}, head ${head + 1}`;
  const title = `${name}: at most ${(100 * most).toFixed(0)} %`;
  const button = Object.assign(document.createElement("button"), { className: "head", title });
  button.setAttribute("aria-label", button.title);
  button.setAttribute("aria-pressed", String(layer === view.layer && head === view.head));
  button.innerHTML =
    `<svg viewBox="0 0 ${far} 42" preserveAspectRatio="none" aria-hidden="true">` +
    `<path class="measured" d="${bars}"/></svg>`;
  button.onclick = () => {
    Object.assign(view, { layer, head });
    for (const each of document.querySelectorAll(".head"))
      each.setAttribute("aria-pressed", String(each === button));
    drawText();
  };
  return button;
}

function accept() {
  $("typed").value += view.added;
  schedule(0);
}

$("typed").value = view.typed = asked.get("text") ?? EXAMPLE;
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
$("far").textContent = String(page.distances - 1);
drawText();
try {
  runtime = await open();
  await generate();
  document.body.dataset.checked = String(await check(runtime, sample, "bytes"));
} catch (error) {
  $("status").textContent = `The model does not run in this browser: ${error.message ?? error}`;
  document.body.dataset.checked = "false";
  throw error;
}
