"""What llama.cpp's conversion changes in the tensors of a model, undone."""

import re
from typing import Any, Callable, Dict, Mapping

import numpy as np

Config = Dict[str, Any]
Change = Callable[[np.ndarray, Config], np.ndarray]


def undone(name: str, rows: np.ndarray, undo: Mapping[str, Change], config: Config) -> np.ndarray:
    """Return a tensor of the file, or indices [N,1] of its rows, as before the conversion."""
    for pattern, change in undo.items():
        if re.search(pattern, name):
            return np.ascontiguousarray(change(rows, config))
    return rows


def _heads_apart(key: str) -> Change:
    """Return what undoes the turn of pairs (k, k + D/2) of a head into (2k, 2k + 1)."""

    def undo(rows: np.ndarray, config: Config) -> np.ndarray:
        heads = rows.reshape(int(config[key]), -1, 2, *rows.shape[1:])
        return heads.swapaxes(1, 2).reshape(rows.shape)

    return undo


def _in_groups(rows: np.ndarray, config: Config) -> np.ndarray:
    """Undo the sorting of packed groups (queries, key, value) into queries, keys and values."""
    groups = heads = int(config["num_attention_heads"])
    if config["model_type"] == "falcon":
        groups = int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1
    size = len(rows) // (heads + 2 * groups)
    parts = np.split(rows, [heads * size, (heads + groups) * size])
    grouped = [part.reshape(groups, -1, *rows.shape[1:]) for part in parts]
    return np.concatenate(grouped, axis=1).reshape(rows.shape)


# What undoes the conversion of each kind of architecture, by a pattern of the tensor's name.
HEADS = {"q": "num_attention_heads", "k": "num_key_value_heads"}
TURNED: Dict[str, Change] = {rf"attn_{n}\.": _heads_apart(key) for n, key in HEADS.items()}
ONE_MORE: Dict[str, Change] = {r"norm\.weight$": lambda weight, config: weight - np.float32(1)}
GROUPED: Dict[str, Change] = {r"attn_qkv\.": _in_groups}
CONV1D: Dict[str, Change] = {
    r"attn_(qkv|output)\.weight|ffn_(up|down)\.weight": lambda weight, config: weight.T
}
