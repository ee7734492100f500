"""Metrics for Prometheus, kept up to date by the events of schemes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from weightsync.engine.events import DropCounter, EventKind, Events, Subscription, SyncEvent, SyncPhase, SyncRole
from weightsync.errors import ConfigurationError, MissingExtraError
from weightsync.schemes.base import WeightSyncScheme
from weightsync.telemetry import require_scheme

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import CounterMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtraError("prometheus", "Metrics for Prometheus") from error

#: The upper bounds of the histogram, in seconds.
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


@dataclass(slots=True)
class _Sender:
    """The newest sender of a model: its newest version, and the version that each connected worker serves."""

    incarnation: int
    newest: int = 0
    serving: dict[int, int] = field(default_factory=dict)


class Metrics(Collector):
    """The metrics of all schemes of a process that `watch` is given. A registry takes one such object.

    When a worker is lost, its two gauges are removed. When a sender is closed, its last values stay until another
    sender of the same model has an event; the gauges are those of the newest sender. A version that timed out may be
    applied later, and then has two outcomes.

    Args:
        registry: where the metrics are registered; None: the global one.

    Raises:
        MissingExtraError: (an ImportError, when this module is imported) `prometheus-client` is not installed.
        ConfigurationError: this is no registry.
        ValueError: the registry has metrics of these names.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = REGISTRY if registry is None else registry
        if not isinstance(registry, CollectorRegistry):
            raise ConfigurationError(
                f"Metrics() was given {registry!r}: give a CollectorRegistry, or leave it out for the global one. A "
                "scheme is given to watch()."
            )
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
        self._restarts = Counter(
            "weightsync_restarts", "Restarts of workers by a WorkerGroup", ("model", "worker"), registry=registry
        )
        self._sent = Gauge("weightsync_sent_version", "The newest version sent", ("model",), registry=registry)
        self._served = Gauge(
            "weightsync_served_version", "The version served", ("model", "role", "worker"), registry=registry
        )
        self._staleness = Gauge(
            "weightsync_staleness_versions", "Versions that a worker is behind", ("model", "worker"), registry=registry
        )
        self._workers = Gauge("weightsync_workers", "Workers that are connected", ("model",), registry=registry)
        self._lock = threading.Lock()
        #: The events of each scheme that is watched, as long as they exist, and how many of them were dropped.
        self._watched: dict[DropCounter, weakref.ref[Events]] = {}
        #: How many events of schemes that no longer exist were dropped.
        self._dropped_before = 0
        self._senders: dict[str, _Sender] = {}
        registry.register(self)

    def watch(self, scheme: WeightSyncScheme) -> Subscription:
        """Count what a scheme does from now on, in the trainer or in a worker.

        Returns:
            The subscription; after `Subscription.cancel` the scheme is no longer counted. If it is watched already, the
            subscription that there is: nothing is counted twice.

        Raises:
            ConfigurationError: this is no scheme.
        """
        require_scheme(scheme, "Metrics.watch()")
        subscription = scheme._events.subscription_of(self.take) or scheme.on_event(self.take)
        with self._lock:
            self._forget_dead_schemes()
            events = subscription._events
            self._watched[events.drops] = weakref.ref(events)
        first = scheme._events.subscription_of(self.take) or subscription
        if first is not subscription:  # another thread has called this too
            subscription.cancel()
        return first

    def _forget_dead_schemes(self) -> None:
        """Keep of schemes that no longer exist only the sum."""
        for drops in [drops for drops, events in self._watched.items() if events() is None]:
            del self._watched[drops]
            self._dropped_before += drops.count

    def collect(self) -> Iterator[CounterMetricFamily]:
        """What is read when the registry is scraped."""
        with self._lock:
            dropped = self._dropped_before + sum(drops.count for drops in self._watched)
        yield CounterMetricFamily("weightsync_dropped_events", "Events that came too fast to be counted", value=dropped)

    def take(self, event: SyncEvent) -> None:
        """Count an event."""
        with self._lock:
            self._update_counters(event)
            if event.role is SyncRole.TRAINER:
                self._update_gauges(event)
            elif event.kind is EventKind.REPLY and event.version is not None:
                self._served.labels(event.model_id, event.role.value, _label(event.worker)).set(event.version)

    def _update_counters(self, event: SyncEvent) -> None:
        model, role = event.model_id, event.role.value
        if event.outcome is not None and event.role is SyncRole.TRAINER:
            self._outcomes.labels(model, event.outcome.value).inc()
        if event.kind is EventKind.STALE:
            self._stale.labels(model, role).inc()
        if event.kind is EventKind.RESTARTED:
            self._restarts.labels(model, _label(event.worker)).inc()
        self._bytes.labels(model).inc(event.nbytes)
        known = self._senders.get(model)
        packed_before = (
            known is not None and event.incarnation <= known.incarnation and (event.version or 0) <= known.newest
        )
        for phase, seconds in event.seconds.items():
            # Each worker's dispatch carries the time of packing, which is spent only once.
            if not (phase is SyncPhase.PACK and packed_before):
                self._phases.labels(model, role, phase.value).observe(seconds)

    def _update_gauges(self, event: SyncEvent) -> None:
        """Keep what each worker of the newest sender serves."""
        model, worker, sender = event.model_id, event.worker, self._sender(event)
        if event.incarnation < sender.incarnation:
            return
        match event.kind:
            case EventKind.DISPATCH:
                sender.newest = max(sender.newest, event.version or 0)
                self._sent.labels(model).set(sender.newest)
            case EventKind.JOINED if worker is not None:
                sender.serving.setdefault(worker, 0)
            case EventKind.REPLY if worker is not None:
                sender.serving[worker] = max(sender.serving.get(worker, 0), event.version or 0)
                self._served.labels(model, event.role.value, _label(worker)).set(sender.serving[worker])
            case EventKind.LOST if worker in sender.serving:
                del sender.serving[worker]
                self._remove(model, worker)
            case EventKind.CLOSED:  # the workers' gauges stay on the page until there is another sender
                self._workers.labels(model).set(0)
                return
        self._workers.labels(model).set(len(sender.serving))
        for each, version in sender.serving.items():
            self._staleness.labels(model, _label(each)).set(sender.newest - version)

    def _sender(self, event: SyncEvent) -> _Sender:
        """The newest sender of a model. If the event is its first, the gauges of the previous sender are removed."""
        known = self._senders.get(event.model_id)
        if known is None or event.incarnation > known.incarnation:
            for worker in known.serving if known is not None else ():
                self._remove(event.model_id, worker)
            known = self._senders[event.model_id] = _Sender(event.incarnation)
        return known

    def _remove(self, model: str, worker: int) -> None:
        self._served.remove(model, SyncRole.TRAINER.value, _label(worker))
        self._staleness.remove(model, _label(worker))


def _label(worker: int | None) -> str:
    return "" if worker is None else str(worker)
