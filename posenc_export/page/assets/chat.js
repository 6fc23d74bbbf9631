// The page of a model with a tokenizer: holds a conversation, or continues a text, and repeats
// the check of the certificate.

import { check, describe } from "./certificate.js";
import { choose, empty, last, numbers, open, page, read } from "./model.js";
import { compareSamples, following, prompt } from "./text.js";

// The URL may set temperature, system, message and tokens:
// index.html?temperature=0&message=Hello&tokens=64 sends a message and limits replies.
const asked = new URLSearchParams(location.search);
const [CHUNK, PAUSE] = [64, 30]; // tokens per call, ms between two checks for input events
const most = Number(asked.get("tokens") ?? page.context);
const $ = (id) => document.getElementById(id);
// The messages so far.
const talk = asked.has("system") ? [{ role: "system", content: asked.get("system") }] : [];
let runtime,
  cache,
  turn = 0,
  seed = 0;

const pause = () => new Promise((resolve) => setTimeout(resolve));

// Feeds the tokens of a prompt that the cache does not hold. Returns the result of the last
// call, or null if another turn has begun.
async function readPrompt(started, tokens) {
  const held = cache.tokens;
  if (held.length >= tokens.length || held.some((token, index) => token !== tokens[index]))
    cache = empty(runtime);
  for (;;) {
    const from = cache.tokens.length;
    const made = await read(runtime, cache, tokens.slice(from, from + CHUNK), 1);
    ({ cache } = made);
    await pause();
    if (started !== turn) return null;
    if (cache.tokens.length === tokens.length) return made;
    $("status").textContent = `Reading: ${cache.tokens.length} of ${tokens.length} tokens`;
  }
}

function bubble(role, text = "") {
  const made = Object.assign(document.createElement("p"), {
    className: `said ${role}`,
    textContent: text,
  });
  $("talk").append(made);
  return made;
}

async function reply(content) {
  const [started, messages] = [++turn, [...talk, { role: "user", content }]];
  const ids = prompt(messages);
  const room = Math.min(most, page.context - ids.length);
  if (room < 1)
    throw new Error(
      `the conversation has ${ids.length} tokens and this page reads ${page.context}; ` +
        "reload the page to begin a new one",
    );
  bubble("user", content);
  const [shown, tokens, random, began] = [
    bubble("assistant"),
    [],
    numbers(seed++),
    performance.now(),
  ];
  const pieces = following(ids);
  let [state, text] = [await readPrompt(started, ids), ""];
  const from = performance.now();
  for (let looked = from; state && tokens.length < room;) {
    tokens.push(choose(last(state.logits), Number($("temperature").value), random));
    if (page.ends.includes(tokens.at(-1))) break;
    text += pieces.push(tokens.at(-1));
    if (tokens.length < room) ({ cache } = state = await read(runtime, cache, tokens.slice(-1), 1));
    if (performance.now() - looked < PAUSE) continue;
    shown.textContent = text;
    await pause();
    if (started !== turn) break;
    looked = performance.now();
  }
  text += pieces.rest();
  shown.textContent = text;
  talk.push(messages.at(-1), { role: "assistant", content: text });
  const speed = (1000 * tokens.length) / Math.max(performance.now() - from, 1);
  $("status").textContent =
    `${speed.toFixed(1)} tokens per second · prompt of ${ids.length} tokens read in ` +
    `${((from - began) / 1000).toFixed(1)} s`;
  Object.assign(document.body.dataset, {
    tokens: tokens.join(" "),
    reply: text,
    speed: speed.toFixed(1),
  });
}

async function send() {
  const content = $("typed").value;
  if (!content || $("send").disabled) return;
  $("typed").value = "";
  [$("send").disabled, $("stop").hidden] = [true, false];
  try {
    await reply(content);
  } catch (error) {
    $("status").textContent = `No reply: ${error.message ?? error}`;
    throw error;
  } finally {
    [$("send").disabled, $("stop").hidden] = [false, true];
  }
}

$("temperature").value = asked.get("temperature") ?? "0.5";
const choice = () => ($("chosen").textContent = Number($("temperature").value).toFixed(1));
$("temperature").addEventListener("input", choice);
$("typed").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  send();
});
$("send").onclick = send;
$("stop").onclick = () => turn++;
choice();
describe();
try {
  compareSamples();
  runtime = await open();
  cache = empty(runtime);
  $("status").textContent = "Ready.";
  $("send").disabled = false;
  if (asked.has("message")) {
    $("typed").value = asked.get("message");
    await send();
  }
  document.body.dataset.checked = String(await check(runtime, page.samples[0].ids, "tokens"));
} catch (error) {
  $("status").textContent = `The model does not run in this browser: ${error.message ?? error}`;
  document.body.dataset.checked = "false";
  throw error;
}
