"""The server's application as a deployment of Ray Serve (https://docs.ray.io/en/latest/serve), for more than one process or machine.

serve run posenc_export.serve.ray_serve:application folder=/models/m replicas=2
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ray import serve

from posenc_export.commands.serve import CONTEXT

WAITING = 4  # requests in the queue of a replica, for each of its rows


class Arguments(BaseModel):
    """What `serve run` takes as NAME=VALUE.

    Args:
        folder: of the artefact, under the same path on every machine.
        replicas: processes, each with the weights, an engine and rows of its own.
        rows: requests that a replica decodes together.
        cpus: that Ray sets aside for a replica; the threads of one operator.
    """

    folder: str
    replicas: int = 1
    rows: int = 16
    cpus: int = 1


def application(arguments: Arguments) -> Any:
    """The application, as `serve run` and serve.run take it. A replica gets as many requests as its rows and queue hold; more wait in Ray."""

    def build() -> Any:  # by each replica: a model cannot be sent between processes
        from posenc_export.runtime import load
        from posenc_export.serve.app import application as http
        from posenc_export.serve.requests import Limits
        from posenc_export.text import codec

        folder = Path(arguments.folder)
        model = load(folder, threads=arguments.cpus)
        context = min(model.manifest.max_positions, CONTEXT)
        limits = Limits(arguments.rows, WAITING * arguments.rows, context, context - 1, context - 1)
        return http(folder.name, model, codec(folder, model.manifest), limits)

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="posenc",
        num_replicas=arguments.replicas,
        max_ongoing_requests=(1 + WAITING) * arguments.rows,
        ray_actor_options={"num_cpus": arguments.cpus},
    )
    return deployment.bind()
