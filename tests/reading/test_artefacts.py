"""Modules of users, read as they are, as artefacts: every division into calls gives what the module
itself gives on whole sequences, and the certificate finds what does not.
"""

import copy
import functools
import json
import shutil
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from posenc_export import block_config, load
from posenc_export.commands.cli import main
from posenc_export.export import ReadAs, Sources, VerificationError, export, verify
from posenc_export.export import read_module as reader
from posenc_export.export.describe import Model, eager
from posenc_export.export.expected import accuracy_of, eager_session, expected_outputs
from posenc_export.export.read_module import as_model
from posenc_export.models.presets import seeded as built
from posenc_export.runtime import Session
from posenc_export.runtime.artefact import manifest as manifests
from posenc_export.runtime.artefact.certificate import format_unproved
from posenc_export.shared.numerics import worst_error
from tests.cases import choice
from tests.certified import certify
from tests.reading.own_modules import (
    MODULES,
    POSITIONS,
    VOCABULARY,
    WIDTH,
    Attends,
    Decoder,
    Rotated,
    inputs,
    seeded,
)
from tests.reading.zoo import ZOO
from tests.tiny import block

pytestmark = pytest.mark.xdist_group("modules that are read")
TARGET = {
    "trained positions": "ort",
    "rotations": "ort",
    "slopes": "onnx",
    "buckets": "ort",
    "a window": "ort-native",
    "experts": "ort",
    "retention": "onnx-static",
}
ALL = ("onnx", "onnx-static", "ort", "ort-native", "torchscript", "pt2")
QUICK = {("trained positions", "torchscript"), ("a window", "pt2")}
OTHERS = [(name, target) for name in MODULES for target in ALL if target != TARGET[name]]
CASES = choice([*TARGET.items(), *OTHERS], {*TARGET.items(), *QUICK})


@functools.cache
def _sources(name: str) -> Sources:
    """Return the sources of a module, which is read once."""
    module = seeded(name)
    return Sources(module, how=ReadAs(inputs(module, 2, 12), POSITIONS))


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function of the name of a module and a target that returns a verified artefact."""

    @functools.cache
    def folder(name: str, target: str) -> Path:
        place = tmp_path_factory.mktemp("read") / "artefact"
        export(_sources(name), target, place, verify="quick")
        return place

    return folder


def _session(folder: Path) -> Session:
    return load(folder, provider="cpu").session()


def _whole(name: str, x: Tensor) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(seeded(name)(x))


def _tolerance(name: str) -> float:
    model = _sources(name).model
    return accuracy_of(model, eager(model)[1]).tolerance


@pytest.mark.parametrize(("name", "target"), CASES)
def test_calls_of_every_size_give_what_the_module_gives(
    name: str, target: str, artefact: Callable[[str, str], Path]
) -> None:
    session, x = _session(artefact(name, target)), inputs(seeded(name), 1, 30)
    expected, outputs = _whole(name, x), []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 20), (20, 30)):
        outputs.append(session.prefill(x[:, start:end].numpy(), chunk=4 if start == 9 else None))
    assert worst_error(np.concatenate(outputs, 1), expected) <= _tolerance(name)


@pytest.mark.parametrize(("name", "target"), TARGET.items())
def test_rows_of_different_lengths_give_what_the_module_gives_alone(
    name: str, target: str, artefact: Callable[[str, str], Path]
) -> None:
    session, x = _session(artefact(name, target)), inputs(seeded(name), 2, 14)
    first = session.prefill([x[0, :11].numpy(), x[1, :4].numpy()])
    then = session.prefill([x[0, 11:13].numpy(), x[1, 4:9].numpy()])
    for row, (before, after) in enumerate(((11, 13), (4, 9))):
        expected = _whole(name, x[row : row + 1, :after])[0]
        actual = np.concatenate((first[row, :before], then[row, : after - before]))
        assert worst_error(actual, expected) <= _tolerance(name)


@pytest.mark.parametrize(("name", "target"), TARGET.items())
def test_padding_before_a_row_changes_nothing(
    name: str, target: str, artefact: Callable[[str, str], Path]
) -> None:
    session, x = _session(artefact(name, target)), inputs(seeded(name), 2, 9)
    mask = np.ones((2, 8), np.int64)
    mask[0, :3] = 0
    padded = session.prefill(x[:, :8].numpy(), attention_mask=mask)
    step = session.step(x[:, 8].numpy())
    for row, start in enumerate((3, 0)):
        expected = _whole(name, x[row : row + 1, start:])[0]
        actual = np.concatenate((padded[row, start:], step[row : row + 1]))
        assert worst_error(actual, expected) <= _tolerance(name)


def test_a_certificate_compares_with_the_module_itself(tmp_path: Path) -> None:
    manifest = export(_sources("a window"), "ort", tmp_path / "artefact")
    certificate: Any = manifest.certificate
    assert (
        certificate["passed"]
        and certificate["against"] == "the module itself in float64 on whole sequences"
        and {"oracle, start 0", "oracle, the long sequence"} <= certificate["cells"].keys()
    )
    # What a module declares nothing of was not compared, and says so; its slots are proved.
    assert "tables (" in format_unproved(certificate)
    indices = certificate["checks"]["indices"]
    assert indices["compared"] and "read as it is" in indices["skipped"]["module"]
    assert all(check["compared"] or check["skipped"] for check in certificate["checks"].values())


@pytest.mark.parametrize(
    ("target", "named"), [("ort", ["input_ids", "attention_mask"]), ("onnx", None)]
)
def test_a_module_can_be_exported_with_an_attention_mask(
    target: str, named: Any, tmp_path: Path
) -> None:
    how: Any = {"signature": "mask", "verify": "quick"}
    manifest = export(_sources("slopes"), target, tmp_path / "artefact", **how)
    assert manifest.certificate and manifest.certificate["passed"]
    assert named is None or [value.name for value in manifest.inputs] == named


class Last(Decoder):
    """Logits of the last token alone and a loss, as nanoGPT returns them."""

    def forward(self, idx: Tensor, targets: Any = None) -> Any:  # type: ignore[override]
        if targets is None:
            return super().forward(idx)[:, [-1]], None
        logits = super().forward(idx)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Encoder(nn.Module):
    """Token ids to hidden states by layers of torch, which see later tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, 32), nn.Embedding(POSITIONS, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.tokens(ids) + self.places(torch.arange(ids.size(1))))


class Sloped(Encoder):
    """An encoder with other biases for later tokens than for earlier ones."""

    def forward(self, ids: Tensor) -> Tensor:
        n = torch.arange(ids.size(1))
        away = (n - n[:, None]).float()
        bias = torch.where(away > 0, -0.5 * away, 0.25 * away)
        x = self.tokens(ids)
        heads = x.unflatten(2, (4, -1)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
        return x + y.transpose(1, 2).flatten(2)


class Counting(Encoder):
    """An encoder that counts the tokens which are not padding, id 1, as RoBERTa does."""

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.ne(1).int()
        places = torch.cumsum(tokens, dim=1) * tokens
        x = self.tokens(ids) + self.places(places.long())
        return self.layer(x, src_key_padding_mask=ids.eq(1))


def test_a_module_that_gives_the_last_logits_gives_those_of_every_token(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Last((Attends(),), trained=True).eval()
    manifest = export(module, "onnx", tmp_path / "a", verify="quick", max_positions=POSITIONS)
    x = inputs(module, 1, 12)
    actual = _session(tmp_path / "a").prefill(x.numpy())
    with torch.no_grad():
        expected = np.concatenate([module(x[:, : n + 1])[0] for n in range(12)], 1)
    assert worst_error(actual, expected) <= manifest.certificate["tolerance"]  # type: ignore[index]


@pytest.mark.parametrize("kind", [Encoder, Sloped])
def test_an_encoder_has_no_cache(kind: type[Encoder], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = kind().eval()
    how: Any = {"verify": "quick", "max_positions": POSITIONS, "causal": False}
    manifest = export(module, "ort", tmp_path / "a", **how)
    x = torch.randint(VOCABULARY, (2, 9))
    with torch.no_grad():
        expected = [module(x[:1, :9])[0].numpy(), module(x[1:, :5])[0].numpy()]
    rows = _session(tmp_path / "a").prefill([x[0].numpy(), x[1, :5].numpy()])
    assert not manifest.states and manifest.outputs[0].name == "output"
    errors = [worst_error(rows[i, : len(one)], one) for i, one in enumerate(expected)]
    assert max(errors) <= manifest.certificate["tolerance"]  # type: ignore[index]


FEW_BITS = [
    ("trained positions", "int8", "ort"), ("rotations", "int4", "ort"),
    ("retention", "int4-128", "ort"), ("trained positions", "int8", "onnx"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "weights", "target"), choice(FEW_BITS, FEW_BITS[:1]))
def test_linear_layers_of_a_module_are_rounded(
    name: str, weights: str, target: str, tmp_path: Path
) -> None:
    """The module with the rounded weights is what the certificate compares with."""
    sources = _sources(name)
    manifest = export(sources, target, tmp_path / "artefact", weights=weights, verify="quick")
    certificate: Any = manifest.certificate
    layers = sum(isinstance(part, nn.Linear) for part in seeded(name).modules())
    assert manifest.weights and manifest.weights.matrices == layers and certificate["passed"]
    assert max(certificate["cells"][cell] for cell in ("oracle, start 0",)) <= _tolerance(name)
    assert manifest.quality and 0 < manifest.quality.error < 0.1


def _of_bytes() -> Decoder:
    """A decoder of bytes with rotations, a channel of whose norms is much larger than others."""
    torch.manual_seed(0)
    module = Decoder((Rotated(), Rotated())).eval()
    module.tokens = nn.Embedding(256, WIDTH)
    module.head = nn.Linear(WIDTH, 256, bias=False)
    module.head.weight = module.tokens.weight
    with torch.no_grad():
        module.tokens.weight *= 0.5
        for norm in module.norms:
            norm.weight[7] *= 50.0
    return module.requires_grad_(False)


@pytest.fixture(scope="module")
def of_bytes() -> Sources:
    return Sources(_of_bytes(), how=ReadAs(max_positions=POSITIONS))


SMALLER = [
    ({"cache": "int8"}, "ort"),
    ({"cache": "int8", "weights": "int8"}, "ort-native"),
    ({"size": 0.3}, "ort"),
]


@pytest.mark.parametrize(("options", "target"), SMALLER, ids=str)
def test_a_module_is_rounded_with_calibration_data(
    options: dict[str, Any], target: str, of_bytes: Sources, tmp_path: Path
) -> None:
    folder = tmp_path / "artefact"
    options = options | {"calibrate": __file__, "verify": "quick", "max_loss": 100.0}
    manifest = export(of_bytes, target, folder, **options)
    certificate: Any = manifest.certificate
    assert certificate["passed"] and manifest.calibration and manifest.quality
    assert manifest.cache == options.get("cache", "")
    assert manifest.quality.inputs == "held-out calibration text" and manifest.quality.error < 0.3
    size = sum(file.bytes for name, file in manifest.files.items() if name.startswith("model.onnx"))
    assert size <= 1e6 * options.get("size", 1.0) and bool(manifest.formats) == ("size" in options)


def test_calibration_data_makes_the_error_of_8_bits_smaller(
    of_bytes: Sources, tmp_path: Path
) -> None:
    """Outliers of the norms are shared out between inputs and weights, as in a family."""
    errors = []
    for calibrate in (None, __file__):
        how = {"calibrate": calibrate, "text": __file__, "max_loss": 100.0, "verify": "quick"}
        quality = export(of_bytes, "ort", tmp_path / "artefact", weights="int8", **how).quality
        assert quality
        errors.append(quality.error)
    assert errors[1] < 0.6 * errors[0]


def test_an_encoder_may_count_its_tokens(tmp_path: Path) -> None:
    """Positions are a running sum, also where tokens see later ones."""
    torch.manual_seed(0)
    module = Counting().eval()
    how = {"max_positions": POSITIONS, "causal": False, "verify": "quick"}
    manifest = export(module, "ort", tmp_path / "a", **how)
    x = torch.randint(2, VOCABULARY, (2, 12))
    x[0, 7:], x[1, :3] = 1, 1
    with torch.no_grad():
        expected = module(x)
    rows = _session(tmp_path / "a").prefill(x.numpy())
    found = torch.from_numpy(rows)[x.ne(1)].numpy()
    error = worst_error(found, expected[x.ne(1)].numpy())
    assert error <= manifest.certificate["tolerance"]  # type: ignore[index]


def test_a_module_from_ids_to_logits_generates(artefact: Callable[[str, str], Path]) -> None:
    folder = artefact("trained positions", "ort")
    manifest = manifests.read(folder)
    assert manifest.outputs[0].name == "logits" and manifest.input("logits_index")
    tokens = [int(token[0]) for token in _session(folder).generate([[3, 4]], max_tokens=3)]
    text = [3, 4]
    for _ in tokens:
        text.append(int(_whole("trained positions", torch.tensor([text]))[0, -1].argmax()))
    assert tokens == text[2:]


def test_generate_names_the_outputs_of_a_module_without_logits(
    artefact: Callable[[str, str], Path],
) -> None:
    session = _session(artefact("retention", "onnx-static"))
    with pytest.raises(ValueError, match="got a module with 5 outputs for no token ids; call pref"):
        next(session.generate([[3, 4]], max_tokens=3))


def test_an_artefact_of_a_module_is_verified_again_with_the_module(
    artefact: Callable[[str, str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "artefact"
    shutil.copytree(artefact("a window", "ort-native"), folder)
    assert verify(folder, seeded("a window"))["passed"]
    with pytest.raises(ValueError, match="got the name of a module of your own, tests.reading"):
        verify(folder)
    with pytest.raises(ValueError, match="expected the model that was exported"):
        verify(folder, seeded("slopes"))


def test_reading_leaves_the_module_as_it_was() -> None:
    module = seeded("trained positions").train()
    before, attributes = copy.deepcopy(module.state_dict()), set(vars(module))
    as_model(module, ReadAs(max_positions=POSITIONS))
    assert module.training and set(vars(module)) == attributes
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


class _Faulty(nn.Module):
    """The calls of a module with a fault in their arguments."""

    def __init__(self, calls: nn.Module, fault: Callable[..., Any]) -> None:
        super().__init__()
        self.calls, self.fault = calls, fault

    def forward(self, *arguments: Any) -> Any:
        return self.calls(*self.fault(*arguments))


def _shifted(x: Tensor, positions: Tensor, *rest: Any) -> Any:
    return (x, torch.where(positions > 20, positions - 1, positions), *rest)


def _wrong_window(x: Tensor, positions: Tensor, keys: Tensor, *rest: Any) -> Any:
    """Hide the key that is five tokens behind the last query."""
    last = positions.max(1, keepdim=True).values
    return (x, positions, torch.where(keys == last - 5, -1, keys), *rest)


def _mixed_rows(x: Tensor, *rest: Any) -> Any:
    return (x.roll(1, 0), *rest)


def _swapped(reading: Any) -> None:
    """Exchange the weights of two layers, which the module and its reading share otherwise."""
    places = [reading.calls.get_submodule(f"layers.{layer}.v") for layer in (0, 1)]
    weights = [place.weight for place in places]
    for place, weight in zip(places, reversed(weights), strict=True):
        place.weight = weight


def _certified(model: Model) -> Any:
    manifest = eager(model)[1]
    return certify(eager_session(model, POSITIONS), model, expected_outputs(model, manifest))


@pytest.mark.parametrize(
    ("name", "fault"),
    [("trained positions", _shifted), ("a window", _wrong_window), ("rotations", _mixed_rows)],
)
def test_a_fault_in_the_calls_is_found_by_the_module_itself(name: str, fault: Any) -> None:
    model: Any = copy.copy(_sources(name).model)
    model._modules = {**model._modules, "calls": _Faulty(model.calls, fault)}
    cells = _certified(model)["cells"]
    assert max(cells[name] for name in cells if name.startswith("oracle")) > _tolerance(name)


def test_swapped_weights_of_layers_are_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reader.read_module

    def read(*arguments: Any, **named: Any) -> Any:
        reading = plain(*arguments, **named)
        _swapped(reading)
        return reading

    monkeypatch.setattr(reader, "read_module", read)
    with pytest.raises(VerificationError, match="at 'oracle, "):
        export(seeded("trained positions"), "onnx", tmp_path / "artefact", max_positions=POSITIONS)
    assert not list(tmp_path.iterdir())


class Around(nn.Module):
    """A block of this package between layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block = nn.Embedding(VOCABULARY, 48), built(block("rope"))
        self.head = nn.Linear(48, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.table(ids)))


def test_a_module_around_a_block_is_read_as_it_is() -> None:
    torch.manual_seed(0)
    model = as_model(Around().eval(), ReadAs(max_positions=POSITIONS))
    assert _certified(model)["passed"]


REFUSED = {
    "no positions": (lambda: seeded("slopes"), {},
        r"expected max_positions to be a whole .*, got None; give .* for positions 0 \.\. N-1$"),
    "causal as text": (lambda: seeded("slopes"), {"max_positions": 40, "causal": "no"},
        "^module Decoder: expected causal to be True or False, got 'no'"),
    "no example": (lambda: seeded("retention"), {"max_positions": 40},
        r"^module Tagger: expected an example, unless forward begins with the embedding of token "
        r"ids, got none; give example=x, token ids int64 \[B,S\] or hidden states float32 "
        r"\[B,S,E\]$"),
    "positions below 0": (lambda: seeded("slopes"), {"max_positions": -5},
        "^module Decoder: expected max_positions to be a whole number of at least 4, got -5; give"),
    "positions as text": (lambda: seeded("slopes"), {"max_positions": "40"},
        "^module Decoder: expected max_positions to be a whole number of at least 4, got '40'; "),
    "float64": (lambda: seeded("slopes").double(), {"max_positions": 40},
        "^module Decoder: expected float32 weights, got float64; call .float()"),
    "a choice in half precision": (lambda: ZOO["experts-by-mask"]()[0],
        {"dtype": "float16", "max_positions": 40, "example": ZOO["experts-by-mask"]()[1]},
        "^export: expected dtype float32 for a model that chooses experts, got float16, in which"),
    "a size of what reads no text": (lambda: _sources("slopes"), {"size": 1.0},
        "^export: expected a decoder that reads text, without experts, for a size, got another"),
    "arguments for a block": (lambda: built(block_config(64, 4, 40)), {"max_positions": 40},
        "^export: expected example, max_positions, positions, axes, causal and output for your own "
        "module, got them for AttentionBlock; leave them out$"),
    "no module": (lambda: 3, {},
        "expected a Stack, an AttentionBlock or another torch.nn.Module, got 3; pass"),
    "a class": (lambda: torch.nn.Linear, {}, "got <class .*Linear'>; pass an instance of it$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    made, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        export(made(), "ort", tmp_path / "artefact", **options)  # type: ignore[no-untyped-call]
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


CODE = """
import torch
from tests.reading.own_modules import inputs, seeded

decoder = seeded("a window")


def tagger():
    module = seeded("retention")
    return module, inputs(module, 2, 12)


def number():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module of Python with CODE."""
    (tmp_path / "own_models.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_models", raising=False)
    return "own_models"


def test_the_command_line_reads_a_module_by_its_name(
    own: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = tmp_path / "a"
    options = ["--target", "ort", "-o", str(place), "--verify", "quick", "--max-positions", "40"]
    assert main(["export", f"{own}:decoder", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["passed"]
    assert main(["inspect", str(place)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "name tests.reading.own_modules.Decoder " in said and "vocabulary 50" in said
    assert "max_positions 40 " in said and "caches key, heads 4, layer 0, size 8" in said
    assert "not proved tables (" in said


def test_the_command_line_takes_an_example(own: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((2, 12, WIDTH)))
    options = ["--target", "onnx", "--no-verify", "--max-positions", "40"]
    assert main(["export", f"{own}:tagger", *options, "-o", str(tmp_path / "a")]) == 0
    given = ["--example", str(tmp_path / "x.npy")]
    assert main(["export", f"{own}:tagger", *options, *given, "-o", str(tmp_path / "b")]) == 0
    files = [(tmp_path / name / "model.onnx").read_bytes() for name in "ab"]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give max_positions=N"),
        (["--example", "none.npy"], "none.npy to be an array in numpy's format .npy, got No such"),
        (["--example", __file__], ".npy, got something else; write it with numpy.save"),
        (["--heads", "4"], "expected options of a module of your own, got --heads"),
    ],
)
def test_the_command_line_says_what_is_missing(
    options: list[str], message: str, own: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = ["--target", "ort", "-o", str(tmp_path / "a")]
    assert main(["export", f"{own}:decoder", *place, *options]) == 2
    assert message in capsys.readouterr().err


def test_the_zoo_of_this_file_has_modules_that_differ() -> None:
    x = inputs(seeded("slopes"), 1, 9)
    results = [_whole(name, x) for name in MODULES if isinstance(seeded(name), Decoder)]
    assert len({result.tobytes() for result in results}) == len(results)
