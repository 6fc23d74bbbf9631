"""What a server counts, in Prometheus's text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from posenc_export.runtime.manifest import Manifest
from posenc_export.serve.engine import Engine

FIRST = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # seconds
BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Counters of one server, apart from those of the process.

    Args:
        name: of the model.
        manifest: of the artefact.
        engine: whose rows and queue are shown.
    """

    def __init__(self, name: str, manifest: Manifest, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("posenc_requests", "Continuations by how they ended.", ["outcome"], registry=self.registry)
        self.refused = Counter("posenc_refused_requests", "Requests refused before a row was asked for, by HTTP status.", ["status"], registry=self.registry)
        self.read = Counter("posenc_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self.made = Counter("posenc_completion_tokens", "Tokens chosen.", registry=self.registry)
        self.first = Histogram("posenc_time_to_first_token_seconds", "From a request to its first token.", buckets=FIRST, registry=self.registry)
        self.between = Histogram("posenc_time_between_tokens_seconds", "From one token of a row to the next.", buckets=BETWEEN, registry=self.registry)
        running = Gauge("posenc_running_rows", "Requests that have a row.", registry=self.registry)
        running.set_function(lambda: engine.running)
        waiting = Gauge("posenc_waiting_requests", "Requests in the queue.", registry=self.registry)
        waiting.set_function(lambda: engine.waiting)
        model = Gauge("posenc_model_info", "The artefact that is served.", ["model", "target", "digest"], registry=self.registry)
        model.labels(name, manifest.target, manifest.digest).set(1)

    def text(self) -> bytes:
        """The page of /metrics."""
        return generate_latest(self.registry)
