// The certificate: errors measured at export, and errors measured in this browser, of calls with
// 17, 5 and 1 tokens against a single call.

import { empty, page, read } from "./model.js";

// Largest difference between logits of the same text.
const BOUND = page.certificate?.tolerance ?? 1e-4;
const short = (number) =>
  number === 0 ? "0" : number.toExponential(1).replace("-", "\u2011"); // a non-breaking hyphen

export function line(list, title, text, state = "") {
  const [name, value] = [document.createElement("dt"), document.createElement("dd")];
  document
    .getElementById(list)
    .append(
      Object.assign(name, { textContent: title }),
      Object.assign(value, { textContent: text, className: state }),
    );
}

async function cut(runtime, tokens, size) {
  let cache = empty(runtime);
  const rows = [];
  for (let from = 0; from < tokens.length; from += size) {
    const made = await read(runtime, cache, tokens.slice(from, from + size));
    cache = made.cache;
    for (const value of made.logits.data) rows.push(value);
  }
  return rows;
}

// Compares calls of different lengths with one call. Returns whether their logits agree.
export async function check(runtime, tokens, unit) {
  const whole = await cut(runtime, tokens, tokens.length);
  const largest = whole.reduce((a, b) => Math.max(a, Math.abs(b)), 0);
  let worst = 0;
  for (const size of [1, 5, 17]) {
    const rows = await cut(runtime, tokens, size);
    worst = rows.reduce(
      (found, value, index) => Math.max(found, Math.abs(value - whole[index]) / largest),
      worst,
    );
    if (rows.some(Number.isNaN)) worst = NaN;
  }
  const holds = worst <= BOUND;
  const verdict = `${holds ? "within" : "beyond"} ${short(BOUND)}`;
  const said = `largest difference ${short(worst)} of the largest logit, ${verdict}`;
  line(
    "certificate",
    "in this browser",
    `${tokens.length} ${unit} in one call, by 17, by 5 and one by one: ${said}`,
    holds ? "good" : "bad",
  );
  return holds;
}

// Writes the title, the certificate and the description of the model.
export function describe() {
  document.title = `${page.name} · posenc`;
  document.getElementById("name").textContent = page.name;
  const { encoding } = page.summary;
  document.getElementById("lead").textContent =
    `A decoder with ${encoding.startsWith("in ") ? "an encoding " : ""}${encoding}, ` +
    `${page.weights.toLocaleString("en")} weights, exported by posenc.`;
  const made = page.certificate;
  if (made) {
    const exported =
      made.exported == null ? "" : ` in float32; ${short(made.exported)} with rounded activations`;
    const verdict = `${made.passed ? "within" : "beyond"} ${short(made.tolerance)}${exported}`;
    const said = `largest error ${short(made.worst)} of the largest logit, ${verdict}`;
    line(
      "certificate",
      "at export",
      `${made.cells} ways to split a text into calls: ${said}`,
      made.passed ? "good" : "bad",
    );
    line("certificate", "measured on", made.machine);
    if (made.against) line("certificate", "compared with", made.against);
  } else line("certificate", "at export", "not measured");
  for (const [title, text] of Object.entries(page.summary)) line("model", title, text);
  line("model", "digest", page.digest);
  line("model", "runtime", `onnxruntime-web ${page.onnxruntime_web}; WebAssembly with one thread`);
}
