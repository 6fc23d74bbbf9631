"""Blocks and models built from a state_dict, found by names of torch and of common models, give
the outputs of the original module.
"""

import json
import re
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from safetensors.torch import save_file
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
from posenc_export.commands.cli import main
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.models.named_projections import find
from posenc_export.models.presets import seeded
from posenc_export.shared.numerics import tolerance, worst_error
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
    return lambda x: module(
        x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(x.size(1))
    )


@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention_of_torch_is_found_by_its_names(bias: bool) -> None:
    original = _mha(bias=bias)
    ours = AttentionBlock.from_state_dict(original.state_dict(), HEADS, 100, encoding="nope")
    result = compare(ours, _causal(original), X)
    assert result["passed"] and {
        "full pass",
        "batch 3, start 0: steps",
        "batch 3, start 0: rewind by row",
    } <= set(result["cells"])


def test_bidirectional_attention_is_compared_without_a_cache() -> None:
    original = _mha()
    ours = AttentionBlock.from_state_dict(
        original.state_dict(), HEADS, 100, encoding="nope", causal=False
    )
    assert compare(ours, lambda x: original(x, x, x), X)["passed"]


FORMS = {
    "Llama": "q_proj k_proj v_proj o_proj",
    "Meta": "wq wk wv wo",
    "diffusers": "to_q to_k to_v to_out.0",
    "BERT": "self.query self.key self.value output.dense",
    "DistilBERT": "q_lin k_lin v_lin out_lin",
    "timm": "qkv proj",
    "flash-attn": "Wqkv out_proj",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn."])
def test_names_of_common_models_are_found(form: str, prefix: str) -> None:
    original = _mha()
    q, k, v = original.in_proj_weight.chunk(3)
    matrices = {
        "q": q,
        "k": k,
        "v": v,
        "qkv": original.in_proj_weight,
        "o": original.out_proj.weight,
    }
    biases = {
        **dict(zip("qkv", original.in_proj_bias.chunk(3), strict=True)),
        "qkv": original.in_proj_bias,
        "o": original.out_proj.bias,
    }
    parts = dict(
        zip(
            ("q", "k", "v", "o") if len(FORMS[form].split()) == 4 else ("qkv", "o"),
            FORMS[form].split(),
            strict=True,
        )
    )
    weights = {f"{prefix}{name}.weight": matrices[part] for part, name in parts.items()} | {
        f"{prefix}{name}.bias": biases[part] for part, name in parts.items()
    }
    weights |= {"other.weight": torch.ones(3)} if prefix else {"rotary_emb.inv_freq": torch.ones(4)}
    ours = AttentionBlock.from_state_dict(weights, HEADS, 100, prefix, encoding="nope")
    assert compare(ours, _causal(original), X)["passed"]


def test_matrices_of_gpt2_are_transposed() -> None:
    original = _mha()
    weights = {
        "c_attn.weight": original.in_proj_weight.T,
        "c_attn.bias": original.in_proj_bias,
        "c_proj.weight": original.out_proj.weight.T,
    }
    weights |= {"c_proj.bias": original.out_proj.bias, "bias": torch.ones(1, 1, 100, 100)}
    assert compare(
        AttentionBlock.from_state_dict(weights, HEADS, 100, encoding="nope"), _causal(original), X
    )["passed"]


REFUSED = {
    "query_key_value.weight": "GPT-NeoX and Bloom order rows head by head",
    "to_kv.weight": "some models order rows by k and v",
    "q_norm.weight": "a norm of queries or keys",
    "relative_attention_bias.weight": "expected tensors named as q, q_proj, wq, to_q or query",
    "wq.weight": "expected each weight once, got q as q_proj.weight and wq.weight",
    "layers.1.q_proj.weight": "got 2 of them; give --prefix, one of , layers.1.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_cannot_be_decided_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])) as refused:
        find(
            {"q_proj.weight": (WIDTH, WIDTH), "o_proj.weight": (WIDTH, WIDTH), name: (WIDTH, WIDTH)}
        )
    assert "\n" not in str(refused.value)


def test_a_prefix_without_tensors_is_refused_with_those_that_have_some() -> None:
    with pytest.raises(
        ValueError,
        match="begin with 'layer.0.', got none; give one of layers.0.attn., layers.1.attn.",
    ):
        find(
            {
                f"layers.{n}.attn.{name}.weight": (WIDTH, WIDTH)
                for n in range(2)
                for name in ("wq", "wk", "wv", "wo")
            },
            "layer.0.",
        )


def test_a_prefix_for_names_without_one_is_refused() -> None:
    with pytest.raises(
        ValueError, match="begin with 'model.', got none; leave --prefix out: the names have none"
    ):
        find({"in_proj_weight": (3 * WIDTH, WIDTH), "out_proj.weight": (WIDTH, WIDTH)}, "model.")


def test_the_command_reads_a_file_and_prints_which_tensor_is_which(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    weights = {f"layers.0.attn.{name}": value for name, value in _mha().state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    chosen = [
        "--weights",
        str(tmp_path / "model.safetensors"),
        "--prefix",
        "layers.0.attn.",
        "--heads",
        str(HEADS),
        "--encoding",
        "nope",
        "--no-verify",
    ]
    assert (
        main(
            [
                "export",
                "block",
                *chosen,
                "--target",
                "torchscript",
                "-o",
                str(tmp_path / "a"),
                "--json",
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert (
        json.loads(printed.out)
        and "posenc: weights: qkv is layers.0.attn.in_proj_weight [72, 24]" in printed.err
    )
    assert (
        f"posenc: block: encoding nope, heads {HEADS}, kv heads {HEADS}, head size "
        f"{WIDTH // HEADS}, causal\n"
    ) in printed.err


OTHER: Dict[str, Dict[str, Any]] = {
    "the encoding is rope:theta=500000.0": {"encoding": "rope:theta=500000"},
    "the encoding is rope:rotary=6": {"encoding": "rope:rotary=6"},
    "the encoding is rope:rotary=4,layout=interleaved": {
        "encoding": "rope:rotary=4",
        "layout": "interleaved",
    },
    "the encoding is alibi": {"encoding": "alibi"},
    "the encoding is nope": {"encoding": "nope"},
    "the number of heads is 6": {"heads": 2 * HEADS},
    "scores are scaled by 2 times the factor of the reference": {"twice": "wq"},
    None: {"encoding": "rope:theta=500"},
}


@pytest.mark.parametrize("cause", OTHER)
def test_what_differs_from_the_original_is_named(cause: Any) -> None:
    def made(twice: str = "", **given: Any) -> AttentionBlock:
        weights = {
            name: torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(n))
            / (2 if name == twice else 4)
            for n, name in enumerate(("wq", "wk", "wv", "wo"))
        }
        return AttentionBlock.from_state_dict(
            weights, **{"heads": HEADS, "max_positions": 100, **given}
        )

    named = f"they agree if {cause}" if cause else "check heads, encoding, theta, layout, scale"
    with pytest.raises(ValueError, match=f"only after the first token: {named}; docs/from-your"):
        compare(made(), made(**OTHER[cause]), X)


def test_wrong_weights_are_reported_as_a_difference_from_the_first_token_on() -> None:
    ours = AttentionBlock.from_state_dict(
        _mha(bias=False).state_dict(), HEADS, 100, encoding="nope"
    )
    with pytest.raises(ValueError, match="from the first token on: check weights, biases, norms"):
        compare(ours, _causal(_mha()), X)


def test_an_original_that_attends_to_later_tokens_is_found() -> None:
    ours = AttentionBlock.from_state_dict(_mha().state_dict(), HEADS, 100, encoding="nope")
    with pytest.raises(
        ValueError, match="and the original is not causal, as ours is: .*; give it a causal mask"
    ):
        compare(ours, lambda x: _mha()(x, x, x), X)


@pytest.mark.exhaustive
def test_an_artefact_is_compared_with_the_original(tmp_path: Path) -> None:
    original = _mha()
    export(
        AttentionBlock.from_state_dict(original.state_dict(), HEADS, 100, encoding="nope"),
        "ort",
        tmp_path / "a",
    )
    assert compare(load(tmp_path / "a", provider="cpu"), _causal(original), X)["passed"]


def test_an_original_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the original in eval mode"):
        compare(seeded(block("rope")), _mha().train(), X)


MODELS: Dict[str, Any] = {
    "block": block("rope"),
    "block with coordinates": block("mrope"),
    "block with a state": block("fox"),
    "decoder": decoder_config(61, 2, 40, block("t5")),
    "encoder": encoder_config(61, 2, 40, block("learned", causal=False)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_called_with_x_alone_gives_the_full_pass(name: str) -> None:
    model = seeded(MODELS[name])
    ids = isinstance(model, Stack)
    x = torch.randint(61, (2, 9)) if ids else torch.randn(2, 9, model.config.width)
    with torch.no_grad():
        result = model(x)
    assert worst_error(result.numpy(), eager_session(model).prefill(x.numpy())) <= tolerance(
        "float32", 2, 64
    )


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_call_with_x_alone_reach_all_weights(name: str) -> None:
    model = seeded(MODELS[name]).train()
    x = (
        torch.randint(61, (2, 9))
        if isinstance(model, Stack)
        else torch.randn(2, 9, model.config.width)
    )
    model(x).square().sum().backward()
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


FLOAT64 = "expected weights in float32, float16 or bfloat16, got float64, in which .*; call .float"


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float64_is_refused_where_it_would_be_computed_in_float32(name: str) -> None:
    model = seeded(MODELS[name]).double()
    ids = isinstance(model, Stack)
    x = torch.randint(61, (2, 9)) if ids else torch.randn(2, 9, model.config.width).double()
    with pytest.raises(ValueError, match=FLOAT64):
        model(x)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_float64_is_not_exported(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=FLOAT64):
        export(seeded(MODELS[name]).double(), "torchscript", tmp_path / "a")


def test_a_sequence_beyond_the_range_is_refused() -> None:
    with pytest.raises(
        ValueError, match="expected at most 8 tokens, the range of positions, got 12"
    ):
        seeded(block_config(WIDTH, HEADS, 8))(X)


def test_a_module_in_place_of_its_state_dict_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^weights: expected tensors by name, got module MultiheadAttention; give its "
        r"state_dict\(\)$",
    ):
        AttentionBlock.from_state_dict(_mha(), HEADS, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("exported", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_programs_of_the_page_run(
    exported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: Dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        kept = (
            program
            if exported
            else re.sub(
                r"^(export_model\(|print\(compare\(load\().*$", "", program, flags=re.MULTILINE
            )
        )
        exec(compile(kept, "page", "exec"), names)
    assert names["losses"][-1] < names["losses"][0] / 2
    assert not exported or sorted(path.name for path in Path("build").iterdir()) == [
        "block",
        "layer",
        "learner",
        "mha",
        "stack",
    ]
