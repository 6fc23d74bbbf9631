"""pieces.js gives the same pieces as the runtime's decoder, and decodes few tokens for each."""

import json
import random
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from posenc_export.runtime.artefact.tokenizer import TokenizerCodec
from tests.runtime.artefact.test_tokenizer import _byte_fallback

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
LETTERS = "▁Zoabcfé"  # ids from 256 on, after those of bytes, and before the special token
# Decodes as a tokenizer with tokens for bytes: a run that is no UTF-8 is replaced byte by byte.
SCRIPT = """
import { readFileSync } from "node:fs";
import { Pieces, endOf } from "./pieces.mjs";

const { letters, rows } = JSON.parse(readFileSync(0));
const special = 256 + letters.length;
let most = 0;
function characters(bytes) {
  try {
    const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
    return decoder.decode(Uint8Array.from(bytes));
  } catch {
    return "\\ufffd".repeat(bytes.length);
  }
}
function decode(ids) {
  let [text, bytes] = ["", []];
  for (const id of ids) {
    if (id < 256) bytes.push(id);
    else {
      if (id !== special) text += characters(bytes) + letters[id - 256].replace("▁", " ");
      if (id !== special) bytes = [];
    }
  }
  most = Math.max(most, ids.length);
  return (text + characters(bytes)).replace(/^ /, "");
}
const silent = new Set([special]);
const name = (id) => (id < 256 ? `<0x${id.toString(16).toUpperCase().padStart(2, "0")}>` : "");
const pieces = rows.map(([prompt, tokens]) => {
  const row = new Pieces(decode, silent, endOf(prompt, silent, name));
  return [...tokens.map((token) => row.push(token)), row.rest()];
});
console.log(JSON.stringify({ pieces, most }));
"""


def _run(folder: Path, rows: list[Any]) -> dict[str, Any]:
    source = resources.files("posenc_export.page").joinpath("assets", "pieces.js").read_bytes()
    (folder / "pieces.mjs").write_bytes(source)
    (folder / "run.mjs").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        ["node", "run.mjs"],
        input=json.dumps({"letters": LETTERS, "rows": rows}),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _expected(folder: Path, rows: list[Any]) -> list[list[str]]:
    (folder / "tokenizer.json").write_text(_byte_fallback().to_str(), encoding="utf-8")
    codec = TokenizerCodec(folder)
    expected = []
    for prompt, tokens in rows:
        pieces = codec.pieces(prompt)
        expected.append([*map(pieces.push, tokens), pieces.rest()])
    return expected


def test_a_prompt_that_ends_within_a_character_gives_the_pieces_of_the_runtime(
    tmp_path: Path,
) -> None:
    ids = _byte_fallback().encode("Zo € fé 🙂🙂🙂🙂🙂🙂 abc ÄÖ").ids
    rows = [[ids[:split], ids[split:]] for split in range(len(ids))]
    shown = _run(tmp_path, rows)
    assert shown["pieces"] == _expected(tmp_path, rows)
    assert not any("\ufffd" in piece for row in shown["pieces"] for piece in row)


def test_random_bytes_give_the_pieces_of_the_runtime(tmp_path: Path) -> None:
    draw = random.Random(0)
    choices = [*range(120, 256), *range(256, 256 + len(LETTERS) + 1)]
    rows = [[draw.choices(choices, k=20), draw.choices(choices, k=60)] for _ in range(20)]
    assert _run(tmp_path, rows)["pieces"] == _expected(tmp_path, rows)


@pytest.mark.parametrize("token", [0x80, 0xFF, 256 + len(LETTERS)])
def test_tokens_without_text_are_not_decoded_again_and_again(token: int, tmp_path: Path) -> None:
    assert _run(tmp_path, [[[257] * 40, [token] * 400]])["most"] <= 64
