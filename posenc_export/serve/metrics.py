"""Metrics of the server in Prometheus's text format."""

from typing import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from posenc_export.runtime.artefact.manifest import Manifest
from posenc_export.runtime.session.prefixes import BLOCK, Prefixes
from posenc_export.runtime.session.speculation import Speculator
from posenc_export.serve.engine import Engine

FIRST = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)  # seconds
BETWEEN = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Metrics of one server, in a registry of its own without the default metrics of the process.

    Args:
        name: name of the model.
        manifest: manifest of the artefact.
        engine: engine whose rows and queue are reported.
    """

    def __init__(self, name: str, manifest: Manifest, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "posenc_requests", "Choices by outcome.", ["outcome"], registry=self.registry
        )
        self.refused = Counter(
            "posenc_refused_requests",
            "Requests refused before they were queued, by HTTP status.",
            ["status"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "posenc_prompt_tokens", "Prompt tokens.", registry=self.registry
        )
        self.completion_tokens = Counter(
            "posenc_completion_tokens", "Generated tokens.", registry=self.registry
        )
        self.first = Histogram(
            "posenc_time_to_first_token_seconds",
            "Time from a request to its first token.",
            buckets=FIRST,
            registry=self.registry,
        )
        self.between = Histogram(
            "posenc_time_between_tokens_seconds",
            "Time from one token of a row to the next.",
            buckets=BETWEEN,
            registry=self.registry,
        )
        running = Gauge("posenc_running_rows", "Requests with a row.", registry=self.registry)
        running.set_function(lambda: engine.running)
        waiting = Gauge("posenc_waiting_requests", "Requests in the queue.", registry=self.registry)
        waiting.set_function(lambda: engine.waiting)
        model = Gauge(
            "posenc_model_info",
            "The served artefact.",
            ["model", "target", "digest"],
            registry=self.registry,
        )
        model.labels(name, manifest.target, manifest.digest).set(1)
        if engine.prefixes is not None:
            self.registry.register(PrefixCollector(engine.prefixes))
        if engine.speculator is not None:
            self.registry.register(DraftCollector(engine.speculator))

    def text(self) -> bytes:
        """Return the content of /metrics."""
        return generate_latest(self.registry)


class PrefixCollector:
    """Reads the counts of the kept prefixes."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks for them."""
        yield CounterMetricFamily(
            "posenc_prefix_hits", "Prompts that began with a known prefix.", self.prefixes.hits
        )
        yield CounterMetricFamily(
            "posenc_prefix_tokens",
            "Prompt tokens that were known and not computed again.",
            self.prefixes.tokens,
        )
        yield GaugeMetricFamily(
            "posenc_prefix_kept_tokens", "Tokens whose caches are kept.", BLOCK * self.prefixes.used
        )


class DraftCollector:
    """Reads the counts of drafted tokens, with the names that vLLM gives them."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks for them."""
        counted = self.speculator
        yield CounterMetricFamily(
            "posenc_decode_passes",
            "Passes of the graph that read generated or drafted tokens.",
            counted.passes,
        )
        yield CounterMetricFamily(
            "posenc_spec_decode_num_drafts",
            "Rows that a pass read with drafted tokens.",
            counted.drafts,
        )
        yield CounterMetricFamily(
            "posenc_spec_decode_num_draft_tokens", "Drafted tokens.", counted.drafted
        )
        yield CounterMetricFamily(
            "posenc_spec_decode_num_accepted_tokens",
            "Drafted tokens that the model chose itself.",
            counted.kept,
        )
