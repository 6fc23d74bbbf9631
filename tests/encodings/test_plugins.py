"""Encodings that a program registers, and encodings made from one function."""

import math
import re
from pathlib import Path
from typing import Any, Iterator, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from posenc_export import block_config, encodings
from posenc_export.encodings import Geometry, Oracle, PositionEncoding
from posenc_export.encodings.alibi import ALiBi
from posenc_export.encodings.shared import plugins
from posenc_export.export import export
from posenc_export.export.expected import eager_session
from posenc_export.models.presets import seeded
from posenc_export.shared.numerics import tolerance, worst_error
from posenc_export.testing.against_oracle import check
from tests.cases import choice
from tests.traces import sources

GEOMETRY = Geometry(width=24, heads=6, head_size=16, max_positions=1 << 15, kv_heads=2)
POSITIONS = [0, 1, 2, 255, 1000, (1 << 15) - 1]


class Gentle(ALiBi):
    """ALiBi with another default."""

    def __init__(self, geometry: Geometry, max_bias: float = 4.0, note: str = "") -> None:
        super().__init__(geometry, max_bias)


class Limited(PositionEncoding):
    """Adds -rate |i - j|, or nothing; its oracle reads parameter and weight of the encoding."""

    above, most = {"rate": 0}, {"rate": 4}

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        if self.kind == "none":
            return None
        distances = q_positions[:, None, :, None] - k_positions[:, None, None]
        return -self.rate * distances.abs() * self.weight

    def __init__(
        self, geometry: Geometry, kind: Literal["linear", "none"] = "linear", rate: float = 1.0
    ) -> None:
        super().__init__()
        self.kind, self.rate, self.weight = kind, rate, torch.nn.Parameter(torch.tensor([0.5]))


class LimitedOracle(Oracle, of=Limited):
    def bias(self, head: int, query: int, key: int) -> float:
        return -self.encoding.rate * abs(query - key) * float(self.weights["weight"][0])  # type: ignore[no-any-return]


class Open(PositionEncoding):
    def __init__(self, geometry: Geometry, **rest: float) -> None:
        super().__init__()


class Untyped(PositionEncoding):
    def __init__(self, geometry: Geometry, period=3) -> None:  # type: ignore[no-untyped-def]
        super().__init__()


class Unnamed(PositionEncoding):
    def __init__(self, geometry: Geometry, period: "Nowhere" = 3) -> None:  # type: ignore[name-defined]  # noqa: F821
        super().__init__()


class Inherited(PositionEncoding):
    """Class without a constructor."""


class NoGeometry(PositionEncoding):
    def __init__(self) -> None:
        super().__init__()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Remove what a test registers."""
    before = dict(encodings.KNOWN.registered)
    yield
    encodings.KNOWN.registered.clear()
    encodings.KNOWN.registered.update(before)


@pytest.mark.parametrize(("spec", "message"), [
    ("limited:kind=square", "expected kind to be one of linear, none, got 'square'"),
    ("limited:rate=0", "expected rate above 0, got 0.0; choose a larger one"),
    ("limited:rate=5", "expected rate of at most 4, got 5.0; choose a smaller one"),
    ("limited:rate=nan", "expected rate to be a finite number, got nan"),
    ("limited:rate=wide", "expected rate of type float, got 'wide'"),
    ("limited:rat=1", "expected parameter to be one of kind, rate, got 'rat'"),
])  # fmt: skip
def test_words_and_limits_that_a_class_declares_are_checked(spec: str, message: str) -> None:
    encodings.register("limited", Limited)
    with pytest.raises(ValueError, match=re.escape(f"encoding limited: {message}")):
        encodings.build(encodings.parse(spec), GEOMETRY)


def test_an_oracle_that_names_its_encoding_reads_parameters_and_weights() -> None:
    encodings.register("limited", Limited)
    encoding = encodings.build(encodings.parse("limited:rate=3"), GEOMETRY)
    assert encoding.oracle().bias(0, 9, 5) == -6.0


def _decaying(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return -0.01 * (head + 1) * torch.sqrt((query - key).abs() + 1.0)


def _by_key(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.where(key % 5 == 0, 0.5, -0.25)


def _by_slope(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.tensor([0.5, 0.25, 0.125, 0.3, 0.2, 0.1])[head] * (key - query)


BIASES = {
    "of all three": _decaying,
    "of a table": _by_slope,
    "of the key alone": _by_key,
    "a lambda": lambda head, query, key: -0.1 * (query - key),
}
ROTATIONS = {
    "proportional": lambda pair, position: position * 10000.0 ** (-pair / 8),
    "of a root": lambda pair, position: torch.sqrt(position + 0.5) * 0.8**pair,
    "alike for all pairs": lambda pair, position: position / 7,
}


def test_a_registered_encoding_is_parsed_and_built_like_a_built_in_one() -> None:
    encodings.register("gentle", Gentle)
    spec = encodings.parse("gentle:max_bias=2")
    assert spec == {"name": "gentle", "max_bias": 2.0}
    assert isinstance(encodings.build(spec, GEOMETRY), Gentle)
    assert encodings.origin("gentle") == encodings.Package("tests", "")
    assert encodings.origin("alibi") is None


def test_the_distributions_of_a_registered_class_are_read_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encodings.register("gentle", Gentle)
    monkeypatch.syspath_prepend("/a path of no other test")  # for which nothing is cached yet
    reads: list[int] = []
    read = lambda: reads.append(1) or {"tests": ["mine"]}  # noqa: E731
    monkeypatch.setattr(plugins.metadata, "packages_distributions", read)
    monkeypatch.setattr(plugins.metadata, "version", lambda name: "3")
    assert [encodings.origin("gentle") for _ in range(2)] == [encodings.Package("mine", "3")] * 2
    assert len(reads) == 1


def test_a_class_that_is_defined_again_replaces_the_earlier_one() -> None:
    names = {key: getattr(Gentle, key) for key in ("__module__", "__qualname__")}
    again = type("Gentle", (Gentle,), names)
    encodings.register("gentle", Gentle)
    encodings.register("gentle", again)
    assert encodings.KNOWN["gentle"] is again


@pytest.mark.parametrize(("name", "cls", "message"), [
    ("rope", Gentle, "expected an unused name, got the name of RoPE"),
    ("Gentle", Gentle, "expected a name of lower-case letters, digits and _, got 'Gentle'"),
    (torch.nn.ReLU(), Gentle, r"^register ReLU\(\): expected a name of lower-case letters"),
    ("taken", Gentle, "expected an unused name, got the name of Inherited2"),
    ("mine", int, "expected a subclass of posenc_export.encodings.PositionEncoding, got int"),
    ("mine", "Gentle", "got an object of str"),
    ("mine", PositionEncoding, "got PositionEncoding"),
    ("mine", Open, r"expected parameters with names and types, got '\*\*rest: float'"),
    ("mine", Untyped, "expected parameters with names and types, got 'period=3'"),
    ("mine", Unnamed,
        "expected annotations that can be evaluated, got name 'Nowhere' is not defined"),
    ("mine", Inherited,
        "expected a constructor that takes a Geometry first, got Inherited without it"),
    ("mine", NoGeometry,
        "expected a constructor that takes a Geometry first, got NoGeometry without it"),
])  # fmt: skip
def test_a_wrong_name_or_class_is_refused_by_rule_and_value(
    name: str, cls: Any, message: str
) -> None:
    encodings.register("taken", type("Inherited2", (Gentle,), {"__qualname__": "Inherited2"}))
    with pytest.raises(ValueError, match=message):
        encodings.register(name, cls)


@pytest.mark.parametrize("name", [*BIASES, *ROTATIONS])
def test_an_encoding_of_a_function_matches_the_function_in_float64(name: str) -> None:
    made = encodings.bias if name in BIASES else encodings.rotation
    encodings.register("mine", made({**BIASES, **ROTATIONS}[name]))
    check(encodings.KNOWN["mine"], {"name": "mine"}, 1 << 15)


def test_the_oracle_of_a_function_calls_it_for_one_head_query_and_key() -> None:
    oracle = encodings.bias(_decaying)(GEOMETRY).oracle()
    expected = [-0.01 * 6 * math.sqrt(i - j + 1.0) for i, j in ((0, 0), (9, 2), (1000, 255))]
    found = [oracle.bias(5, i, j) for i, j in ((0, 0), (9, 2), (1000, 255))]
    assert np.allclose(found, expected, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("name", ROTATIONS)
def test_only_angles_proportional_to_positions_are_linear(name: str) -> None:
    encoding: Any = encodings.rotation(ROTATIONS[name])(GEOMETRY)
    assert encoding.linear == (name != "of a root")


def test_the_rotation_of_rope_as_a_function_is_rope() -> None:
    q, k, places = torch.randn(1, 6, 6, 16), torch.randn(1, 6, 2, 16), torch.tensor([POSITIONS])
    angles = encodings.rotation(lambda pair, position: position * 10000.0 ** (-2 * pair / 16))
    both = angles(GEOMETRY), encodings.build({"name": "rope"}, GEOMETRY)
    ours, rope = (encoding.rotate(q, k, places)[0].numpy() for encoding in both)
    assert worst_error(ours, rope) <= tolerance("float32", 1, 1)


def _branching(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query - key if bool((query > 3).all()) else key - query


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda head, query, key: 0.5, "expected a function that returns a tensor, got float"),
        (
            lambda head, query, key: (head + query - key).flatten(),
            r"expected scores that broadcast to \[B,H,S,T\], got \[144\]",
        ),
        (_branching, "that does not branch on values, got Converting a tensor .*; use torch.where"),
    ],
)
def test_a_bias_that_cannot_be_exported_is_refused_when_it_is_built(
    function: Any, message: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        encodings.bias(function)(GEOMETRY)


def test_a_function_that_loses_the_precision_of_float64_is_refused() -> None:
    said = "expected a function that keeps the precision of float64, got a result in float32"
    bias = encodings.bias(lambda head, query, key: (query - key).float())(GEOMETRY)
    with pytest.raises(ValueError, match=said):
        bias.oracle().bias(0, 3, 1)
    with pytest.raises(ValueError, match="got a result in float32"):
        encodings.rotation(lambda pair, position: (pair * position).float())(GEOMETRY)


@pytest.mark.parametrize(
    ("function", "message"), [(3, "expected a function of positions, got 3"), (None, "got None")]
)
def test_an_object_that_is_not_a_function_is_refused(function: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encodings.bias(function)


SOME = ["of all three", "of a root"]
TARGETS = ["ort", "torchscript", "onnx", "pt2"]


@pytest.mark.xdist_group("functions")
@pytest.mark.parametrize("target", choice(TARGETS, TARGETS[:2]))
@pytest.mark.parametrize(
    "name", choice([*SOME, "of a table", "a lambda", "of the key alone"], SOME)
)
def test_an_encoding_of_a_function_is_certified_for_every_division_into_calls(
    name: str, target: str, tmp_path: Path
) -> None:
    made = encodings.bias if name in BIASES else encodings.rotation
    registered = name.replace(" ", "_")
    encodings.register(registered, made({**BIASES, **ROTATIONS}[name]))
    config = block_config(48, 6, 80, kv_heads=3, head_size=16, encoding={"name": registered})
    certificate = export(sources(config), target, tmp_path / "artefact").certificate
    assert certificate is not None and certificate["passed"]
    assert "oracle, start 0" in certificate["cells"]


def test_biases_of_hidden_keys_change_no_output() -> None:
    functions: Any = {
        "seen": lambda head, query, key: -torch.sqrt(query - key),
        "anywhere": lambda head, query, key: -torch.sqrt((query - key).abs()),
    }
    x, outputs = np.random.default_rng(0).standard_normal((1, 9, 48), dtype=np.float32), []
    for name, function in functions.items():
        encodings.register(name, encodings.bias(function))
        model = seeded(block_config(48, 6, 80, encoding={"name": name}))
        outputs.append(eager_session(model).prefill(x))
    assert np.isfinite(outputs[0]).all() and np.array_equal(*outputs)
