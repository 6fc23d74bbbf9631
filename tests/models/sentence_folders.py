"""Tiny folders as sentence-transformers saves them."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor

from posenc_export.export import export
from posenc_export.models.pretrained import from_pretrained
from tests.models.encoders import SIZES, saved

PACKAGE = "sentence_transformers.models"
MOST = 9  # tokens of a text, with [CLS] and [SEP]
SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]")
LONG = " ".join(f"w{4 + index % 50}" for index in range(30))
TEXTS = ["w5 w6", "w7 w8 w9 W5 w6 unknown", "", "w5", LONG]
DENSE = {
    "in_features": SIZES["hidden_size"],
    "out_features": 7,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}


def tokenizer() -> bytes:
    """Return a tokenizer.json whose own cutting and padding, as in published models, differ from
    those of the folder.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [*SPECIAL, *(f"w{index}" for index in range(len(SPECIAL), SIZES["vocab_size"]))]
    result = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "[UNK]"))
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    result.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 2)]
    )
    result.enable_truncation(5)
    result.enable_padding(pad_id=1, length=5)
    return result.to_str().encode()


def folder(
    path: Path,
    pooling: dict[str, Any],
    after: Sequence[Any] = (),
    lower: bool = False,
    name: str = "bert",
) -> Any:
    """Write a folder, and return transformers' model of its encoder.

    Args:
        pooling: config of the module Pooling.
        after: config of a module Dense, or the name of another module.
    """
    peer, _ = saved(name, path)
    (path / "tokenizer.json").write_bytes(tokenizer())
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 64}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    cut = {"max_seq_length": MOST, "do_lower_case": lower}
    (path / "sentence_bert_config.json").write_text(json.dumps(cut))
    names = [given if isinstance(given, str) else "Dense" for given in after]
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules += [(one, f"{index}_{one}") for index, one in enumerate(names, 2)]
    for index, given in enumerate(after, 2):
        if isinstance(given, dict):
            _dense(path / f"{index}_Dense", given)
    (path / "1_Pooling").mkdir()
    pooled = {"word_embedding_dimension": SIZES["hidden_size"], **pooling}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooled))
    listed = [
        {"idx": index, "name": str(index), "path": place, "type": f"{PACKAGE}.{kind}"}
        for index, (kind, place) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    return peer


_kept = tempfile.TemporaryDirectory()


@functools.cache
def artefact() -> Path:
    """Return the artefact of a folder with pooling mean, which is exported once in a process; tests
    must not modify it.
    """
    path = Path(_kept.name)
    folder(path, {"pooling_mode": "mean"})
    export(from_pretrained(path), "torchscript", path / "artefact", verify=False)
    return path / "artefact"


def dense_weights(index: int) -> dict[str, Tensor]:
    """Return the weights of the module Dense at this place."""
    random = torch.Generator().manual_seed(index)
    return {
        "linear.weight": 0.3 * torch.randn(7, SIZES["hidden_size"], generator=random),
        "linear.bias": torch.randn(7, generator=random),
    }


def _dense(path: Path, config: dict[str, Any]) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(dense_weights(int(path.name[0])), path / "model.safetensors")
