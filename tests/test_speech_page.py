"""The program of docs/speech.md, from a wav file to text, on a small Whisper and generated
tones.
"""

import contextlib
import io
import wave
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pytest
import torch

from posenc_export import load
from posenc_export.commands.cli import main

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from tests.models import encoders  # noqa: E402
from tests.models.pairs import WHISPER, randomised  # noqa: E402

RATE, SECONDS = 16000, 1
SIZES = {
    **WHISPER,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_source_positions": 50,
    "max_target_positions": 40,
}
SETTINGS = {
    "decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "lang_to_id": {"<|en|>": 40, "<|de|>": 41}, "task_to_id": {"translate": 43, "transcribe": 44},
    "no_timestamps_token_id": 60, "suppress_tokens": [0, 5, 6, 7], "begin_suppress_tokens": [8, 9],
    "is_multilingual": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Any]:
    """Return a folder with a checkpoint, its two artefacts and a wav file, and the model of
    transformers.
    """
    folder = tmp_path_factory.mktemp("speech")
    torch.manual_seed(0)
    peer = randomised(
        transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**SIZES))
    )
    peer.generation_config = transformers.GenerationConfig(**SETTINGS)
    peer.save_pretrained(folder / "whisper-tiny")
    transformers.WhisperFeatureExtractor(
        feature_size=SIZES["num_mel_bins"], chunk_length=SECONDS
    ).save_pretrained(folder / "whisper-tiny")
    tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{index}": index for index in range(61)}, unk_token="w2")
    ).save(str(folder / "whisper-tiny/tokenizer.json"))
    tones = 8000 * np.sin(2 * np.pi * np.cumsum(np.repeat([220, 440, 660, 330], RATE // 4)) / RATE)
    with wave.open(str(folder / "speech.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(tones.astype(np.int16).tobytes())
    for part in ("encoder", "decoder"):
        how = ["--part", part, "--target", "ort", "--no-verify", "-o", str(folder / "build" / part)]
        assert main(["export", str(folder / "whisper-tiny"), *how]) == 0
    return folder, peer


def _wanted(made: Tuple[Path, Any], **given: Any) -> Tuple[np.ndarray, str]:
    """Return the features of the recording, and the text of transformers."""
    folder, peer = made
    with wave.open(str(folder / "speech.wav")) as file:
        samples = np.frombuffer(file.readframes(RATE * SECONDS), np.int16) / 32768
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder / "whisper-tiny")
    features = extractor(samples, sampling_rate=RATE, return_tensors="np")["input_features"]
    tokens = peer.generate(torch.from_numpy(features), do_sample=False, num_beams=1, **given)[
        0
    ].tolist()
    return features, " ".join(f"w{token}" for token in tokens if token != SETTINGS["eos_token_id"])


def _program(index: int) -> str:
    page = (Path(__file__).parents[1] / "docs/speech.md").read_text()
    return page.split("```python\n")[index].split("```")[0]


def test_the_program_of_the_page_gives_the_text_of_transformers(
    made: Tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _program(1)
    monkeypatch.chdir(made[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(
            program.replace("max_tokens=200", "max_tokens=20"), {}
        )  # the small model has positions for 40 tokens
    assert printed.getvalue().strip() == _wanted(made, max_new_tokens=20)[1]


def test_the_command_reads_features_and_takes_language_and_task(
    made: Tuple[Path, Any], capsys: pytest.CaptureFixture
) -> None:
    features, text = _wanted(made, max_new_tokens=12, language="de", task="translate")
    np.save(made[0] / "speech.npy", features)
    build = made[0] / "build"
    asked = ["generate", str(build / "decoder"), "--encoder", str(build / "encoder")]
    asked += ["--features", str(made[0] / "speech.npy"), "--max-tokens", "12"]
    assert main([*asked, "--language", "de", "--task", "translate"]) == 0
    assert capsys.readouterr().out.strip() == text
    assert (
        main([*asked, "--prompt", "w3"]) == 2
        and "expected --prompt or --features, got both" in capsys.readouterr().err
    )


def test_the_program_for_encoders_of_sound_gives_the_letters_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"num_conv_pos_embeddings": 6, "num_conv_pos_embedding_groups": 4}
    sizes |= {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 40}
    config = transformers.Wav2Vec2Config(num_hidden_layers=1, conv_dim=[16] * 7, **sizes)
    peer = encoders.randomised(transformers.Wav2Vec2ForCTC(config))
    peer.save_pretrained("checkpoint")
    transformers.Wav2Vec2FeatureExtractor().save_pretrained("checkpoint")
    how = ["--max-positions", "50", "--target", "torchscript", "--no-verify", "-o", "build/letters"]
    assert main(["export", "checkpoint", *how]) == 0
    samples = np.random.default_rng(0).standard_normal(9 * 320 + 400)
    names = {"np": np, "load": load, "AutoFeatureExtractor": transformers.AutoFeatureExtractor}
    names |= {"samples": samples, "rate": RATE}
    exec(_program(2), names)
    values = torch.from_numpy(((samples - samples.mean()) / samples.std())[None]).float()
    with torch.no_grad():
        wanted = peer(values).logits.argmax(-1)
    assert np.array_equal(names["letters"], wanted.numpy()) and len(set(wanted[0].tolist())) > 3
