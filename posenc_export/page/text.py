"""What a page of a model with a tokenizer needs: libraries, chat template, sample texts."""

import shutil
from pathlib import Path
from typing import Any, Dict, List

from posenc_export.runtime.artefact.chat_template import ChatCodec, chat_codec
from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.artefact.tokenizer import codec

# Files of npm packages, by their names in the page.
LIBRARIES = {
    "tokenizers.min.mjs": "@huggingface/tokenizers/dist/tokenizers.min.mjs",
    "jinja.js": "@huggingface/jinja/dist/index.js",
}
TEXTS = (
    "The same text gives the same tokens on every machine, and the same logits however it is "
    "split into calls.",
    "  Two spaces,\n\ta tab\r\n\n\nand lines; it's 1,234.5e-06 + x_1 -> {'y': [z]} // 100 %",
    "naïve Ångström, Straße, \u65e5\u672c\u8a9e, \u0645\u0631\u062d\u0628\u0627, "
    "\U0001f642\U0001f1eb\U0001f1f7 and e\u0301",
)
TALKS: List[List[Dict[str, str]]] = [
    [{"role": "user", "content": " What is 2 + 2? "}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi!\n"},
        {"role": "user", "content": TEXTS[2]},
    ],
    [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Why?"}],
]


def copy_libraries(modules: Path, page: Path) -> None:
    """Copy the libraries from a node_modules folder. Raise ValueError if one is not there."""
    (page / "text").mkdir()
    for name, path in LIBRARIES.items():
        if not (modules / path).is_file():
            package = path.partition("/dist")[0]
            rule = f"page: expected the npm package {package} beside onnxruntime-web for the text"
            raise ValueError(f"{rule} of this model, got none; npm install {package}")
        shutil.copyfile(modules / path, page / "text" / name)


def text_data(folder: Path, manifest: Manifest) -> Dict[str, Any]:
    """Return the part of page.json about text.

    Raises:
        ValueError, ModuleNotFoundError: as for `codec` and `chat_codec`.
    """
    converter, chat = codec(folder, manifest), chat_codec(folder, manifest)
    samples: List[Dict[str, Any]] = [
        {"text": text, "ids": converter.encode(text)} for text in TEXTS
    ]
    if chat is None:
        return {"template": None, "special": {}, "ends": manifest.stop_ids, "samples": samples}
    talks = [talk for talk in TALKS if _renders(chat, talk)]
    return {
        "template": chat.template,
        "special": chat.special,
        "ends": chat.ends,
        "samples": [*samples, *({"messages": talk, "ids": chat.encode(talk)} for talk in talks)],
    }


def _renders(chat: ChatCodec, talk: List[Dict[str, str]]) -> bool:
    """Whether the template accepts a conversation; some have no system message."""
    try:
        chat.text(talk)
    except ValueError:
        return False
    return True
