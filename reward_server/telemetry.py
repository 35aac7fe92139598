"""The counters that ``GET /metrics`` answers with, in Prometheus's text format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Telemetry:
    """The counters of one server. Their memory does not grow with the number of requests."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._requests = Counter("maporl_requests", "Requests answered", ["path", "status"], registry=registry)
        self._seconds = Histogram("maporl_request_seconds", "Time to answer", buckets=_SECONDS, registry=registry)
        self._items = Counter("maporl_items", "Chats answered", ["outcome"], registry=registry)
        self._waiting = Gauge("maporl_queue_items", "Chats that wait", registry=registry)
        self._batches = Histogram(
            "maporl_batch_items", "Chats in a forward", buckets=[2**n for n in range(11)], registry=registry
        )
        self._forward = Histogram("maporl_batch_seconds", "Time of a forward", buckets=_SECONDS, registry=registry)

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count an answered request. ``path`` must be one of a bounded number of paths."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.observe(seconds)

    def item(self, outcome: str) -> None:
        """Count an answered chat. ``outcome`` is "scored" or the code of its error."""
        self._items.labels(outcome).inc()

    def waiting(self, items: int) -> None:
        """Set the number of chats that wait now."""
        self._waiting.set(items)

    def batch(self, items: int, seconds: float) -> None:
        """Count a forward of ``items`` chats that took ``seconds``."""
        self._batches.observe(items)
        self._forward.observe(seconds)

    def text(self) -> bytes:
        """All counters in Prometheus's text format."""
        return generate_latest(self.registry)
