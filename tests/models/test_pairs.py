"""Decoders that read an encoder, compared with transformers: every call pattern, every target,
and rows that are admitted and retired.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posenc_export import export_model, from_pretrained, load
from posenc_export.commands.cli import main
from posenc_export.export import TARGETS, Sources, VerificationError
from posenc_export.export.expected import eager_session
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import decoder_config
from posenc_export.runtime import Session
from posenc_export.runtime.artefact.graph_inputs import ENCODER_MASK as MASK
from posenc_export.runtime.session import runner
from posenc_export.runtime.session.rows import Rows
from tests.tiny import block
from tests.traces import artefact

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from tests.cases import choice  # noqa: E402
from tests.models.pairs import COUNTING, MODELS, Peer, Reading, saved  # noqa: E402
from tests.models.patterns import DECODER, share, theirs, tokens_of  # noqa: E402

pytestmark = pytest.mark.xdist_group("pairs")  # one worker, so that each model is traced once
MADE: dict[str, tuple[Peer, Sources, list[np.ndarray], Path]] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


def _pair(name: str, folders: Path) -> tuple[Peer, Sources, list[np.ndarray], Path]:
    """Return transformers' model, our decoder, outputs of our encoder for each row [q,N], and
    their folder. Each is created once.
    """
    if name not in MADE:
        peer, decoder, encoded = saved(name, folders / name)
        MADE[name] = (peer, Sources(decoder), encoded, folders / name)
    return MADE[name]


def _session(name: str, target: str, signature: str, folders: Path) -> Session:
    if target == "eager":
        return eager_session(_pair(name, folders)[1].model)
    place = folders / f"{name} {target} {signature}"
    if not place.exists():
        export_model(_pair(name, folders)[1], target, place, signature, verify=False)
    return load(place, threads=1, provider="cpu").session()


CALLS = [
    ("eager", "positions"),
    *(
        (target, signature)
        for target in ("ort", "onnx", "onnx-static", "torchscript", "pt2")
        for signature in TARGETS[target].layout
    ),
]
# Of few models, since reading one takes longer than all calls.
QUICK = [
    ("bart", "eager", "positions"),
    ("t5 both parts", "torchscript", "positions"),
    ("mt5 both parts", "ort", "positions"),
    ("t5 both parts", "onnx", "mask"),
]
CASES = choice([(name, *call) for name in MODELS for call in CALLS], QUICK)


@pytest.mark.parametrize(("name", "target", "signature"), CASES)
def test_logits_match_transformers(name: str, target: str, signature: str, folders: Path) -> None:
    peer, _, encoded, _ = _pair(name, folders)
    for pattern, call in DECODER.items():
        # A mask, and models that count positions themselves, have none from another one on.
        if pattern != "shifted" or (signature != "mask" and name not in COUNTING):
            session: Any = Reading(_session(name, target, signature, folders), encoded)
            assert share(call(peer, session)) <= 1, pattern


@pytest.mark.parametrize("name", ["t5 both parts"])
def test_both_parts_are_certified(name: str, folders: Path) -> None:
    _, decoder, _, folder = _pair(name, folders)
    for part, model in (("encoder", from_pretrained(folder, part="encoder")), ("decoder", decoder)):
        place = folders / f"{name} {part} certified"
        manifest = export_model(model, "ort", place, verify="quick")
        assert manifest.certificate is not None and manifest.certificate["passed"]
        assert any(cell.startswith("oracle") for cell in manifest.certificate["cells"])


@pytest.mark.exhaustive
def test_a_decoder_in_half_precision_is_certified(folders: Path) -> None:
    manifest = export_model(
        _pair("t5 both parts", folders)[1], "ort", folders / "half", dtype="float16"
    )
    assert manifest.certificate is not None and manifest.certificate["passed"]


def test_verification_detects_a_row_with_the_encoder_outputs_of_another(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Rows.without

    def without(self: Rows, row: int) -> Rows:
        """Reorder rows, but not encoder outputs."""
        rows = right(self, row)
        rows.encoder = {name: array[: rows.count] for name, array in self.encoder.items()}
        return rows

    monkeypatch.setattr(Rows, "without", without)
    with pytest.raises(VerificationError, match="rows come and go|beside guests"):
        export_model(_pair("t5 both parts", folders)[1], "ort", folders / "fault")


def test_verification_detects_attention_to_padding_of_the_encoder(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = runner.Runner.fill

    def fill(self: runner.Runner, *arguments: Any) -> Any:
        feeds = right(self, *arguments)
        return {**feeds, MASK: np.ones_like(feeds[MASK])} if MASK in feeds else feeds

    monkeypatch.setattr(runner.Runner, "fill", fill)
    with pytest.raises(VerificationError, match="do not deploy"):
        export_model(_pair("t5 both parts", folders)[1], "ort", folders / "mask fault")


def test_rows_emptied_by_rewind_keep_their_encoder_outputs(folders: Path) -> None:
    peer, _, encoded, _ = _pair("t5 both parts", folders)
    session, tokens = _session("t5 both parts", "ort", "positions", folders), tokens_of()
    session.prefill(tokens[:, :4], encoder=encoded[:2])
    session.rewind(4)
    assert share([(session.prefill(tokens), theirs(peer, tokens))]) <= 1


def test_a_fork_uses_the_same_encoder_outputs(folders: Path) -> None:
    peer, _, encoded, _ = _pair("t5 both parts", folders)
    session, tokens = _session("t5 both parts", "ort", "positions", folders), tokens_of()
    session.prefill(tokens[:, :4], encoder=encoded[:2])
    other = session.fork()
    session.reset()
    assert share([(other.prefill(tokens[:, 4:]), theirs(peer, tokens)[:, 4:])]) <= 1


def test_greedy_generation_matches_transformers(folders: Path) -> None:
    peer, _, encoded, _ = _pair("mt5 both parts", folders)
    start = np.zeros((3, 1), np.int64)
    session = _session("mt5 both parts", "ort", "positions", folders)
    result = np.stack([*session.generate(start, max_tokens=12, encoder=encoded, stop=(1,))], 1)
    with torch.no_grad():
        wanted = peer.model.generate(
            **peer.given, max_new_tokens=12, do_sample=False, num_beams=1, decoder_start_token_id=0
        )[:, 1:].numpy()
    assert (
        np.where(result < 0, 0, result) == wanted
    ).all()  # transformers pads with 0 after the end of a text


REFUSED: dict[str, tuple[Any, str]] = {
    "none": (
        lambda session, rows: session.prefill([[3], [4]]),
        "expected encoder=, the outputs of the encoder for each row, got none",
    ),
    "too few rows": (
        lambda session, rows: session.prefill([[3], [4]], encoder=rows[:1]),
        r"expected encoder with 2 rows of at least one token, got rows of \[13\]",
    ),
    "an empty row": (
        lambda session, rows: session.prefill([[3], [4]], encoder=[rows[0], rows[1][:0]]),
        r"got rows of \[13, 0\] tokens",
    ),
    "another width": (
        lambda session, rows: session.prefill([[3]], encoder=[rows[0][:, :-1]]),
        r"expected a row of encoder of shape \['encoder_sequence_length', 384\]",
    ),
    "a second time": (
        lambda session, rows: (
            session.prefill([[3]], encoder=rows[:1]),
            session.prefill([[3]], encoder=rows[:1]),
        ),
        "expected encoder only with the first tokens of a row",
    ),
    "admitted without": (
        lambda session, rows: (session.prefill([[3]], encoder=rows[:1]), session.admit([[3]])),
        "expected encoder=",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_encoder_outputs_are_refused(what: str, folders: Path) -> None:
    call, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        call(
            _session("t5 both parts", "ort", "positions", folders),
            _pair("t5 both parts", folders)[2],
        )


def test_encoder_outputs_are_refused_by_a_decoder_without_encoder() -> None:
    with pytest.raises(
        ValueError, match="expected no encoder for a model that reads none, got one"
    ):
        eager_session(seeded(decoder_config(61, 1, 40, block("rope")))).prefill(
            [[3]], encoder=np.zeros((1, 3, 8), np.float32)
        )


def test_a_part_of_a_model_without_parts_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    transformers.BertModel(config).save_pretrained(tmp_path)
    said = "expected a model with encoder and decoder for part decoder, got BertModel; leave part"
    with pytest.raises(ValueError, match=said):
        from_pretrained(tmp_path, part="decoder")


def test_an_unknown_part_is_refused(folders: Path) -> None:
    said = "checkpoint: expected part encoder or decoder, got 'head'"
    with pytest.raises(ValueError, match=said):
        from_pretrained(_pair("t5 both parts", folders)[3], part="head")


def test_the_command_exports_a_part_and_generates_from_a_text(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    peer, _, _, folder = _pair("mt5 both parts", folders)
    _session("mt5 both parts", "ort", "positions", folders)  # exports the decoder
    decoder, encoder = str(folders / "mt5 both parts ort positions"), str(tmp_path / "encoder")
    options = ["--part", "encoder", "--target", "onnx", "--no-verify", "-o", encoder]
    assert main(["export", str(folder), *options]) == 0
    capsys.readouterr()
    text = ["--prompt", "w7 w9 w21 w40", "--max-tokens", "6", "--json"]
    assert main(["generate", decoder, "--encoder", encoder, *text]) == 0
    result = json.loads(capsys.readouterr().out)["tokens"]
    how = {"max_new_tokens": 6, "do_sample": False, "num_beams": 1, "decoder_start_token_id": 0}
    with torch.no_grad():
        wanted = peer.model.generate(input_ids=torch.tensor([[7, 9, 21, 40]]), **how)[0, 1:]
    assert result == wanted.tolist()[: len(result)] and len(result) in (6, len(wanted))


def test_the_command_refuses_an_encoder_for_a_decoder_without_encoder(
    capsys: pytest.CaptureFixture,
) -> None:
    alone = str(artefact(decoder_config(256, 1, 40, block("rope")), "onnx"))
    assert main(["generate", alone, "--encoder", alone, "--prompt", "x"]) == 2
    said = "expected a decoder that reads an encoder and has start_ids, got one that reads none"
    assert said in capsys.readouterr().err
