"""A block built from existing weights, compared with a separate implementation of attention."""

from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from posenc_export import AttentionBlock, export_model, load, verify
from posenc_export.export.expected import eager_session
from posenc_export.models.from_weights import read_file
from posenc_export.shared.numerics import tolerance, worst_error

WIDTH, HEADS, KV_HEADS, SIZE, THETA, LENGTH = 24, 4, 2, 8, 10000.0, 11
NUMBERS = np.random.default_rng(0)
ROWS = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "o": WIDTH}
WEIGHTS = {
    name: NUMBERS.standard_normal((rows, HEADS * SIZE if name == "o" else WIDTH)).astype(np.float32)
    / 4
    for name, rows in ROWS.items()
}
BIASES = {
    f"{name}_bias": NUMBERS.standard_normal(rows).astype(np.float32) for name, rows in ROWS.items()
}
X = NUMBERS.standard_normal((1, LENGTH, WIDTH)).astype(np.float32)


def _reference(layout: str, start: int, rotary: int = SIZE, **biases: np.ndarray) -> np.ndarray:
    """Compute grouped causal attention over X at positions start, start + 1, ..., in float64."""
    projected = {
        n: X[0].astype(np.float64) @ WEIGHTS[n].T.astype(np.float64) + biases.get(f"{n}_bias", 0.0)
        for n in ("q", "k", "v")
    }
    heads = {n: rows.reshape(LENGTH, -1, SIZE) for n, rows in projected.items()}
    for name in ("q", "k"):
        for token in range(LENGTH):
            for head in heads[name][token]:
                for pair in range(rotary // 2):
                    a, b = (
                        (2 * pair, 2 * pair + 1)
                        if layout == "interleaved"
                        else (pair, pair + rotary // 2)
                    )
                    angle = (start + token) * THETA ** (-2 * pair / rotary)
                    head[a], head[b] = (
                        head[a] * np.cos(angle) - head[b] * np.sin(angle),
                        head[a] * np.sin(angle) + head[b] * np.cos(angle),
                    )
    mixed = np.zeros((LENGTH, HEADS, SIZE))
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for token in range(LENGTH):
            scores = heads["k"][: token + 1, group] @ heads["q"][token, head] / np.sqrt(SIZE)
            shares = np.exp(scores - scores.max())
            mixed[token, head] = shares @ heads["v"][: token + 1, group] / shares.sum()
    return mixed.reshape(LENGTH, -1) @ WEIGHTS["o"].T + biases.get("o_bias", 0.0)


def _block(weights: Any, max_positions: int = 100, **options: Any) -> AttentionBlock:
    return AttentionBlock.from_state_dict(weights, HEADS, max_positions, **options)


def _packed() -> Dict[str, np.ndarray]:
    return {"qkv": np.concatenate([WEIGHTS[name] for name in "qkv"]), "o": WEIGHTS["o"]}


@pytest.mark.parametrize("start", [0, 900])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("encoding", ["rope", "rope:layout=interleaved"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_weights_of_either_layout_give_the_reference_attention(
    layout: str, encoding: str, packed: bool, start: int
) -> None:
    given: Dict[str, Any] = _packed() if packed else WEIGHTS
    block = _block(given, 1000, encoding=encoding, layout=layout)
    assert np.allclose(
        eager_session(block).prefill(X, start=start)[0], _reference(layout, start), atol=2e-6
    )


@pytest.mark.parametrize(
    ("layout", "encoding"), [(None, "rope"), (None, "rope:layout=interleaved")]
)
def test_without_layout_weights_are_not_reordered(layout: Optional[str], encoding: str) -> None:
    block = _block(WEIGHTS, encoding=encoding, layout=layout)
    assert np.allclose(
        eager_session(block).prefill(X)[0],
        _reference("interleaved" if "interleaved" in encoding else "half", 0),
        atol=2e-6,
    )


@pytest.mark.parametrize("left_out", ["", "k_bias", "o_bias"])
def test_biases_are_reordered_like_weights_and_default_to_zero(left_out: str) -> None:
    biases = {name: value for name, value in BIASES.items() if name != left_out}
    rope = {"name": "rope", "rotary": 4}
    block = _block({**WEIGHTS, **biases}, layout="interleaved", encoding=rope)
    assert np.allclose(
        eager_session(block).prefill(X)[0], _reference("interleaved", 0, 4, **biases), atol=4e-6
    )


@pytest.mark.parametrize(
    ("name", "rotary"),
    [
        ("rope_axial", 4),
        ("rope_2d", 4),
        ("mrope", 6),
        ("mrope_interleaved", 6),
        ("rope_normalized", 4),
        ("rope_trained", 4),
    ],
)
def test_weights_of_encodings_with_coordinates_are_reordered(name: str, rotary: int) -> None:
    trained = {
        "rope_2d": {"along.value": NUMBERS.standard_normal((2, KV_HEADS, rotary // 2))},
        "rope_trained": {"weight.value": NUMBERS.standard_normal(rotary // 2)},
    }
    weights = {
        f"encoding.{key}": value.astype(np.float32) for key, value in trained.get(name, {}).items()
    }
    outputs = []
    for layout in ("half", "interleaved"):
        spec = {"name": name, "rotary": rotary, "layout": layout}
        block = _block({**WEIGHTS, **weights}, encoding=spec, layout="half")
        outputs.append(eager_session(block).prefill(X, start=50)[0])
    assert worst_error(outputs[1], outputs[0]) <= tolerance("float32", 1, SIZE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_accepted(dtype: torch.dtype) -> None:
    rounded = {name: torch.from_numpy(value).to(dtype) for name, value in WEIGHTS.items()}
    block = _block(rounded)
    assert (
        torch.equal(block.attention.projection.output.weight, rounded["o"].float())
        and block.attention.projection.qkv.weight.dtype == torch.float32
    )


def test_a_block_from_weights_is_certified_and_verifies_its_reference(tmp_path: Path) -> None:
    block = _block(WEIGHTS, 1000)
    manifest = export_model(block, "ort", tmp_path / "block")
    assert (
        manifest.certificate is not None
        and manifest.certificate["passed"]
        and manifest.source == {}
    )
    assert verify(tmp_path / "block")["passed"]
    assert np.allclose(
        load(tmp_path / "block", provider="cpu").session().prefill(X, start=800, chunk=3)[0],
        _reference("half", 800),
        atol=3e-6,
    )


def test_trained_parameters_of_the_encoding_are_required() -> None:
    table = NUMBERS.standard_normal((32, HEADS)).astype(np.float32)
    rule = "expected trained parameters encoding.table.weight for T5, got none"
    with pytest.raises(ValueError, match=rule):
        _block(WEIGHTS, encoding="t5")
    with pytest.raises(
        ValueError, match=r"expected encoding.table.weight with shape \[32, 4\], got \[4, 32\]"
    ):
        _block({**WEIGHTS, "encoding.table.weight": table.T}, encoding="t5")
    block = _block({**WEIGHTS, "encoding.table.weight": table}, encoding="t5")
    assert np.array_equal(
        dict(block.attention.encoding.named_parameters())["table.weight"].detach().numpy(), table
    )


OPTIONS = ("heads", "max_positions", "kv_heads", "encoding", "layout")
WRONG: Dict[str, Any] = {
    "no values": ({"v": None}, "q, k, v and o, or qkv and o, got q, k, o"),
    "both forms": ({"qkv": _packed()["qkv"]}, "or qkv and o, got q, k, v, qkv, o"),
    "another number of heads": ({"heads": 5}, r"for 5 heads, got \[24, 32\]"),
    "no heads": ({"heads": 0}, "for 0 heads"),
    "a fraction of heads": ({"heads": 4.0}, "for 4.0 heads"),
    "a list": ({"q": WEIGHTS["q"].tolist()}, "expected q in float32, float16, bfloat16, got list"),
    "weights the other way up": (
        {"q": WEIGHTS["q"].T},
        r"expected q with shape \[32, 24\] .*, got \[24, 32\]",
    ),
    "another number of groups": ({"kv_heads": 4}, r"expected k with shape \[32, 24\]"),
    "groups that do not divide": (
        {"k": np.ones((24, 24), np.float32), "v": np.ones((24, 24), np.float32)},
        "divisible by kv_heads, got 4 and 3",
    ),
    "a bias of another size": (
        {"q_bias": np.ones(3, np.float32)},
        r"expected q_bias with shape \[32\]",
    ),
    "a number": ({"k": np.float32(1)}, r"expected k with shape"),
    "float64": (
        {"q": WEIGHTS["q"].astype(np.float64)},
        "expected q in float32, float16, bfloat16, got float64",
    ),
    "an unknown layout": (
        {"layout": "pairs"},
        "layout to be one of half, interleaved, got 'pairs'",
    ),
    "a layout where nothing turns": (
        {"layout": "half", "encoding": "alibi"},
        "left out, since ALiBi rotates no pairs",
    ),
    "an unknown encoding": ({"encoding": "ropes"}, "encoding: expected a known name, got .ropes."),
    "two forms of biases": (
        {
            "q": None,
            "k": None,
            "v": None,
            **_packed(),
            "qkv_bias": np.ones(64, np.float32),
            "q_bias": np.ones(32, np.float32),
        },
        "got both",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_weights_are_refused_in_one_line(case: str) -> None:
    change, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as refused:
        given = {"heads": HEADS, "max_positions": 100, **WEIGHTS, **change}
        options = {name: value for name, value in given.items() if name in OPTIONS}
        weights = {name: value for name, value in given.items() if name not in OPTIONS}
        AttentionBlock.from_state_dict(
            {name: value for name, value in weights.items() if value is not None}, **options
        )
    assert "\n" not in str(refused.value)


def test_unknown_and_repeated_names_in_a_file_are_refused(tmp_path: Path) -> None:
    path, names = (
        tmp_path / "a.safetensors",
        (
            "q_proj.weight",
            "k",
            "v.weight",
            "o_proj.weight",
            "q_proj.bias",
            "o_bias",
            "encoding.table.weight",
        ),
    )
    save_file({name: torch.ones(1) for name in names}, path)
    weights, _ = read_file(path)
    assert {*weights} == {"q", "k", "v", "o", "q_bias", "o_bias", "encoding.table.weight"}
    for extra, message in (
        ("mystery", r"got mystery \[1\]; leave it out if it is a buffer, rename"),
        ("q", "expected each weight once"),
    ):
        save_file({"q_proj.weight": torch.ones(1), extra: torch.ones(1)}, path)
        with pytest.raises(ValueError, match=message):
            read_file(path)
    with pytest.raises(ValueError, match="expected a file none.safetensors in"):
        read_file(tmp_path / "none.safetensors")
