// Text of a row of tokens, piece by piece, as runtime/artefact/tokenizer.py.

const LONGEST = 4; // most bytes, and so most tokens, of a character
const WINDOW = 16; // tokens of a prompt on which the text of the next token can depend
const CONTINUES = /^<0x[89AB][0-9A-F]>$/; // tokens of bytes that begin no character

// Returns the last tokens of a prompt that give text, from the beginning of a character on.
// silent: ids that give no text. name: returns the name of a token.
export function endOf(prompt, silent, name) {
  const end = prompt.filter((token) => !silent.has(token)).slice(-(WINDOW + LONGEST));
  let first = Math.max(end.length - WINDOW, 0);
  while (first && CONTINUES.test(name(end[first]))) first -= 1;
  return end.slice(first);
}

// Incremental decoder. The text of a token depends on the tokens before it, so each call decodes
// the tokens of the last piece again, with those after it. A call decodes a bounded number of
// tokens. decode: returns the text of ids. end: as endOf returns it.
export class Pieces {
  constructor(decode, silent, end) {
    Object.assign(this, { decode, silent });
    this.context = []; // tokens of the last piece
    this.before = ""; // their text
    this.pending = []; // tokens after them
    this.shown = 0; // length of the text of the pending tokens that is in pieces already
    this.open = 0; // tokens since this text did not end in bytes without a character
    end.forEach((token) => this.push(token));
  }

  // Returns the text that a token adds, empty while a character is incomplete.
  push(token) {
    if (this.silent.has(token)) return "";
    this.pending.push(token);
    const text = this.text();
    let certain = text.replace(/\ufffd+$/, "").length;
    this.open = certain === text.length ? 0 : this.open + 1;
    // Only the last bytes can still become a character.
    if (this.open >= LONGEST) certain = Math.max(certain, text.length - 1);
    const piece = text.slice(this.shown, certain);
    this.shown = Math.max(this.shown, certain);
    if (piece && certain === text.length) {
      [this.context, this.pending, this.shown] = [this.pending, [], 0];
      this.before = this.decode(this.context);
    } else if (this.pending.length > 2 * LONGEST) {
      // The first tokens tell the decoder that a run of bytes is invalid, the last ones can begin
      // a character.
      const hidden = text.length - this.shown;
      this.pending.splice(LONGEST, this.pending.length - 2 * LONGEST);
      this.shown = this.text().length - hidden;
    }
    return piece;
  }

  // Returns the text of an incomplete character at the end of the row.
  rest() {
    return this.text().slice(this.shown);
  }

  text() {
    const text = this.decode([...this.context, ...this.pending]);
    if (text.startsWith(this.before)) return text.slice(this.before.length);
    return this.decode(this.pending); // the last byte makes those of earlier pieces invalid
  }
}
