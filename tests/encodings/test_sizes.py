"""Sizes that no machine can hold or compute are refused when an encoding is built, with their
limit.
"""

import signal
from typing import Any, Iterator

import pytest

from posenc_export.encodings import REGISTRY, Geometry, build, parameters
from posenc_export.shared import registry

SIZES = [
    (name, key)
    for name in REGISTRY
    for key, parameter in parameters(name).items()
    if registry.kind_of(parameter) is int
]


def geometry(name: str, max_positions: int = 64) -> Geometry:
    return Geometry(12, 2, 6, max_positions, "causal" in REGISTRY[name].works_in)


@pytest.fixture
def two_seconds() -> Iterator[None]:
    """Raise TimeoutError in a test that takes longer."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(2)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("name", "key"), SIZES)
def test_a_size_of_a_billion_is_refused_at_once_or_costs_nothing(
    name: str, key: str, two_seconds: None
) -> None:
    try:
        build({"name": name, key: 10**9}, geometry(name))
    except ValueError as error:
        assert "expected" in str(error) and "of this machine" not in str(error)


@pytest.mark.parametrize(
    ("spec", "positions"),
    [
        ({"name": "recurrent"}, 10**8),
        ({"name": "floater"}, 10**8),
        ({"name": "floater", "substeps": 1000}, 10**4),
    ],
)
def test_a_recurrence_of_hours_is_refused_at_once(
    spec: dict[str, Any], positions: int, two_seconds: None
) -> None:
    with pytest.raises(
        ValueError, match="expected at most 4194304 steps, which run one after the other, got"
    ):
        build(spec, geometry(spec["name"], positions))
