"""Fixed configurations compared with transformers, earlier findings of the search among them;
planted differences; and sizes that no model has. More: `make fuzz`.
"""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
import torch

from posenc_export.models import families
from posenc_export.models.family_settings import Settings
from posenc_export.models.pretrained import from_pretrained

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.fuzz import configs  # noqa: E402
from tests.fuzz.config_values import DELETED  # noqa: E402
from tests.fuzz.configs import as_saved, case, compared, reduced  # noqa: E402
from tests.models.checkpoints import saved  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # transformers warns about deprecated configurations
# Base, changed keys, and the outcome or a part of our refusal.
FIXED: Dict[str, Any] = {
    "heads under a name that is not read": ("llama",
        {"n_heads": 1, "num_attention_heads": DELETED}, "num_attention_heads in config.json"),
    "a range under a name that is not read": ("llama",
        {"n_ctx": 10, "max_position_embeddings": DELETED},
        "max_position_embeddings in config.json"),
    "an activation that is a list": ("llama", {"hidden_act": ["silu"]},
        "expected hidden_act to be a name, got ['silu']"),
    "an unknown activation": ("llama", {"hidden_act": "quick_gelu"},
        "expected hidden_act to be one of"),
    "slices that are summed": ("llama", {"pretraining_tp": 2}, "equal"),
    "another window": ("mistral", {"sliding_window": 5}, "equal"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_a_configuration_is_read_as_transformers_reads_it_or_refused(name: str) -> None:
    base, changes, wanted = FIXED[name]
    result = compared(base, changes)
    assert wanted == result.outcome or any(
        wanted in said for said in result.said if said.startswith("ours: ValueError")
    ), result


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", configs.bases())
def test_every_base_of_the_search_equals_transformers(base: str) -> None:
    assert compared(base, {}).outcome == "equal"


PLANTED: Dict[str, Callable[..., Any]] = {
    "number": lambda self, key, *default, right=Settings.number: (
        right(self, key, *default) * (3 if key == "rms_norm_eps" else 1)
    ),
    "window": lambda self, key, *default, right=Settings.window: (
        (right(self, key, *default) or 0) + 1
    ),
}


@pytest.mark.parametrize(
    ("method", "changes"), [("number", {"rms_norm_eps": 0.01}), ("window", {"sliding_window": 5})]
)
def test_a_wrongly_read_key_is_a_finding(
    method: str, changes: Dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, method, PLANTED[method])
    assert compared("mistral", changes).outcome == "silent difference"


def test_a_finding_is_reduced_to_the_keys_that_cause_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "number", PLANTED["number"])
    cause = {"rms_norm_eps": 0.01}
    changes = {"intermediate_size": 64, **cause, "sliding_window": 5}
    result = reduced("mistral", changes, compared("mistral", changes, target="ort"))
    assert (result.target, result.changes) == ("eager", cause)


def test_a_fault_of_the_target_alone_is_a_finding_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = configs.export

    def wrong(model: Any, *place: Any, **options: Any) -> Any:
        with torch.no_grad():
            model.norm.weight.mul_(1.1)
        return right(model, *place, **options)

    monkeypatch.setattr(configs, "export", wrong)
    result = reduced("mistral", {}, compared("mistral", {}, target="ort"))
    assert (result.target, result.outcome) == ("ort", "silent difference")


def test_a_decode_of_transformers_that_differs_without_a_known_reason_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, "decode_defect", lambda model: "")
    result = compared("mistral", {"sliding_window": 1})
    assert result.outcome == "unexplained decode of transformers"


def test_a_case_is_repeated_by_its_seed_and_every_third_is_exported() -> None:
    results = [case(5, number) for number in range(3)]
    assert [result.target for result in results] == ["eager", "eager", "ort"]
    assert case(5, 1) == results[1] and case(6, 1).changes != results[1].changes


HOSTILE: Dict[str, Any] = {
    "layers": ("num_hidden_layers", 10**9),
    "width": ("hidden_size", 2**20),
    "a width above int64": ("hidden_size", 2**63),
    "head_dim": ("head_dim", 10**9),
    "ids": ("vocab_size", 10**9),
    "a range above int64": ("max_position_embeddings", 2**63),
    "a table of positions": ("max_position_embeddings", 2 * 10**9),
    "layers of a small model": ("num_hidden_layers", 1000),
    "nested": ("rope_parameters", json.loads('{"a":' * 50 + "1" + "}" * 50)),
    "a long list": ("layer_types", ["full_attention"] * 10**5),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_size_beyond_the_checkpoint_is_refused_at_once_and_in_little_memory(
    name: str, tmp_path: Path
) -> None:
    saved("llama", tmp_path)
    key, value = HOSTILE[name]
    config = {**json.loads((tmp_path / "config.json").read_text()), key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tracemalloc.start()
    begun = time.process_time()
    with pytest.raises(ValueError, match="expected .*, got ") as refused:
        from_pretrained(tmp_path)
    seconds, memory = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(refused.value) and seconds < 1 and memory < 200e6, (seconds, memory)


@pytest.mark.parametrize("base", ["llama", "mistral"])
def test_a_huge_integer_under_any_key_is_refused_or_ignored_at_once(base: str) -> None:
    config = as_saved(base)
    begun = time.process_time()
    for key in [key for key, value in config.items() if type(value) is int]:
        try:
            families.read({**config, key: 10**30})
        except ValueError as refused:
            assert key in str(refused), refused
    assert time.process_time() - begun < 2
