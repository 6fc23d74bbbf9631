// Text of the model: its tokenizer and its chat template, by libraries of Hugging Face.

import { Template } from "./text/jinja.js";
import { Tokenizer } from "./text/tokenizers.min.mjs";
import { line } from "./certificate.js";
import { page } from "./model.js";
import { Pieces, endOf } from "./pieces.js";

const tokenizer = new Tokenizer(await (await fetch("tokenizer.json")).json(), {});
const template = page.template === null ? null : new Template(page.template);
const added = [...tokenizer.get_added_tokens_decoder()];
const silent = new Set(added.filter(([, token]) => token.special).map(([id]) => id));
const OPTIONS = { skip_special_tokens: true, clean_up_tokenization_spaces: false };
const decode = (ids) => (ids.length ? tokenizer.decode(ids, OPTIONS) : "");

// Returns the token ids of a text.
export const encode = (text, add_special_tokens = true) =>
  Array.from(tokenizer.encode(text, { add_special_tokens }).ids, Number);

// Returns the token ids of a conversation, as its prompt for a reply. Without a chat template,
// its texts follow one another.
export function prompt(messages) {
  if (!template) return encode(messages.map(({ content }) => content).join(""));
  return encode(
    template.render({
      messages,
      tools: null,
      documents: null,
      add_generation_prompt: true,
      ...page.special,
    }),
    false,
  );
}

// Returns a decoder of the tokens that follow a prompt.
export const following = (prompt) =>
  new Pieces(
    decode,
    silent,
    endOf(prompt, silent, (token) => tokenizer.id_to_token(token)),
  );

// Writes that the samples of the page have the token ids that they had where the page was
// written. Throws an error if one has others.
export function compareSamples() {
  const same = (ids, others) =>
    ids.length === others.length && ids.every((id, index) => id === others[index]);
  const other = page.samples.find(
    ({ text, messages, ids }) => !same(messages ? prompt(messages) : encode(text), ids),
  );
  if (other)
    throw new Error(
      `its tokenizer gives other tokens here for ${JSON.stringify(other.text ?? other.messages)}`,
    );
  line(
    "certificate",
    "tokens",
    `${page.samples.length} texts have the tokens that they had where the page was written`,
    "good",
  );
}
