"""The server's application on a local Ray cluster; skipped if Ray is not installed."""

from pathlib import Path

import pytest

from posenc_export.serve.requests import Request
from tests.serve.models import alone, artefact, opened, prompts
from tests.serve.test_http import Client

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.xdist_group("serve"),
    pytest.mark.filterwarnings("ignore"),
]  # warnings of Ray
PORT = 8765


def test_a_deployment_of_ray_serve_answers_as_a_session_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = pytest.importorskip("ray")
    pytest.importorskip("fastapi")
    from ray import serve

    from posenc_export.serve.ray_serve import Arguments, application

    folder: Path = artefact("ort")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        serve.run(application(Arguments(folder=str(folder), rows=4)))
        requests = [Request(tuple(prompt), 12) for prompt in prompts(6, 40)]
        expected = alone(opened(folder), requests)
        for index, request in enumerate(requests):
            body = {"prompt": list(request.prompt), "max_tokens": 12, "temperature": 0}
            if index % 2:
                result = [
                    token
                    for event in Client(PORT).events(body)
                    for token in event["choices"][0]["token_ids"]
                ]
            else:
                result = Client(PORT).ask("/v1/completions", {**body, "return_token_ids": True})[1][
                    "choices"
                ][0]["token_ids"]
            assert result == expected[request]
        assert Client(PORT).ask("/health") == (200, {"status": "ready"})
    finally:
        serve.shutdown()
        ray.shutdown()
