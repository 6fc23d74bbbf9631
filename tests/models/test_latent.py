"""Latent attention and experts chosen from groups: oracles and refusals."""

import re
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc_export.export import Sources, export
from posenc_export.models.parts import build
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.models.checkpoints import saved  # noqa: E402
from tests.models.patterns import share, theirs, tokens_of  # noqa: E402


def test_layers_for_multi_token_prediction_are_ignored(tmp_path: Path) -> None:
    peer, folder = saved("deepseek_v3", tmp_path)
    weights = load_file(folder / "model.safetensors")
    behind = {"model.layers.61.eh_proj.weight": torch.zeros(64, 128)}  # of the published model
    save_file({**weights, **behind}, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        logits = from_pretrained(folder)(torch.from_numpy(tokens_of())).numpy()
    assert share([(logits, theirs(peer, tokens_of()))]) <= 1


@pytest.mark.parametrize("target", ["pt2", "ort-cuda"])
def test_experts_and_norms_behind_products_are_exported(target: str, tmp_path: Path) -> None:
    _, folder = saved("deepseek_v3", tmp_path)
    export(Sources(from_pretrained(folder)), target, tmp_path / "artefact", verify="quick")


@pytest.mark.parametrize(
    "parts", [{}, {"query_rank": 7, "bias": True}], ids=["plain", "with a rank of queries"]
)
def test_a_latent_projection_matches_its_oracle(parts: Dict[str, Any]) -> None:
    torch.manual_seed(0)
    result = build(
        "projection",
        {"name": "latent", "rotary": 4, "value_size": 6, "rank": 5, **parts},
        16,
        3,
        3,
        10,
    )
    for parameter in result.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(1, 7, 16)
    with torch.no_grad():
        given = result(x)
    for ours, wanted in zip(given, result.exact(x[0].double().numpy()), strict=True):
        assert np.allclose(ours[0].numpy(), wanted.reshape(7, -1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", ["sigmoid", "sigmoid_of_chosen"])
@pytest.mark.parametrize("groups", [(1, 1, 5), (3, 2, 4), (6, 2, 3)], ids=str)
def test_experts_chosen_from_groups_match_their_oracle(
    groups: Tuple[int, int, int], weights: str
) -> None:
    torch.manual_seed(0)
    count, kept, chosen = groups
    choice = {"name": "groups", "groups": count, "kept": kept}
    result = build(
        "mlp",
        {
            "name": "experts",
            "experts": 12,
            "chosen": chosen,
            "hidden": 8,
            "weights": weights,
            "choice": choice,
            "factor": 2.5,
        },
        16,
    )
    for parameter in result.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 16)
    with torch.no_grad():
        given = result(x).numpy()
    for row in range(2):
        assert np.allclose(given[row], result.exact(x[row].double().numpy()), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "spec", "context", "named"),
    [
        (
            "projection",
            {"name": "latent", "rotary": 4, "value_size": 6, "rank": 5},
            (16, 4, 2, 10),
            "kv_heads to equal heads, got 2 and 4",
        ),
        (
            "projection",
            {"name": "latent", "rotary": 10, "value_size": 6, "rank": 5},
            (16, 4, 4, 10),
            "rotary to be 1 .. 9",
        ),
        (
            "mlp",
            {"choice": {"name": "groups", "groups": 3, "kept": 1}},
            (16,),
            "groups to divide the experts, with at least 2 in each, got 3 groups of 8",
        ),
        (
            "mlp",
            {"choice": {"name": "groups", "groups": 8, "kept": 8}},
            (16,),
            "at least 2 in each, got 8 groups of 8",
        ),
        (
            "mlp",
            {"choice": {"name": "groups", "groups": 4, "kept": 1}},
            (16,),
            "kept to be 1 .. 4 groups with at least 3 experts together, got 1 groups of 2 each",
        ),
        (
            "mlp",
            {"choice": {"name": "best"}},
            (16,),
            "expected name to be one of highest, groups, got 'best'",
        ),
        ("mlp", {"factor": 0.0}, (16,), "factor to be a finite number above 0, got 0.0"),
    ],
)
def test_invalid_parameters_of_parts_are_refused(
    kind: str, spec: Dict[str, Any], context: Tuple[int, ...], named: str
) -> None:
    experts = {"name": "experts", "experts": 8, "chosen": 3, "hidden": 4} if kind == "mlp" else {}
    with pytest.raises(ValueError, match=re.escape(named)):
        build(kind, {**experts, **spec}, *context)
