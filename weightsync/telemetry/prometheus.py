"""Metrics for Prometheus, kept up to date by the events of schemes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from weightsync.engine.events import EventKind, Subscription, SyncEvent, SyncPhase, SyncRole
from weightsync.errors import MissingExtraError
from weightsync.schemes.base import WeightSyncScheme

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import CounterMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtraError("prometheus", "Metrics for Prometheus") from error

#: The upper bounds of the histogram, in seconds.
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(Collector):
    """The metrics of all schemes of a process that `watch` is given. A registry takes one such object.

    Of a worker that is lost, the two gauges with its label end. A version that timed out may be applied later, and
    then has two outcomes.

    Args:
        registry: where the metrics are registered; None: the global one.

    Raises:
        MissingExtraError: (an ImportError, when this module is imported) `prometheus-client` is not installed.
        ValueError: the registry has metrics of these names.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = REGISTRY if registry is None else registry
        self._phases = Histogram(
            "weightsync_phase_seconds",
            "Seconds by phase",
            ("model", "role", "phase"),
            registry=registry,
            buckets=BUCKETS,
        )
        self._bytes = Counter(
            "weightsync_bytes", "Bytes of weights sent, worker by worker", ("model",), registry=registry
        )
        self._outcomes = Counter("weightsync_outcomes", "Outcomes of workers", ("model", "outcome"), registry=registry)
        self._stale = Counter("weightsync_stale", "What came too late", ("model", "role"), registry=registry)
        self._sent = Gauge("weightsync_sent_version", "The newest version sent", ("model",), registry=registry)
        self._served = Gauge(
            "weightsync_served_version", "The version served", ("model", "role", "worker"), registry=registry
        )
        self._staleness = Gauge(
            "weightsync_staleness_versions", "Versions that a worker is behind", ("model", "worker"), registry=registry
        )
        self._workers = Gauge("weightsync_workers", "Workers that are connected", ("model",), registry=registry)
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        #: For each model, the newest version sent, and the version that each connected worker serves.
        self._newest: dict[str, int] = {}
        self._serving: dict[str, dict[int, int]] = {}
        registry.register(self)

    def watch(self, scheme: WeightSyncScheme) -> Subscription:
        """Count what a scheme does from now on, in the trainer or in a worker.

        Returns:
            The subscription; after `Subscription.cancel` the scheme is no longer counted.
        """
        subscription = scheme.on_event(self.take)
        with self._lock:
            self._subscriptions.append(subscription)
        return subscription

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What is read when the registry is scraped."""
        with self._lock:
            dropped = sum(subscription.dropped for subscription in self._subscriptions)
        yield CounterMetricFamily("weightsync_dropped_events", "Events that came too fast to be counted", value=dropped)

    def take(self, event: SyncEvent) -> None:
        """Count an event."""
        with self._lock:
            self._count(event)
            if event.role is SyncRole.TRAINER:
                self._follow(event)
            elif event.kind is EventKind.REPLY and event.version is not None:
                self._served.labels(event.model_id, event.role.value, _label(event.worker)).set(event.version)

    def _count(self, event: SyncEvent) -> None:
        model, role = event.model_id, event.role.value
        if event.outcome is not None and event.role is SyncRole.TRAINER:
            self._outcomes.labels(model, event.outcome.value).inc()
        if event.kind is EventKind.STALE:
            self._stale.labels(model, role).inc()
        self._bytes.labels(model).inc(event.nbytes)
        packed_before = (event.version or 0) <= self._newest.get(model, 0)
        for phase, seconds in event.seconds.items():
            # Each worker's dispatch carries the time of packing, which is spent only once.
            if not (phase is SyncPhase.PACK and packed_before):
                self._phases.labels(model, role, phase.value).observe(seconds)

    def _follow(self, event: SyncEvent) -> None:
        """Keep what each worker serves."""
        model, worker = event.model_id, event.worker
        serving = self._serving.setdefault(model, {})
        match event.kind:
            case EventKind.DISPATCH:
                self._newest[model] = max(self._newest.get(model, 0), event.version or 0)
                self._sent.labels(model).set(self._newest[model])
            case EventKind.JOINED if worker is not None:
                serving.setdefault(worker, 0)
            case EventKind.REPLY if worker is not None:
                serving[worker] = max(serving.get(worker, 0), event.version or 0)
                self._served.labels(model, event.role.value, _label(worker)).set(serving[worker])
            case EventKind.LOST if worker in serving:
                del serving[worker]
                self._served.remove(model, event.role.value, _label(worker))
                self._staleness.remove(model, _label(worker))
            case EventKind.CLOSED:  # the next sender of this model counts from 1; the last values stay on the page
                del self._serving[model]
                self._newest.pop(model, None)
                serving = {}
        self._workers.labels(model).set(len(serving))
        for each, version in serving.items():
            self._staleness.labels(model, _label(each)).set(self._newest.get(model, 0) - version)


def _label(worker: int | None) -> str:
    return "" if worker is None else str(worker)
