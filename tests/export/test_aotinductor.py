"""Native code that AOTInductor compiles from pt2 artefacts: verified where it was compiled, and
the same session as any other artefact.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import List

import numpy as np
import pytest

from posenc_export.commands.cli import main
from posenc_export.export import compile_artefact, export
from posenc_export.export.trained_numbers import FILE_NAME as NUMBERS
from posenc_export.export.trained_numbers import with_trained_encodings
from posenc_export.runtime import load
from posenc_export.runtime.artefact import files
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.verification.reference import FILE_NAME as REFERENCE
from tests.tiny import block, decoder, encoder
from tests.traces import sources

# A compilation takes 20 s.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("compiled"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
KINDS = (
    "alibi deberta shaw cope fox recurrent rope_dynamic rope_longrope transformer_xl "
    "mrope conditional_conv"
).split()


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "pt2"
    export(sources(block("rope")), "pt2", folder)
    return folder


@pytest.fixture(scope="module")
def native(portable: Path) -> Path:
    compile_artefact(portable, portable.with_name("native"))
    return portable.with_name("native")


def test_the_proof_of_this_machine_replaces_the_certificate(portable: Path, native: Path) -> None:
    source, result = manifests.read(portable), manifests.read(native)
    assert result.certificate is None
    assert [(proof["passed"], proof["provider"]) for proof in result.proofs] == [
        (True, "aotinductor")
    ]
    assert result.compiled is not None and result.compiled.artefact == source.digest
    assert set(result.proofs[0]["cells"]) == {
        name for name in source.certificate["cells"] if not name.startswith("oracle")
    }  # type: ignore[index]


@pytest.mark.parametrize("name", KINDS)
def test_native_code_of_an_encoding_passes_the_grid(name: str, tmp_path: Path) -> None:
    export(sources(block(name)), "pt2", tmp_path / "pt2")
    assert compile_artefact(tmp_path / "pt2", tmp_path / "native").proofs[0]["passed"]


@pytest.mark.parametrize(
    ("dtype", "signature"),
    [("float32", "positions"), ("float16", "positions"), ("float32", "mask")],
)
def test_native_code_of_a_decoder_passes_the_grid(
    dtype: str, signature: str, tmp_path: Path
) -> None:
    export(sources(decoder("rope")), "pt2", tmp_path / "pt2", dtype=dtype, signature=signature)
    assert compile_artefact(tmp_path / "pt2", tmp_path / "native").proofs[0]["passed"]


def test_native_code_of_an_encoder_passes_the_grid(tmp_path: Path) -> None:
    export(sources(encoder("learned")), "pt2", tmp_path / "pt2")
    assert compile_artefact(tmp_path / "pt2", tmp_path / "native").proofs[0]["passed"]


def test_native_code_has_no_trained_numbers_of_encodings_to_draw(tmp_path: Path) -> None:
    export(sources(block("kerple")), "pt2", tmp_path / "pt2")
    result = compile_artefact(tmp_path / "pt2", tmp_path / "native")
    assert not result.encodings
    assert NUMBERS not in result.files
    assert not (tmp_path / "native" / NUMBERS).exists()
    with pytest.raises(
        ValueError,
        match="expected the trained numbers .* got none; give the pt2 artefact that it was "
        "compiled from",
    ):
        with_trained_encodings(tmp_path / "native")


def test_inputs_with_any_strides_are_read_right(native: Path) -> None:
    x = np.random.default_rng(0).standard_normal((48, 9, 3), dtype=np.float32)
    model = load(native, provider="aotinductor", threads=1)
    np.testing.assert_array_equal(
        model.session().prefill(x.T), model.session().prefill(np.ascontiguousarray(x.T))
    )


def test_threads_share_native_code(native: Path) -> None:
    x = np.random.default_rng(0).standard_normal((4, 40, 48), dtype=np.float32)
    model = load(native, provider="aotinductor", threads=1)

    def outputs(row: int) -> List[np.ndarray]:
        session = model.session()
        return [
            session.prefill(x[row : row + 1, :8]),
            *(session.step(x[row : row + 1, token]) for token in range(8, 40)),
        ]

    alone = [outputs(row) for row in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for wanted, result in zip(alone, pool.map(outputs, range(4)), strict=True):
            for one, other in zip(wanted, result, strict=True):
                np.testing.assert_array_equal(one, other)


def test_code_that_disagrees_with_the_reference_is_not_published(
    portable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(portable, wrong)
    (np.fromfile(wrong / REFERENCE, "<f4") * np.float32(1.01)).tofile(wrong / REFERENCE)
    manifest = manifests.read_alone(wrong)
    manifests.write(
        manifest.replace(files={**manifest.files, REFERENCE: files.entry(wrong / REFERENCE)}), wrong
    )
    assert main(["compile", str(wrong)]) == 1
    assert "verify: expected errors within" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wrong"]
