"""OpenTelemetry spans: one for each send, one below it for each worker, and one in the worker that applies it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from weightsync.clock import wall_time
from weightsync.engine.events import EventKind, SpanTracer, Subscription, SyncEvent, SyncPhase, SyncRole
from weightsync.errors import ConfigurationError, MissingExtraError
from weightsync.protocol.report import OutcomeKind
from weightsync.schemes.base import WeightSyncScheme
from weightsync.telemetry import require_scheme

try:
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        Span,
        Status,
        StatusCode,
        Tracer,
        TracerProvider,
        get_tracer_provider,
        set_span_in_context,
    )
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingExtraError("otel", "Tracing with OpenTelemetry") from error

#: A tracestate that is longer is not passed on.
_LONGEST_STATE: Final = 512
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_ENDINGS: Final = {
    EventKind.REPLY: "",
    EventKind.REFUSED: "it refused the version",
    EventKind.LOST: "it is lost",
    EventKind.ABANDONED: "the version was given up",
}
#: The reason in the span of a worker whose outcome is not known, since nobody listens any more.
_CANCELLED: Final = "the tracing was cancelled before the worker had an outcome"
#: The outcome of a version, by the event that ends its span. Any other event means that it was given up.
_OUTCOMES: Final = {
    EventKind.REPLY: OutcomeKind.APPLIED,
    EventKind.REFUSED: OutcomeKind.REFUSED,
    EventKind.LOST: OutcomeKind.LOST,
}


def trace_scheme(scheme: WeightSyncScheme, tracer_provider: TracerProvider | None = None) -> Subscription:
    """Make spans of what a scheme does, on each side that this process has.

    In the trainer, ``send weights`` lasts from the extraction of the weights until every worker has an outcome. It
    is a child of the span that is current in the thread that sends. Below it, ``update worker`` lasts from the
    dispatch to one worker until its outcome. In the worker, ``apply weights`` lasts from the arrival of the update
    until the version is live. Its parent is the send, whose W3C trace context travels in the update. Only the start of
    a send's span runs in the thread that sends.

    Args:
        scheme: the scheme, initialised or not. Call it in the trainer and in each worker.
        tracer_provider: makes the spans; None: the global one.

    Returns:
        The subscription. `Subscription.cancel` ends the spans that are open, those of workers with the outcome
        "pending"; after it there are no more.

    Raises:
        MissingExtraError: (an ImportError, when this module is imported) `opentelemetry-api` is not installed.
        ConfigurationError: this is no scheme, or no tracer provider.
    """
    require_scheme(scheme, "trace_scheme()")
    provider = get_tracer_provider() if tracer_provider is None else tracer_provider
    if not isinstance(provider, TracerProvider):
        raise ConfigurationError(
            f"trace_scheme() was given the tracer provider {tracer_provider!r}: give a TracerProvider, which has "
            "get_tracer(), or leave it out for the global one."
        )
    spans = Spans(provider.get_tracer("weightsync"))
    return scheme.on_event(spans.take, tracer=spans)


@dataclass(slots=True)
class _OpenSpan:
    """The span of a version that one worker has not answered."""

    version: int
    span: Span
    #: Whether a deadline has passed meanwhile.
    overdue: bool = False


class Spans(SpanTracer):
    """The spans of one scheme.

    Args:
        tracer: makes them.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        #: Held for moments: sends begin in the threads that send, any thread may cancel, and all else happens in the
        #: events' own. Who takes a span out of these two ends it.
        self._lock = threading.Lock()
        self._cancelled = False
        self._sends: dict[int, Span] = {}
        self._workers: dict[int, _OpenSpan] = {}
        #: The newest version that a worker has had an outcome for.
        self._newest = 0

    def begin(self, model_id: str, version: int, pack_s: float) -> str:
        """Begin the span of a send; returns the trace context that its updates carry."""
        span = self._tracer.start_span(
            "send weights",
            start_time=_nanoseconds(wall_time() - pack_s),
            attributes={"weightsync.model_id": model_id, "weightsync.version": version, "weightsync.pack_s": pack_s},
        )
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._sends[version] = span
        if cancelled:
            span.end()
            return ""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=set_span_in_context(span))
        parts = carrier.get("traceparent", ""), carrier.get("tracestate", "")
        return "\n".join(part for part in parts if part and len(part) <= _LONGEST_STATE)

    def take(self, event: SyncEvent) -> None:
        """Begin or end what an event begins or ends."""
        if event.role is SyncRole.WORKER:
            self._on_decision(event)
        elif event.kind is EventKind.DISPATCH:
            self._on_dispatch(event)
        elif event.kind in _ENDINGS:
            self._on_outcome(event)
        elif event.kind is EventKind.TIMED_OUT:
            self._on_timeout(event)
        elif event.kind is EventKind.CLOSED:
            for worker in list(self._workers):
                self._end_worker(worker, event, "the sender was closed")
            self._end_sends(event)
            self._newest = 0

    def end(self) -> None:
        """End the spans that are open, since the subscription was cancelled. There are no more spans."""
        with self._lock:
            self._cancelled = True
            workers, sends = [*self._workers.values()], [*self._sends.values()]
            self._workers.clear()
            self._sends.clear()
        for each in workers:
            _finish(each.span, wall_time(), OutcomeKind.PENDING, _CANCELLED, {}, failed=each.overdue)
        for span in sends:
            span.end()

    def _on_dispatch(self, event: SyncEvent) -> None:
        assert event.worker is not None
        assert event.version is not None
        self._end_worker(event.worker, event, "a newer version was sent")
        self._end_sends(event, before=event.version)
        span = self._start("update worker", event, event.time)
        span.set_attribute("weightsync.nbytes", event.nbytes)
        self._keep(event.worker, _OpenSpan(event.version, span))

    def _keep(self, worker: int, opened: _OpenSpan) -> None:
        """Keep a worker's span until its outcome; end it now if the subscription was cancelled meanwhile."""
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._workers[worker] = opened
        if cancelled:
            _finish(opened.span, wall_time(), OutcomeKind.PENDING, _CANCELLED, {}, failed=False)

    def _on_timeout(self, event: SyncEvent) -> None:
        late = None if event.worker is None else self._workers.get(event.worker)
        if late is not None:
            late.overdue = True
            late.span.add_event("the deadline has passed", timestamp=_nanoseconds(event.time))

    def _on_outcome(self, event: SyncEvent) -> None:
        worker = event.worker
        if worker is None:
            return
        if event.version is not None and event.outcome is not None and worker not in self._workers:
            # It was lost before the send: no update was dispatched to it.
            self._workers[worker] = _OpenSpan(event.version, self._start("update worker", event, event.time))
        opened = self._workers.get(worker)
        if opened is None or event.version not in (None, opened.version):
            return
        self._end_worker(worker, event, event.reason or _ENDINGS[event.kind])
        self._newest = max(self._newest, opened.version)
        if not self._workers:
            # Not only its own: a late joiner may have caught up with an older version.
            self._end_sends(event, before=self._newest + 1)

    def _on_decision(self, event: SyncEvent) -> None:
        """In the worker: the span of a version that is live, or was refused."""
        if event.kind not in (EventKind.REPLY, EventKind.REFUSED) or event.version is None:
            return
        span = self._start("apply weights", event, event.time - event.seconds.get(SyncPhase.APPLY, 0.0))
        outcome = _OUTCOMES[event.kind]
        _finish(span, event.time, outcome, event.reason, event.seconds, failed=outcome is not OutcomeKind.APPLIED)

    def _start(self, name: str, event: SyncEvent, at: float) -> Span:
        traceparent, _, tracestate = event.trace_context.partition("\n")
        carried = {"traceparent": traceparent, "tracestate": tracestate}
        span = self._tracer.start_span(
            name, context=_PROPAGATOR.extract(carried, context=Context()), start_time=_nanoseconds(at)
        )
        span.set_attribute("weightsync.model_id", event.model_id)
        if event.version is not None:
            span.set_attribute("weightsync.version", event.version)
        if event.worker is not None:
            span.set_attribute("weightsync.worker", event.worker)
        return span

    def _end_worker(self, worker: int, event: SyncEvent, reason: str) -> None:
        """End a worker's span, if it has one. Any event may be that of another version, such as the next dispatch."""
        with self._lock:
            ended = self._workers.pop(worker, None)
        if ended is None:
            return
        outcome = _OUTCOMES.get(event.kind, OutcomeKind.ABANDONED)
        own = event.kind in _ENDINGS and event.version == ended.version
        # Giving up a version for a newer one is normal for an asynchronous trainer, unless the worker was too late.
        failed = ended.overdue if outcome is OutcomeKind.ABANDONED else outcome is not OutcomeKind.APPLIED
        _finish(ended.span, event.time, outcome, reason, event.seconds if own else {}, failed=failed)

    def _end_sends(self, event: SyncEvent, before: int | None = None) -> None:
        """End the sends of all versions, or of those before one."""
        with self._lock:
            over = [version for version in self._sends if before is None or version < before]
            ended = [self._sends.pop(version) for version in over]
        for span in ended:
            span.end(end_time=_nanoseconds(event.time))


def _finish(
    span: Span, at: float, outcome: OutcomeKind, reason: str, seconds: Mapping[SyncPhase, float], *, failed: bool
) -> None:
    """End a span, with the outcome of the version."""
    span.set_attribute("weightsync.outcome", outcome.value)
    for phase, spent in seconds.items():
        span.set_attribute(f"weightsync.{phase.value}_s", spent)
    if failed:
        span.set_status(Status(StatusCode.ERROR, reason))
    elif reason:
        span.set_attribute("weightsync.reason", reason)
    span.end(end_time=_nanoseconds(at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
