"""Metrics of the server in Prometheus's text format."""

from typing import Any, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.prefixes import BLOCK
from posenc_export.serve.engine import Engine

FIRST = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # seconds
BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Metrics of one server, in a registry of its own without the metrics of the process."""

    def __init__(self, name: str, manifest: Manifest, engine: Engine) -> None:
        self.registry: Any = CollectorRegistry()
        own: Any = {"registry": self.registry}
        self.requests = Counter("posenc_requests", "Choices by outcome.", ["outcome"], **own)
        said = "Requests refused before they were queued, by HTTP status."
        self.refused = Counter("posenc_refused_requests", said, ["status"], **own)
        self.prompt_tokens = Counter("posenc_prompt_tokens", "Prompt tokens.", **own)
        self.completion_tokens = Counter("posenc_completion_tokens", "Generated tokens.", **own)
        said = "Time from a request to its first token."
        self.first = Histogram("posenc_time_to_first_token_seconds", said, buckets=FIRST, **own)
        said = "Time from one token of a row to the next."
        self.between = Histogram("posenc_time_between_tokens_seconds", said, buckets=BETWEEN, **own)
        running = Gauge("posenc_running_rows", "Requests with a row.", **own)
        running.set_function(lambda: len(engine.batch.rows))
        waiting = Gauge("posenc_waiting_requests", "Requests in the queue.", **own)
        waiting.set_function(lambda: len(engine.waiting))
        labels = ["model", "target", "digest"]
        model = Gauge("posenc_model_info", "The served artefact.", labels, **own)
        model.labels(name, manifest.target, manifest.digest).set(1)
        self._batch = engine.batch
        self.registry.register(self)

    def text(self) -> bytes:
        """Return the content of /metrics."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield metrics that are read from counts when prometheus_client asks for them."""
        prefixes = self._batch.prefixes
        if prefixes is None:
            return
        said = "Prompts that began with a known prefix."
        yield CounterMetricFamily("posenc_prefix_hits", said, prefixes.hits)
        said = "Prompt tokens that were known and not computed again."
        yield CounterMetricFamily("posenc_prefix_tokens", said, prefixes.tokens)
        said = "Tokens whose caches are kept."
        yield GaugeMetricFamily("posenc_prefix_kept_tokens", said, BLOCK * prefixes.used)
