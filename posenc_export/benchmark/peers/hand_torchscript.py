"""A block written by hand for TorchScript, with caches that are written in place."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posenc_export.benchmark.opened import CallSession, Opened
from posenc_export.benchmark.peers.eager import rebuilt
from posenc_export.models.block import AttentionBlock
from posenc_export.runtime.artefact.manifest import Manifest

BASE = 10000.0  # of the angles of RoPE


def open_session(folder: Path, manifest: Manifest, threads: int, batch: int) -> Opened:
    torch.set_num_threads(threads)
    model, source = rebuilt(manifest)
    assert isinstance(model, AttentionBlock)
    with warnings.catch_warnings():  # torch.jit announces its retirement at every call
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        module = torch.jit.freeze(torch.jit.script(HandBlock(model).eval()))
    return Opened(HandSession(module, model, batch), source)


class HandBlock(torch.nn.Module):
    """One attention with its cache [B,K,M,D], of a block that `runtimes.is_plain_block` takes."""

    def __init__(self, model: AttentionBlock) -> None:
        super().__init__()
        attention, projection = model.config.attention, model.get_submodule("attention.projection")
        self.qkv: Any = projection.qkv
        self.output: Any = projection.output
        self.heads, self.kv_heads = attention.heads, attention.kv_heads
        self.head_size = size = attention.head_size
        self.rotates = [spec["name"] for spec in attention.encodings] == ["rope"]
        frequencies = BASE ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(model.config.max_positions)[:, None] * frequencies
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, x: Tensor, columns: Tensor, end: int, keys: Tensor, values: Tensor) -> Tensor:
        """x [B,S,E] at columns [S] int64 of the cache, the last of which is end - 1, to [B,S,E]."""
        heads = self.qkv(x).view(x.size(0), x.size(1), -1, self.head_size)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.rotates:
            cos, sin = self.cos[columns].unsqueeze(1), self.sin[columns].unsqueeze(1)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys.index_copy_(2, columns, k.transpose(1, 2))
        values.index_copy_(2, columns, v.transpose(1, 2))
        visible = None if x.size(1) == 1 else torch.arange(end) <= columns.unsqueeze(1)
        grouped, q = self.heads != self.kv_heads, q.transpose(1, 2)
        k, v = keys[:, :, :end], values[:, :, :end]
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, enable_gqa=grouped
        )
        return self.output(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B,S,N,D] by angles of cos, sin [S,1,D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class HandSession(CallSession):
    """Calls of a scripted HandBlock, written for a block, with `batch` rows."""

    def __init__(self, module: torch.jit.ScriptModule, model: AttentionBlock, batch: int) -> None:
        attention = model.config.attention
        self.module, self.step_column = module, torch.zeros(1, dtype=torch.int64)
        shape = batch, attention.kv_heads, model.config.max_positions, attention.head_size
        self.keys, self.values = torch.zeros(2, *shape)

    def call(self, inputs: np.ndarray) -> np.ndarray:
        end = self.length + inputs.shape[1]
        step = inputs.shape[1] == 1
        columns = self.step_column.fill_(self.length) if step else torch.arange(self.length, end)
        x = torch.from_numpy(inputs)
        with torch.inference_mode():
            output: np.ndarray = self.module(x, columns, end, self.keys, self.values).numpy()
        return output
