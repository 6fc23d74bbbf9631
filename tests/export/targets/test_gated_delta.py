"""The gated delta rule of a module that is read, beside its recurrence in float64 and transformers'
functions.
"""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posenc_export.export import ReadAs, Sources
from posenc_export.ops import recurrence
from posenc_export.runtime import load
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import combinations
from tests.traces import artefact

HEADS, SIZE, TOKENS = 4, 8, 150
pytestmark = pytest.mark.xdist_group("gated delta")
# Logarithms of decays and rates, by kind of input. With equal keys, rates near 2 and no decay, each
# token undoes what the last one wrote.
HARD: dict[str, tuple[float, float]] = {
    "equal tokens, rates of 2": (-60.0, 30.0),
    "equal tokens, rates of 1": (-60.0, 0.0),
    "strong decays": (40.0, 1.0),
    "small rates": (-60.0, -9.0),
    "decays by entry": (40.0, 1.0),
}


def loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, rate: Tensor) -> Tensor:
    """The rule token by token: heads [B,S,H,D], g [B,S,H,1 or D], rate [B,S,H]."""
    state, found = k.new_zeros(k.shape[0], HEADS, SIZE, SIZE), []
    for t in range(k.shape[1]):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhd,bhdv->bhv", k[:, t], state)
        state = state + torch.einsum("bhd,bhv->bhdv", k[:, t], error * rate[:, t, :, None])
        found.append(torch.einsum("bhd,bhdv->bhv", q[:, t], state))
    return torch.stack(found, 1)


class Rule(nn.Module):
    """Queries, keys, values, decays and rates, as parts of x, to outputs of the rule."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = [HEADS * SIZE] * 3 + [HEADS * entries, HEADS]
        self.out = nn.Linear(HEADS * SIZE, 16)

    def forward(self, x: Tensor) -> Tensor:
        *heads, g, rate = x.split(self.parts, -1)
        q, k, v, g = (part.unflatten(2, (HEADS, -1)) for part in (*heads, g))
        k = nn.functional.normalize(k, dim=-1)
        decay = -nn.functional.softplus(g)
        return self.out(loop(q, k, v, decay, 2 * torch.sigmoid(rate)).flatten(2))


def entries_of(kind: str) -> int:
    return SIZE if "entry" in kind else 1


@functools.cache
def _sources(entries: int) -> Sources:
    module = Rule(entries).eval()
    example = torch.randn(2, 12, sum(module.parts), generator=torch.Generator().manual_seed(3))
    return Sources(module, how=ReadAs(example, 256))


def _inputs(kind: str) -> np.ndarray:
    """Parts of x [n,E]; with strong decays, only every third token forgets, and by entry a third of
    the entries nothing.
    """
    decay, rate = HARD[kind]
    x = np.random.default_rng(1).standard_normal((TOKENS, sum(Rule(entries_of(kind)).parts)))
    x[:, 96:-HEADS], x[:, -HEADS:] = decay, rate
    if decay > 0:
        x[np.arange(TOKENS) % 3 > 0, 96:-HEADS] = -decay
    if "entry" in kind:
        x[:, 96:-HEADS:3] = -60.0
    if kind.startswith("equal"):
        x[:] = x[0]
    return x.astype(np.float32)


@pytest.mark.parametrize(("kind", "target"), combinations([*HARD], ["onnx", "ort", "torchscript"]))
def test_outputs_match_the_recurrence_in_float64(kind: str, target: str) -> None:
    sources, x = _sources(entries_of(kind)), _inputs(kind)
    model = load(artefact(sources, target), provider="cpu")
    assert model.manifest.operators.get("LinearAttention") == (1 if target == "ort" else None)
    with torch.no_grad():
        expected = Rule(entries_of(kind)).double()(torch.from_numpy(x)[None].double())[0].numpy()
    # Errors of all tokens add up in a state that forgets nothing.
    bound = tolerance("float32", 1, 48 if "2" not in kind else TOKENS * TOKENS)
    session = model.session()
    assert worst_error(session.prefill(x[None], chunk=TOKENS)[0], expected) <= bound
    session.reset()
    parts = [session.prefill(x[None, :70], chunk=33)[0]]
    parts += [session.step(token[None]) for token in x[70:80]]
    parts.append(session.prefill(x[None, 80:], chunk=64)[0])
    assert worst_error(np.concatenate(parts), expected) <= bound


@pytest.mark.parametrize("entries", [1, 16])
def test_the_rule_is_that_of_transformers(entries: int) -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as by_entry
    from transformers.models.qwen3_next import modeling_qwen3_next as peer

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 70, 3, 16, generator=generator) for _ in range(2))
    v, state = torch.randn(2, 70, 6, 24, generator=generator), torch.randn(2, 6, 16, 24)
    decay = -torch.rand(2, 70, 6, entries, generator=generator)
    rate = torch.rand(2, 70, 6, generator=generator)
    settings = {"g": decay, "beta": rate, "initial_state": state, "output_final_state": True}
    q, k = (peer.l2norm(part) for part in (q, k))
    if entries == 1:
        settings["g"] = decay[..., 0]
        expected = peer.torch_recurrent_gated_delta_rule(q, k, v, **settings)
    else:
        heads = (part.repeat_interleave(2, dim=2) for part in (q, k))
        expected = by_entry.recurrent_kimi_delta_attention(*heads, v, **settings)
    actual = recurrence.gated_delta(q / 4, k, v, decay.flatten(2), rate, state)
    for ours, theirs in zip(actual, expected, strict=True):
        assert worst_error(ours.numpy(), theirs.numpy()) <= tolerance("float32", 1, 70)
