"""Blocks and models with the weights of an original module give its outputs, and what differs is
named.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from posenc_export import (
    AttentionBlock,
    Stack,
    block_config,
    compare,
    decoder_config,
    encoder_config,
    load,
)
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.models.presets import seeded
from posenc_export.shared.numerics import tolerance, worst_error
from tests.cases import choice
from tests.tiny import block

PAGE = Path(__file__).parents[2] / "docs/from-your-weights.md"
WIDTH, HEADS = 24, 3
X = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(0))


def _mha(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    result = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).eval()
    for name, value in result.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(value)
    return result


def _causal(module: nn.MultiheadAttention) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask
    return lambda x: module(x, x, x, attn_mask=mask(x.size(1)))


def _of(original: nn.MultiheadAttention, causal: bool = True) -> AttentionBlock:
    """Return a block without positions that has the weights of an attention of torch."""
    biases = dict.fromkeys(("qkv_bias", "output_bias"), original.in_proj_bias is not None)
    config = block_config(WIDTH, HEADS, 100, encoding="nope", causal=causal, **biases)
    block = AttentionBlock(config).eval()
    parameters = dict(block.named_parameters())
    values = original.state_dict().values()  # of q, k and v, then of the output
    block.load_state_dict(dict(zip(parameters, values, strict=True)))
    return block


@pytest.mark.parametrize("bias", [True, False])
def test_a_block_has_the_weights_of_an_attention_of_torch(bias: bool) -> None:
    original = _mha(bias=bias)
    result = compare(_of(original), _causal(original), X)
    calls = {f"batch 3, start 0: {call}" for call in ("steps", "rewind by row")}
    assert result["passed"] and {"full pass", *calls} <= set(result["cells"])


def test_bidirectional_attention_is_compared_without_a_cache() -> None:
    original = _mha()
    assert compare(_of(original, causal=False), lambda x: original(x, x, x), X)["passed"]


OTHER: dict[str, dict[str, Any]] = {
    "the encoding is rope:theta=500000.0": {"encoding": "rope:theta=500000"},
    "the encoding is rope:rotary=6": {"encoding": "rope:rotary=6"},
    "the encoding is rope:rotary=4,layout=interleaved": {
        "encoding": "rope:rotary=4,layout=interleaved"
    },
    "the encoding is alibi": {"encoding": "alibi"},
    "the encoding is nope": {"encoding": "nope"},
    "the number of heads is 6": {"heads": 2 * HEADS},
    "scores are scaled by 2 times the factor of the reference": {"twice": True},
    None: {"encoding": "rope:theta=500"},
}


@pytest.mark.parametrize("cause", OTHER)
def test_what_differs_from_the_original_is_named(cause: Any) -> None:
    def made(twice: bool = False, heads: int = HEADS, encoding: str = "rope") -> AttentionBlock:
        block = AttentionBlock(block_config(WIDTH, heads, 100, encoding=encoding)).eval()
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in block.parameters():
                weight.copy_(torch.randn(weight.shape, generator=random) / 4)
            block.attention.projection.qkv.weight[:WIDTH] *= 2 if twice else 1
        return block

    named = f"they agree if {cause}" if cause else "check heads, encoding, theta, layout, scale"
    with pytest.raises(ValueError, match=f"only after the first token: {named}; docs/from-your"):
        compare(made(), made(**OTHER[cause]), X)


def test_wrong_weights_are_reported_as_a_difference_from_the_first_token_on() -> None:
    ours = _of(_mha(bias=False))
    with pytest.raises(ValueError, match="from the first token on: check weights, biases, norms"):
        compare(ours, _causal(_mha()), X)


def test_an_original_that_attends_to_later_tokens_is_found() -> None:
    ours = _of(_mha())
    said = "and the original is not causal, as ours is: .*; give it a causal mask"
    with pytest.raises(ValueError, match=said):
        compare(ours, lambda x: _mha()(x, x, x), X)


@pytest.mark.exhaustive
def test_an_artefact_is_compared_with_the_original(tmp_path: Path) -> None:
    original = _mha()
    export(_of(original), "ort", tmp_path / "a")
    assert compare(load(tmp_path / "a", provider="cpu"), _causal(original), X)["passed"]


def test_an_original_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the original in eval mode"):
        compare(seeded(block("rope")), _mha().train(), X)


MODELS: dict[str, Any] = {
    "block": block("rope"),
    "block with coordinates": block("mrope"),
    "block with a state": block("fox"),
    "decoder": decoder_config(61, 2, 40, block("t5")),
    "encoder": encoder_config(61, 2, 40, block("learned", causal=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_called_with_x_alone_gives_the_full_pass(name: str) -> None:
    model = seeded(MODELS[name])
    x = _inputs(model)
    with torch.no_grad():
        result = model(x).numpy()
    error = worst_error(result, eager_session(model).prefill(x.numpy()))
    assert error <= tolerance("float32", 2, 64)


def _inputs(model: Any) -> torch.Tensor:
    ids = isinstance(model, Stack)
    return torch.randint(61, (2, 9)) if ids else torch.randn(2, 9, model.config.width)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_call_with_x_alone_reach_all_weights(name: str) -> None:
    model = seeded(MODELS[name]).train()
    model(_inputs(model)).square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


FLOAT64 = "expected weights in float32, float16 or bfloat16, got float64, in which .*; call .float"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float64_is_refused_where_it_would_be_computed_in_float32(name: str) -> None:
    model = seeded(MODELS[name]).double()
    x = _inputs(model)
    with pytest.raises(ValueError, match=FLOAT64):
        model(x.double() if x.is_floating_point() else x)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float64_is_not_exported(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=FLOAT64):
        export(seeded(MODELS[name]).double(), "torchscript", tmp_path / "a")


def test_a_sequence_beyond_the_range_is_refused() -> None:
    said = "expected at most 8 tokens, the range of positions, got 12"
    with pytest.raises(ValueError, match=said):
        seeded(block_config(WIDTH, HEADS, 8))(X)


@pytest.mark.parametrize("exported", choice([False, True], [False]))
def test_the_programs_of_the_page_run(
    exported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        if not exported:
            slow = r"^(export_model\(|print\(compare\(load\().*$"
            program = re.sub(slow, "", program, flags=re.MULTILINE)
        exec(compile(program, "page", "exec"), names)
    assert names["losses"][-1] < names["losses"][0] / 2
    made = sorted(path.name for path in Path("build").iterdir()) if exported else None
    assert made in (None, ["layer", "learner", "mha", "stack"])
