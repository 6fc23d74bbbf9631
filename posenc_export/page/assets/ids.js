// Text of a model without a tokenizer: its token ids, separated by spaces or commas.

import { page } from "./model.js";

const RULE = `token ids 0 .. ${page.vocabulary - 1}`;
document.getElementById("typed").placeholder = `${RULE}, such as 1 2 3`;

// Returns the ids of a conversation: those of its messages, one after the other.
export function prompt(messages) {
  const written = messages.flatMap(({ content }) => content.split(/[\s,]+/).filter(Boolean));
  const wrong = written.find((id) => !/^\d+$/.test(id) || Number(id) >= page.vocabulary);
  if (wrong !== undefined || !written.length)
    throw new RangeError(`expected ${RULE}, got ${wrong ?? "none"}`);
  return written.map(Number);
}

// Returns what turns the ids that follow a prompt into text.
export const following = () => ({ push: (id) => `${id} `, rest: () => "" });

export function compareSamples() {}
