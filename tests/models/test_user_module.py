"""Users' own modules around a block or a stack: exports, refusals, certificates."""

import copy
import functools
import shutil
from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import OwnModule, load
from posenc_export.export import Sources, export, verify
from posenc_export.export.describe import eager
from posenc_export.export.expected import eager_session, expected_outputs
from posenc_export.models.presets import seeded
from posenc_export.models.short_forms import block_config, decoder_config
from posenc_export.runtime import Model
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.graphs.torch_graph import TorchGraph
from posenc_export.shared.numerics import tolerance, worst_error
from tests.certified import certify
from tests.tiny import block, decoder, encoder

pytestmark = pytest.mark.xdist_group("own module")
WIDTH = 48


class Tagger(torch.nn.Module):
    """Hidden states to five numbers: a norm and a residual sum around the block, with explicit
    types for TorchScript.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.block, self.head = (
            torch.nn.LayerNorm(WIDTH),
            inner,
            torch.nn.Linear(WIDTH, 5),
        )

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        coordinates: Tensor,
        key_positions: Tensor,
        write_index: Tensor,
        states: List[Tensor],
    ) -> Tuple[Tensor, List[Tensor]]:
        y, present = self.block(
            self.norm(x), positions, coordinates, key_positions, write_index, states
        )
        return self.head(torch.nn.functional.gelu(x + y)), present


class Reader(torch.nn.Module):
    """Token ids to logits with an own token table. Passes all arguments after x to the block."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.table, self.block = torch.nn.Embedding(50, WIDTH), inner

    def forward(self, ids: Tensor, *where: Any) -> Tuple[Tensor, List[Tensor]]:
        y, present = self.block(self.table(ids), *where)
        return y @ self.table.weight.T, present


class Cooled(torch.nn.Module):
    """A decoder with logits multiplied by one trained number."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.stack, self.temperature = inner, torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, ids: Tensor, *where: Any) -> Tuple[Tensor, List[Tensor]]:
        logits, present = self.stack(ids, *where)
        return logits * self.temperature, present


class Single(Tagger):
    """A module that computes in float32 even if it is cast to another dtype."""

    def forward(self, x: Tensor, *where: Any) -> Tuple[Tensor, List[Tensor]]:  # type: ignore[override]
        y, present = self.block(self.norm(x), *where)
        return torch.nn.functional.linear(x + y, self.head.weight.float()), present


def _tagger(variant: str = "rope", **sizes: Any) -> Tagger:
    torch.manual_seed(1)
    return Tagger(seeded(block(variant, **sizes))).eval()


def _layers(variant: str) -> Tagger:
    torch.manual_seed(1)
    return Tagger(seeded(decoder_config(0, 2, 64, block(variant)))).eval()


def _reader() -> OwnModule:
    torch.manual_seed(1)
    return OwnModule(Reader(seeded(block("alibi", max_positions=200))).eval(), vocabulary=50)


MODELS = {
    "a block with rotation": _tagger,
    "a block with a state": lambda: _tagger("fox"),
    "a block with coordinates": lambda: _tagger("mrope"),
    "a block without a cache": lambda: _tagger(causal=False),
    "ids of its own": _reader,
    "a decoder": lambda: Cooled(seeded(decoder("learned"))).eval(),
    "several layers": lambda: _layers("rope"),
    "several layers with a state": lambda: _layers("fox"),
}


@functools.lru_cache(maxsize=None)
def _sources(name: str) -> Sources:
    """Return the sources of a module, traced once for consecutive tests."""
    return Sources(MODELS[name]())


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function of a name in MODELS that returns an artefact for ort, exported once."""

    @functools.lru_cache(maxsize=None)
    def folder(name: str) -> Path:
        place = tmp_path_factory.mktemp("module") / "artefact"
        export(_sources(name), "ort", place, verify=False)
        return place

    return folder


QUICK = [
    ("a block with rotation", "ort"),
    ("a block with a state", "torchscript"),
    ("ids of its own", "onnx"),
    ("a decoder", "ort"),
    ("several layers", "ort"),
]
MORE = [
    (name, target)
    for name in MODELS
    for target in ("onnx", "onnx-static", "ort", "ort-cuda", "pt2")
]
MORE += [(name, "torchscript") for name in MODELS if "block" in name or "layers" in name]
CASES = [
    *QUICK,
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE if case not in QUICK),
]


@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_module_around_a_block_matches_eager_at_every_cut(
    name: str, target: str, tmp_path: Path
) -> None:
    certificate = export(_sources(name), target, tmp_path / "artefact").certificate
    assert (
        certificate is not None
        and certificate["passed"]
        and "oracle, start 0" in certificate["cells"]
    )
    assert (
        certificate["against"] == "the formula of its block in float64, its own layers in float64"
    )


@pytest.mark.parametrize(
    "signature", ["mask", pytest.param("positions", marks=pytest.mark.exhaustive)]
)
def test_a_module_can_be_exported_with_the_signatures_of_its_block(
    signature: str, tmp_path: Path
) -> None:
    manifest = export(
        _sources("a block with rotation"),
        "ort",
        tmp_path / "artefact",
        signature=signature,
        dtype="float16",
    )
    assert (
        manifest.kind == "module"
        and manifest.config["name"] == "tests.models.test_user_module.Tagger"
        and manifest.certificate["passed"]
    )  # type: ignore[index]


def test_an_artefact_of_a_module_matches_the_module(artefact: Callable[[str], Path]) -> None:
    sources, ids = _sources("ids of its own"), np.arange(12)[None]
    model: Any = sources.model
    session = load(artefact("ids of its own"), provider="cpu").session()
    actual = np.concatenate(
        [session.prefill(ids[:, :7], start=90), session.prefill(ids[:, 7:])], axis=1
    )
    place = torch.arange(90, 102)[None]
    with torch.no_grad():
        expected, _ = model.module(
            torch.from_numpy(ids),
            place,
            place,
            place,
            torch.zeros(1, dtype=torch.int64),
            _empty(model),
        )
    assert worst_error(actual, expected.numpy()) <= tolerance("float32", *model.extent())


def _empty(model: OwnModule) -> List[Tensor]:
    return [
        torch.zeros(1, state.sizes[0], 0, state.sizes[1])
        for attention in model.attentions()
        for state in attention.states()
    ]


def test_a_module_from_ids_to_logits_generates(artefact: Callable[[str], Path]) -> None:
    session = load(artefact("ids of its own"), provider="cpu").session()
    tokens = [int(token[0]) for token in session.generate([[3, 4]], max_tokens=3)]
    assert len(tokens) == 3 and all(0 <= token < 50 for token in tokens)


def test_generate_names_the_outputs_of_a_module_that_has_none_for_each_token_id(
    artefact: Callable[[str], Path],
) -> None:
    session = load(artefact("a block with rotation"), provider="cpu").session()
    with pytest.raises(
        ValueError, match="got an own module with 5 outputs for no token ids; call prefill"
    ):
        next(session.generate([[3, 4]], max_tokens=3))


def test_layers_over_hidden_states_are_a_model_of_their_own(tmp_path: Path) -> None:
    manifest = export(
        Sources(seeded(decoder_config(0, 2, 64, block("alibi")))), "ort", tmp_path / "artefact"
    )
    assert manifest.kind == "encoder" and manifest.states and manifest.certificate["passed"]  # type: ignore[index]


def test_an_encoding_is_given_as_text_too() -> None:
    as_text, as_spec = (
        block_config(64, 4, 256, encoding=spec)
        for spec in ("rope:theta=500", {"name": "rope", "theta": 500.0})
    )
    assert as_text == as_spec
    assert decoder_config(9, 2, 96, as_text, layer_encodings=["alibi"]) == decoder_config(
        9, 2, 96, as_text, layer_encodings=[{"name": "alibi"}]
    )


def test_an_artefact_of_a_module_can_only_be_verified_with_the_module(
    artefact: Callable[[str], Path],
) -> None:
    assert verify(artefact("a block with rotation"), _tagger())["passed"]
    with pytest.raises(
        ValueError,
        match=r"got the description of a user's own module "
        r"tests\.models\.test_user_module\.Tagger; pass the module",
    ):
        verify(artefact("a block with rotation"))


def test_a_module_that_cannot_run_in_float64_says_so_in_its_certificate() -> None:
    single = OwnModule(Single(seeded(block("rope"))).eval())
    module, manifest = eager(single)
    certificate = certify(
        Model(TorchGraph(module, manifest)).session(),
        single,
        expected_outputs(single, manifest),
    )
    assert certificate["passed"] and certificate["against"].endswith("its own layers in float32")


def test_a_fault_in_a_layer_outside_the_block_is_detected() -> None:
    right, wrong = OwnModule(_tagger()), _tagger()
    with torch.no_grad():
        wrong.head.bias[2] += 0.01
    module, manifest = eager(OwnModule(wrong))
    session = Model(TorchGraph(module, manifest)).session()
    assert not certify(session, right, expected_outputs(right, manifest))["passed"]


def test_a_fault_in_the_block_of_a_module_is_detected() -> None:
    model = OwnModule(_tagger())
    model.inner().attention.encoding.sin.rows.neg_()  # type: ignore[union-attr]
    module, manifest = eager(model)
    certificate = certify(
        Model(TorchGraph(module, manifest)).session(),
        model,
        expected_outputs(model, manifest),
    )
    assert certificate["cells"]["oracle, start 0"] > certificate["tolerance"]


def test_a_module_in_training_mode_is_not_changed() -> None:
    module = _tagger().train()
    before = copy.deepcopy(module.state_dict())
    eager_session(Sources(module).of("float32").model)
    assert (
        module.training
        and module.norm.training
        and all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    )


def _around(body: Any, inner: Any = None) -> torch.nn.Module:
    """Return a module with a norm, a block and the function `body` as forward."""
    module = _tagger() if inner is None else Tagger(inner).eval()
    return type("Own", (Tagger,), {"forward": body})(module.block).eval()


def _branching(self: Any, x: Tensor, *where: Any) -> Any:
    return self.block(x if bool(x.sum() > 0) else -x, *where)


WRONG = {
    "no block": (
        lambda: torch.nn.Linear(3, 3),
        "own module Linear: expected one AttentionBlock or Stack in it, got none",
    ),
    "two blocks": (
        lambda: torch.nn.Sequential(seeded(block("rope")), seeded(block("rope"))),
        "got 2; .* which reads hidden states with decoder_config.0, layers",
    ),
    "segments": (
        lambda: Cooled(seeded(encoder("learned"))),
        "expected a Stack without segments, got 3 token types",
    ),
    "float64 weights": (
        lambda: _tagger().double(),
        "expected float32 weights, got float64 in norm.weight",
    ),
    "x alone": (
        lambda: _around(lambda self, x: x),
        "expected forward.x, positions, coordinates, key_positions, write_index, states.*got "
        "TypeError",
    ),
    "another width": (
        lambda: _around(lambda self, x, *w: self.block(x[..., :9], *w)),
        r"with x as hidden states of width 48, got RuntimeError",
    ),
    "no call": (
        lambda: _around(lambda self, x, *w: (x, w[-1])),
        "expected forward to call the block once, got 0",
    ),
    "two calls": (
        lambda: _around(lambda self, x, *w: self.block(self.block(x, *w)[0], *w)),
        "expected forward to call the block once, got 2",
    ),
    "moved positions": (
        lambda: _around(lambda self, x, p, *w: self.block(x, p + 1, *w)),
        "expected positions to be passed to the block unchanged",
    ),
    "no states": (
        lambda: _around(lambda self, x, *w: self.block(x, *w)[0]),
        "the states from the block, got Tensor; return output, states",
    ),
    "two outputs": (
        lambda: _around(lambda self, x, *w: _twice(*self.block(x, *w))),
        "got several outputs; concatenate them along the last axis",
    ),
    "a tuple": (
        lambda: _around(lambda self, x, *w: _paired(*self.block(x, *w))),
        "got several outputs; concatenate them along the last axis",
    ),
    "other states": (
        lambda: _around(lambda self, x, *w: (self.block(x, *w)[0], list(w[-1]))),
        "got other states",
    ),
    "a mean over tokens": (
        lambda: _around(lambda self, x, *w: _pooled(*self.block(x, *w))),
        r"got an output \[2, 48\] of float32 for B=2, S=3",
    ),
    "a sum over tokens": (
        lambda: _around(lambda self, x, *w: self.block(x.cumsum(1), *w)),
        "expected layers outside the block to act on each token separately",
    ),
    "both": (
        lambda: OwnModule(_tagger(), vocabulary=3, width=48),
        "expected vocabulary or width, got both",
    ),
    "no width": (lambda: OwnModule(_tagger(), width=0), "expected width of at least 1, got 0"),
    "no module": (
        lambda: 3,
        "expected a Stack, an AttentionBlock or a torch.nn.Module around one, got int",
    ),
}


def _twice(output: Tensor, states: List[Tensor]) -> Any:
    return output, output, states


def _paired(output: Tensor, states: List[Tensor]) -> Any:
    return (output, output), states


def _pooled(output: Tensor, states: List[Tensor]) -> Tuple[Tensor, List[Tensor]]:
    return output.mean(1), states


@pytest.mark.parametrize("case", WRONG)
def test_modules_of_another_form_are_refused(case: str, tmp_path: Path) -> None:
    result, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        export(result(), "ort", tmp_path / "artefact")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "torchscript",
            "own module Own: expected code that TorchScript compiles, got "
            "NotSupportedError.*; write forward with the arguments of AttentionBlock.forward",
        ),
        (
            "onnx",
            "target onnx: own module Own: expected code that torch.onnx.export traces, got "
            "GuardOnDataDependentSymNode",
        ),
        (
            "pt2",
            "target pt2: own module Own: expected code that torch.export traces with dynamic "
            "sizes, got",
        ),
    ],
)
def test_code_that_a_target_does_not_support_is_refused_in_one_line(
    target: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        export(_around(_branching), target, tmp_path / "artefact")
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"outputs": 6}, "expected outputs.0. of kind module to be output float32 .*6"),
        ({"outputs": "5"}, "expected whole numbers for the sizes of the model in config, got '5'"),
        (
            {"width": "batch_size"},
            "expected whole numbers for the sizes of the model in config, got 'batch_size'",
        ),
        ({"width": 47}, "expected inputs.0. of kind module to be hidden_states"),
        (
            {"tokens": {"vocabulary": 9, "segments": 0}},
            "expected inputs.0. of kind module to be input_ids int64",
        ),
        ({"tokens": {"vocabulary": 0}}, "expected inputs.0. of kind module to be input_ids"),
        ({"tokens": []}, "expected config.tokens to be an object"),
        ({"kind": "block"}, "expected config.kind to be module as kind, got 'block'"),
        ({"max_positions": 7}, "expected config.max_positions to be 1100 as max_positions, got 7"),
    ],
)
def test_a_manifest_of_a_module_that_contradicts_itself_is_refused(
    config: Any, message: str, artefact: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(artefact("a block with rotation"), tmp_path / "artefact")
    manifest = manifests.read(tmp_path / "artefact")
    manifests.write(manifest.replace(config={**manifest.config, **config}), tmp_path / "artefact")
    with pytest.raises(ValueError, match=message):
        manifests.read(tmp_path / "artefact")


def test_a_buffer_that_a_module_changes_is_refused_by_name(tmp_path: Path) -> None:
    def counting(self: Any, x: Tensor, *where: Any) -> Any:
        self.count += 1
        return self.block(x, *where)

    module = _around(counting)
    module.register_buffer("count", torch.zeros(()))
    with pytest.raises(
        ValueError,
        match="expected state as inputs and outputs of the graph, got mutation of "
        "model.module.count",
    ):
        export(module, "onnx", tmp_path / "artefact")
