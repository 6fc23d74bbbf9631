"""Fixed configurations compared with transformers, earlier findings of the search among them;
planted differences. More: `make fuzz`.
"""

from typing import Any, Callable, Dict

import pytest
import torch

from posenc_export.models import families, masked_heads
from posenc_export.models.families.shared.settings import Settings
from posenc_export.models.masked_heads import HEADS
from posenc_export.models.task_heads import MASKED, TASKS

pytest.importorskip("transformers", reason="transformers is not installed")
from tests.fuzz import config_peers  # noqa: E402
from tests.fuzz.config_peers import bases  # noqa: E402
from tests.fuzz.config_values import DELETED  # noqa: E402
from tests.fuzz.configs import case, compared, reduced  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # transformers warns about deprecated configurations
BASES = bases()
FALCON = {"alibi": True, "num_attention_heads": 16}
# Model type, index of its base, changed keys, and the outcome or a part of our refusal.
FIXED: Dict[str, Any] = {
    "alibi of 16 heads in the new architecture": ("falcon", 0,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, "equal"),
    "alibi of 6 heads": ("falcon", 0, {"alibi": True, "num_attention_heads": 6, "hidden_size": 96},
        "equal"),
    "slices that are summed with biases": ("bloom", 0, {"pretraining_tp": 2}, "equal"),
    "slices that are summed without biases": ("bloom", 0,
        {"pretraining_tp": 2, "slow_but_exact": True}, "expected slow_but_exact to be false"),
    "a range under a name that is not read": ("gemma3_text", 0,
        {"n_ctx": 10, "max_position_embeddings": DELETED},
        "max_position_embeddings in place of n_ctx"),
    "heads under a name that is not read": ("llama", 0,
        {"n_heads": 1, "num_attention_heads": DELETED}, "num_attention_heads in place of n_heads"),
    "an activation that is written twice": ("mt5", 1, {"feed_forward_proj": "gated-silu"},
        "expected dense_act_fn to be 'silu', got 'gelu_new'"),
    "an activation that is a list": ("layoutlm", 0, {"hidden_act": ["silu"]},
        "expected hidden_act to be a name, got ['silu']"),
    "layers that are a flag": ("llama4_text", 0, {"moe_layers": True},
        "expected moe_layers to be a list of layers, got True"),
    "another window": ("mistral", 0, {"sliding_window": 5}, "equal"),
    "windows in all layers": ("qwen3", 1, {"max_window_layers": 0, "layer_types": DELETED},
        "equal"),
    "short factors up to the trained length": ("phi3", 0, {"original_max_position_embeddings": 24},
        "equal"),
    "long factors beyond the trained length": ("phi3", 0, {"original_max_position_embeddings": 16},
        "transformers differs from its own decode"),
    "an unknown activation": ("gpt2", 0, {"activation_function": "quick_gelu"},
        "expected activation_function to be one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_a_configuration_is_read_as_transformers_reads_it_or_refused(name: str) -> None:
    model_type, index, changes, wanted = FIXED[name]
    result = compared(BASES[model_type][index], changes)
    assert wanted == result.outcome or any(
        wanted in said for said in result.said if said.startswith("ours: ValueError")
    ), result


ALL = [(base, "eager") for bases in BASES.values() for base in bases]
ALL += [(base, "ort") for base, _ in ALL if base.task]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("base", "target"),
    ALL,
    ids=[f"{base.model_type} {base.name} {base.task} {target}" for base, target in ALL],
)
def test_every_base_of_the_search_equals_transformers(base: Any, target: str) -> None:
    result = compared(base, {}, target=target)
    # Transformers turns keys with other factors from 9 tokens on, but not those in the cache; its
    # full pass equals ours.
    if base.name == "phi3":
        assert (
            result.outcome == "transformers differs from its own decode"
            and max(result.shares.values()) <= 1
        ), result
    else:
        assert result.outcome == "equal"


def test_every_model_type_has_a_base() -> None:
    assert set(BASES) == set(families.FILES) and all(BASES.values())


def test_long_rows_show_that_alibi_is_rounded_to_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(BASES["falcon"][1], {}, number=7).outcome == "equal"
    right = families.read

    def exact(*given: Any) -> Any:
        description, family = right(*given)
        for kind in description.layers.values():
            kind.attention.encodings[0].pop("numerics")
        return description, family

    monkeypatch.setattr(families, "read", exact)
    assert compared(BASES["falcon"][1], {}, number=7).outcome == "silent difference"


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
    assert compared(BASES["mistral"][0], changes).outcome == "silent difference"


def _base(model_type: str, task: str) -> Any:
    return next(base for base in BASES[model_type] if base.task == task)


@pytest.mark.parametrize(
    "task", [MASKED, *(pytest.param(task, marks=pytest.mark.exhaustive) for task in TASKS)]
)
def test_an_artefact_with_a_task_head_equals_transformers(task: str) -> None:
    result = compared(_base("deberta-v2", task), {"hidden_act": "gelu_new"}, target="ort")
    assert result.outcome == "equal", result


def test_artefacts_of_an_encoder_and_a_decoder_equal_transformers() -> None:
    pair = next(base for base in BASES["t5"] if base.kind == "pair")
    assert compared(pair, {"d_kv": 8}, target="ort").outcome == "equal"


def test_every_model_type_with_a_task_head_has_a_base_with_it() -> None:
    heads = {**TASKS, MASKED: HEADS}
    known = {
        (task, kind) for task, kinds in heads.items() for kind in kinds if kind in families.FILES
    }
    assert known == {
        (base.task, base.model_type) for bases in BASES.values() for base in bases if base.task
    }


def test_a_wrongly_read_key_of_a_head_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_heads, "activation_of", lambda config, key: "relu")
    base = _base("deberta", "SequenceClassification")
    assert compared(base, {}).outcome == "silent difference"


def test_a_finding_is_reduced_to_the_keys_that_cause_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "number", PLANTED["number"])
    base, cause = BASES["mistral"][0], {"rms_norm_eps": 0.01}
    changes = {"intermediate_size": 64, **cause, "sliding_window": 5}
    result = reduced(base, changes, compared(base, changes, target="ort"))
    assert (result.target, result.changes) == ("eager", cause)


def test_a_fault_of_the_target_alone_is_a_finding_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = config_peers.export

    def wrong(model: Any, *place: Any, **options: Any) -> Any:
        with torch.no_grad():
            model.norm.weight.mul_(1.1)
        return right(model, *place, **options)

    monkeypatch.setattr(config_peers, "export", wrong)
    base = BASES["mistral"][0]
    result = reduced(base, {}, compared(base, {}, target="ort"))
    assert (result.target, result.outcome) == ("ort", "silent difference")


def test_a_decode_of_transformers_that_differs_without_a_known_reason_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config_peers, "decode_defect", lambda models: "")
    result = compared(BASES["mistral"][0], {"sliding_window": 1})
    assert result.outcome == "unexplained decode of transformers"


def test_every_third_case_is_exported() -> None:
    assert [case(5, number).target for number in range(3)] == ["eager", "eager", "ort"]


def test_a_case_is_repeated_by_its_seed() -> None:
    assert case(5, 3) == case(5, 3) and case(5, 3).changes != case(6, 3).changes
