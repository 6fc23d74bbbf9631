"""Values in config.json that no model has are refused before anything of that size is built."""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any, Dict

import pytest

from posenc_export.models import families
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.fuzz.config_peers import as_saved, bases, config_of  # noqa: E402
from tests.models.checkpoints import saved  # noqa: E402

HOSTILE: Dict[str, Any] = {
    **{
        f"{key}={value:.0e}": (key, value)
        for key in tuple(
            "num_hidden_layers head_dim hidden_size vocab_size num_attention_heads".split()
        )
        for value in (1e9, 2.0**63)
    },
    "experts": ("num_local_experts", 10**9),
    "a range above int64": ("max_position_embeddings", 2**63),
    "a table of positions": ("max_position_embeddings", 2 * 10**9),
    "layers of a small model": ("num_hidden_layers", 1000),
    "width": ("hidden_size", 2**20),
    "nested": ("rope_parameters", json.loads('{"a":' * 50 + "1" + "}" * 50)),
    "a long list": ("layer_types", ["full_attention"] * 10**5),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("llama"))[1]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_size_beyond_the_checkpoint_is_refused_at_once_and_in_little_memory(
    name: str, llama: Path, tmp_path: Path
) -> None:
    key, value = HOSTILE[name]
    for file in llama.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    (tmp_path / "config.json").unlink()
    config = {
        **json.loads((llama / "config.json").read_text()),
        key: int(value) if isinstance(value, float) else value,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    begun = time.process_time()
    with pytest.raises(ValueError, match="expected .*, got ") as refused:
        from_pretrained(tmp_path)
    seconds, memory = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(refused.value) and seconds < 1 and memory < 200e6, (seconds, memory)


@pytest.mark.parametrize("model_type", ["t5", "gpt_oss", "whisper", "qwen3"])
def test_a_huge_integer_under_any_key_is_refused_or_ignored_at_once(model_type: str) -> None:
    config = as_saved(config_of(bases()[model_type][0]))
    parts = families.parts_of(model_type) or (None,)
    begun = time.process_time()
    for key in [key for key, value in config.items() if type(value) is int]:
        before = config[key]
        config[key] = 10**30
        for part in parts:
            try:
                families.read(config, None, part)
            except ValueError as refused:
                assert key in str(refused), refused
        config[key] = before
    assert time.process_time() - begun < 2
