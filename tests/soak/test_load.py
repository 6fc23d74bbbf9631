"""The server under a short load. The long one: `make soak`."""

import pytest

from tests.serve.models import artefact

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytestmark = pytest.mark.xdist_group("serve")


@pytest.mark.parametrize(
    "size", [(100, 40, 20), pytest.param((2000, 200, 200), marks=pytest.mark.exhaustive)]
)
def test_a_server_with_few_files_answers_everyone_while_others_are_slow_or_leave(
    size: tuple[int, ...],
) -> None:
    from tests.soak import load

    figures = load.measured(artefact("ort"), load.Load(*size))
    assert not figures["wrong"], figures
    assert figures["answered"] == size[0] and figures["left"] == size[2]
