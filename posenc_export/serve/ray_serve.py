"""The HTTP application as a deployment of Ray Serve (https://docs.ray.io/en/latest/serve), for
several processes or machines.

serve run posenc_export.serve.ray_serve:application folder=/models/m replicas=2
"""

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ray import serve

WAITING = 4  # length of a replica's queue per row


class Arguments(BaseModel):
    """Arguments of `serve run`, given as NAME=VALUE."""

    folder: str  # artefact folder, with the same path on every machine
    # Number of processes, each with its own copy of the weights and its own engine
    replicas: int = 1
    rows: int = 16  # number of requests that a replica decodes together
    cpus: int = 1  # number of CPUs that Ray reserves for a replica, and of threads per operator


def application(arguments: Arguments) -> Any:
    """Create the application for `serve run`. A replica gets what its rows and queue can hold."""

    def build() -> Any:  # called in each replica, since a model cannot be sent between processes
        from posenc_export.runtime import load
        from posenc_export.runtime.artefact.chat_template import chat_codec
        from posenc_export.serve.app import application as http
        from posenc_export.serve.memory import available_memory, longest_row, rows_memory
        from posenc_export.serve.requests import CHUNK, Limits

        folder = Path(arguments.folder)
        model = load(folder, threads=arguments.cpus)
        memory = rows_memory(None, 0, available_memory())
        context = longest_row(model.session(), memory, model.manifest.max_positions, CHUNK)
        rows, most = arguments.rows, context - 1
        limits = Limits(rows, WAITING * rows, context, most, most, memory=memory)
        chat = chat_codec(folder, model.manifest)
        return http(folder.name, model, model.tokenizer, limits, chat=chat)

    deployment = serve.deployment(
        serve.ingress(build)(),
        name="posenc",
        num_replicas=arguments.replicas,
        max_ongoing_requests=(1 + WAITING) * arguments.rows,
        ray_actor_options={"num_cpus": arguments.cpus},
    )
    return deployment.bind()
