"""Small random checkpoints of encoder-decoder models, and adapters that let tests call such a
decoder like a decoder without encoder.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from posenc_export import from_pretrained
from posenc_export.runtime import Session

SOURCES = 13  # tokens of the longest source
LENGTHS = [SOURCES, 5, 9]
POSITIONS = 400
T5 = {
    "vocab_size": 61, "d_model": 48, "d_kv": 16, "d_ff": 40, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 4, "n_positions": POSITIONS,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
}  # fmt: skip
BART = {
    "vocab_size": 61, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 3, "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 56, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
OTHERS = ("Bart", "M2M100", "Pegasus", "MBart", "Blenderbot")
COUNTING = ("marian", *map(str.lower, OTHERS))  # whose decoder counts positions from 0
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5 both parts": ("T5", T5),
    "t5 both parts, untied": (
        "T5",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5 both parts": ("MT5", {**T5, "num_decoder_layers": 2, "d_kv": 8}),
    **{kind.lower(): (kind, BART) for kind in OTHERS},
    "marian": ("Marian", {**BART, "decoder_vocab_size": 61}),
}


def made(name: str) -> Any:
    """Return transformers' model with random parameters, float32, in eval mode."""
    torch.manual_seed(0)
    kind, keys = MODELS[name]
    head = "MarianMTModel" if kind == "Marian" else f"{kind}ForConditionalGeneration"
    config = getattr(transformers, f"{kind}Config")(**keys)
    model = getattr(transformers, head)(config)
    # transformers 5 ties all new T5 models; published checkpoints may have a separate head.
    if name == "t5 both parts, untied":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape))
    return randomised(model)


def randomised(model: Any) -> Any:
    """Set all parameters of a model to random numbers, and return the model in eval mode."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "embed_positions" in key:  # sines and cosines of Marian and Pegasus, never saved
                continue
            parameter.copy_(torch.randn(parameter.shape) * (0.2 if parameter.dim() > 1 else 0.1))
            if "norm" in key and key.endswith("weight"):
                parameter += 1.0
            if key.endswith(
                ".q.weight"
            ):  # T5 does not divide scores by sqrt(D), so its queries are smaller
                parameter *= model.config.d_kv**-0.5
    return model.eval()


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """Return the encoder's inputs for three rows and their mask [3,Q]."""
    ids = np.random.default_rng(5).integers(3, 61, (3, SOURCES))
    return ids, (np.arange(SOURCES)[None] < np.array(LENGTHS)[:, None]).astype(np.int64)


class Peer:
    """Transformers' model with fixed encoder inputs, called like a decoder with token ids."""

    def __init__(self, model: Any, untied: bool = False) -> None:
        self.model, self.config, self.untied = model, model.config, untied
        read, mask = map(torch.from_numpy, inputs())
        self.given = {"input_ids": read, "attention_mask": mask}

    def __call__(
        self, tokens: Any, attention_mask: Any = None, position_ids: Any = None, **cache: Any
    ) -> Any:
        given = {key: value[: len(tokens)] for key, value in self.given.items()}
        if attention_mask is not None and "5" not in self.config.model_type:
            return self._alone(given, tokens, attention_mask.bool(), **cache)
        return self.model(  # T5 uses distances only, no positions
            **given, decoder_input_ids=tokens, decoder_attention_mask=attention_mask, **cache
        )

    def _alone(self, given: Any, tokens: Any, seen: Any, **cache: Any) -> Any:
        """Call the model with each row alone, since it counts the positions of padding."""
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        for row, mask in enumerate(seen):
            own = {key: value[row : row + 1] for key, value in given.items()}
            outputs = self.model(**own, decoder_input_ids=tokens[row : row + 1, mask], **cache)
            logits[row, mask] = outputs.logits[0]
        return SimpleNamespace(logits=logits)

    def save_pretrained(self, folder: Path) -> None:
        """Save the model like a published one. transformers 5 writes tie_word_embeddings=true
        for all T5 models, and ignores the key when it loads them.
        """
        self.model.save_pretrained(folder)
        if self.untied:
            path = folder / "config.json"
            config = {**json.loads(path.read_text()), "tie_word_embeddings": False}
            path.write_text(json.dumps(config))


class Reading:
    """A decoder's session that adds the encoder outputs, so that it is called like a session of a
    decoder without encoder.

    Args:
        session: session of the decoder.
        encoded: outputs of the encoder for each row [q,N].
    """

    def __init__(self, session: Session, encoded: list[np.ndarray]) -> None:
        self.session, self.encoded, self.step = session, encoded, session.step
        self.manifest = session.manifest

    def prefill(self, inputs: Any, **how: Any) -> np.ndarray:
        encoder = None if self.session.length.any() else self.encoded[: len(inputs)]
        return self.session.prefill(inputs, encoder=encoder, **how)


def saved(name: str, folder: Path) -> tuple[Peer, Any, list[np.ndarray]]:
    """Save transformers' model and a tokenizer. Return the model with our decoder and the outputs
    of our encoder for each row [q,N].
    """
    peer = Peer(made(name), untied=name == "t5 both parts, untied")
    peer.save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{index}": index for index in range(61)}, "w2")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    generation = {"decoder_start_token_id": 0, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return peer, from_pretrained(folder, part="decoder"), encoded(folder)


def encoded(folder: Path) -> list[np.ndarray]:
    """Return the outputs of our encoder for each row [q,N]."""
    encoder, ids = from_pretrained(folder, part="encoder"), torch.from_numpy(inputs()[0])
    pairs = zip(ids, LENGTHS, strict=True)
    with torch.no_grad():
        return [encoder(row[None, :length])[0].numpy() for row, length in pairs]
