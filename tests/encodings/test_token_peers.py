"""Encodings of tokens compared with independent implementations."""

import importlib
from typing import Any

import pytest
import torch

from posenc_export import encodings
from posenc_export.shared.numerics import tolerance, worst_error

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
ROWS, COLUMNS = 5, 7


def _modeling(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def _added(width: int, places: torch.Tensor, **spec: Any) -> torch.Tensor:
    """Encodings [S,E] of zero tokens at places [1,S] or [2,1,S]."""
    torch.manual_seed(0)
    encoding = encodings.build(spec, encodings.Geometry(width, 1, width, 512, causal=False))
    return encoding.embed(torch.zeros(1, places.size(-1), width), places)[0].detach()


def _grid() -> torch.Tensor:
    """Rows and columns of a whole grid [2,1,S], columns varying fastest."""
    return torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS)).t()[:, None]


def test_sinusoids_with_offset_2_are_those_of_m2m100() -> None:
    tokens = torch.full((1, 50), 7)
    theirs = _modeling("m2m_100").M2M100SinusoidalPositionalEmbedding(64, 32, padding_idx=1)(
        tokens
    )[0]
    given: Any = {"layout": "halves", "divisor": "fairseq", "offset": 2}
    ours = _added(32, torch.arange(50)[None], name="sinusoidal", **given)
    assert worst_error(ours.numpy(), theirs.numpy()) <= 64 * tolerance(
        "float32", 1, 1
    )  # their angles are float32, up to 51


def test_sinusoids_with_a_factor_are_those_of_speecht5() -> None:
    theirs = _modeling("speecht5").SpeechT5ScaledPositionalEncoding(0.0, 32, 64).eval()
    theirs.alpha.data.fill_(0.37)
    ours = _added(32, torch.arange(50)[None], name="sinusoidal", factor=0.37)
    assert worst_error(
        ours.numpy(), theirs(torch.zeros(1, 50, 32))[0].detach().numpy()
    ) <= 64 * tolerance("float32", 1, 1)  # their angles are float32


WAVES: dict[str, tuple[str, int]] = {"rt_detr": ("row", 0), "vit_mae": ("column", 1)}


@pytest.mark.parametrize("family", WAVES)
def test_sinusoids_of_rows_and_columns_are_those_of(family: str) -> None:
    first, tokens_before = WAVES[family]
    if family == "rt_detr":
        theirs = _modeling(family).build_2d_sinusoidal_position_embedding(ROWS, COLUMNS, 32)
        places = _grid()
    else:
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "image_size": 56, "patch_size": 8}
        config = transformers.ViTMAEConfig(**sizes, num_hidden_layers=1, intermediate_size=8)
        embeddings = _modeling(family).ViTMAEEmbeddings(config)
        embeddings.initialize_weights()
        theirs = embeddings.position_embeddings[0]
        patches = torch.cartesian_prod(torch.arange(7), torch.arange(7)).t()[:, None]
        places = torch.cat(
            (torch.full((2, 1, 1), 7), patches), dim=2
        )  # the class token is outside the grid
    grid = {"rows": 7, "columns": 7} if tokens_before else {}
    ours = _added(32, places, name="sinusoidal_2d", first=first, **grid)
    assert worst_error(ours.numpy(), theirs.detach().numpy()) <= tolerance("float32", 1, 1)


def test_concatenated_tables_are_those_of_detr() -> None:
    theirs = _modeling("detr").DetrLearnedPositionEmbedding(16)
    ours: Any = encodings.build(
        {"name": "learned_2d", "rows": 50, "columns": 50, "join": "column_row"},
        encodings.Geometry(32, 1, 32, 64, False),
    )
    ours.of_row.load_state_dict(theirs.row_embeddings.state_dict())
    ours.of_column.load_state_dict(theirs.column_embeddings.state_dict())
    expected = theirs((1, 32, ROWS, COLUMNS), torch.device("cpu"), torch.float32)[0].flatten(1).t()
    assert torch.equal(ours.embed(torch.zeros(1, ROWS * COLUMNS, 32), _grid())[0], expected)


def test_added_tables_are_those_of_pix2struct() -> None:
    config = transformers.Pix2StructVisionConfig(
        hidden_size=32, seq_len=64, patch_embed_hidden_size=12, dropout_rate=0.0
    )
    theirs = _modeling("pix2struct").Pix2StructVisionEmbeddings(config).eval()
    ours: Any = encodings.build(
        {"name": "learned_2d", "rows": 64, "columns": 64}, encodings.Geometry(32, 1, 32, 64, False)
    )
    ours.of_row.load_state_dict(theirs.row_embedder.state_dict())
    ours.of_column.load_state_dict(theirs.column_embedder.state_dict())
    # Their row 0 and column 0 are padding.
    places, pixels = _grid() + 1, torch.randn(1, ROWS * COLUMNS, 12)
    expected = theirs(torch.cat((places.permute(1, 2, 0).float(), pixels), dim=-1))
    y = ours.embed(theirs.patch_projection(pixels), places)
    assert torch.allclose(y, expected, rtol=0, atol=tolerance("float32", 1, 1))


def test_learned_rows_with_offset_2_are_those_of_opt() -> None:
    theirs = _modeling("opt").OPTLearnedPositionalEmbedding(64, 32)
    ours: Any = encodings.build({"name": "learned", "offset": 2}, encodings.Geometry(32, 1, 32, 64))
    ours.table.load_state_dict(theirs.state_dict())
    assert torch.equal(
        ours.embed(torch.zeros(1, 50, 32), torch.arange(50)[None]),
        theirs(torch.ones(1, 50, dtype=torch.int64)),
    )
