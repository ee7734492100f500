"""OpenTelemetry: the spans of a send, of its workers and of what they apply form one tree across processes."""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import (  # noqa: F401 - fixtures
    PATIENCE,
    Crew,
    Pair,
    WorkerSetup,
    crew,
    join,
    pair,
    receive,
    scheme_class,
    small,
)
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from torch import nn

from weightsync import (
    ConfigurationError,
    EventKind,
    MissingExtraError,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    SyncEvent,
    SyncPhase,
    SyncRole,
)
from weightsync.protocol.codec import is_trace_context
from weightsync.telemetry.otel import Spans, trace_scheme


class Exported:
    """A tracer provider of the SDK, and an exporter that keeps the ended spans."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def exported() -> Iterator[Exported]:
    made = Exported()
    yield made
    made.provider.shutdown()


# ------------------------------------------------------------------ functions that a worker process is asked to call


class Refusing(nn.Linear):
    """A model whose extra state cannot be set."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        raise ValueError("not today")


def traced(setup: WorkerSetup, make: Callable[..., nn.Module] = small) -> None:
    """Join, and trace the scheme."""
    setup.kept["exported"] = Exported()
    trace_scheme(setup.scheme, setup.kept["exported"].provider)
    join(setup, make)


def spans(setup: WorkerSetup) -> list[tuple[str, int, int, str, int]]:
    """Close. Returns name, trace, parent, status and version of each span that this process has exported."""
    setup.scheme.close()
    found = setup.kept["exported"].named("apply weights")
    return [
        (s.name, s.context.trace_id, s.parent.span_id, s.status.status_code.name, s.attributes["weightsync.version"])
        for s in found
    ]


# --------------------------------------------------------------------------------------------------------- the tests


def test_a_send_is_one_tree_of_spans_across_processes_even_with_a_killed_worker(
    crew: Crew,  # noqa: F811
    exported: Exported,
) -> None:
    serving, killed = workers = crew.start(MultiProcessWeightSyncScheme(), 2)
    serving.do(traced)
    killed.do(join)
    scheme = MultiProcessWeightSyncScheme()
    trace_scheme(scheme, exported.provider)
    scheme.init_on_sender(
        "policy", pipes=[each.pipe for each in workers], processes=[each.process for each in workers], model=small()
    )
    sender = scheme.get_sender()
    for each in workers:
        each.tell(receive)
    with exported.provider.get_tracer("trainer").start_as_current_span("step") as step:
        assert sender.send(timeout=PATIENCE).ok
    for each in workers:
        each.answer()
    killed.kill()
    serving.tell(receive)
    report = sender.send(timeout=PATIENCE, on_failure="report")
    serving.answer()
    applied = serving.do(spans)
    scheme.close()

    assert report[1].kind is OutcomeKind.LOST
    first, second = exported.named("send weights")
    assert first.parent.span_id == step.get_span_context().span_id
    assert [span.attributes["weightsync.version"] for span in (first, second)] == [1, 2]
    below = exported.named("update worker")
    assert sorted(
        (
            span.parent.span_id,
            span.attributes["weightsync.worker"],
            span.attributes["weightsync.outcome"],
            span.status.status_code,
        )
        for span in below
    ) == sorted(
        [
            (first.context.span_id, 0, "applied", StatusCode.UNSET),
            (first.context.span_id, 1, "applied", StatusCode.UNSET),
            (second.context.span_id, 0, "applied", StatusCode.UNSET),
            (second.context.span_id, 1, "lost", StatusCode.ERROR),
        ]
    )
    assert applied == [
        ("apply weights", send.context.trace_id, send.context.span_id, "UNSET", version)
        for version, send in ((1, first), (2, second))
    ]
    for send in (first, second):
        inside = [span for span in below if span.parent.span_id == send.context.span_id]
        assert all(send.start_time <= span.start_time <= span.end_time <= send.end_time for span in inside)


def test_a_worker_that_refuses_has_spans_with_an_error_on_both_sides(crew: Crew, exported: Exported) -> None:  # noqa: F811
    [worker] = crew.start(MultiProcessWeightSyncScheme())
    worker.do(traced, Refusing)
    with MultiProcessWeightSyncScheme() as scheme:
        trace_scheme(scheme, exported.provider)
        scheme.init_on_sender("policy", pipes=[worker.pipe], model=Refusing())
        worker.tell(receive)
        scheme.get_sender().send(timeout=PATIENCE, on_failure="report")
        worker.answer()
        [(_, trace_id, parent, status, _)] = worker.do(spans)
    [send], [below] = exported.named("send weights"), exported.named("update worker")

    assert (trace_id, parent, status) == (send.context.trace_id, send.context.span_id, "ERROR")
    assert below.attributes["weightsync.outcome"] == "refused"
    assert "not today" in below.status.description


# ------------------------------------------------------------------------------------------ one event after another


def event(kind: EventKind, version: int | None, worker: int | None = 0, **more: Any) -> SyncEvent:
    return SyncEvent(kind=kind, role=SyncRole.TRAINER, model_id="policy", version=version, worker=worker, **more)


def test_a_version_that_times_out_keeps_its_spans_open_until_it_is_abandoned(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    context = made.begin("policy", 1, 0.0)
    made.take(event(EventKind.DISPATCH, 1, trace_context=context))
    made.take(event(EventKind.TIMED_OUT, 1, outcome=OutcomeKind.TIMED_OUT))
    assert exported.named("update worker") == exported.named("send weights") == []

    made.take(event(EventKind.ABANDONED, 1, outcome=OutcomeKind.ABANDONED, reason="given up by the caller"))

    [send], [below] = exported.named("send weights"), exported.named("update worker")
    assert [each.name for each in below.events] == ["the deadline has passed"]
    assert below.status.description == "given up by the caller"
    assert send.end_time == below.end_time


def test_an_abandoned_version_has_no_error_status(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.take(event(EventKind.DISPATCH, 1, trace_context=made.begin("policy", 1, 0.0)))
    made.take(event(EventKind.ABANDONED, 1, outcome=OutcomeKind.ABANDONED, reason="given up by the caller"))

    [below] = exported.named("update worker")
    assert below.status.status_code is StatusCode.UNSET
    assert below.attributes["weightsync.outcome"] == "abandoned"
    assert below.attributes["weightsync.reason"] == "given up by the caller"


def test_a_catch_up_replaced_by_a_newer_version_is_abandoned_without_phase_times(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.take(event(EventKind.DISPATCH, 3, trace_context=made.begin("policy", 3, 0.1), seconds={SyncPhase.PACK: 0.1}))
    made.take(event(EventKind.DISPATCH, 4, trace_context=made.begin("policy", 4, 0.4), seconds={SyncPhase.PACK: 0.4}))
    made.take(event(EventKind.REFUSED, 3, reason="a newer version arrived", seconds={SyncPhase.TRANSFER: 9.0}))
    made.take(event(EventKind.REPLY, 4, seconds={SyncPhase.TRANSFER: 0.2}))

    old, new = exported.named("update worker")
    assert old.attributes["weightsync.version"] == 3
    assert old.attributes["weightsync.outcome"] == "abandoned"
    assert old.attributes["weightsync.reason"] == "a newer version was sent"
    assert old.status.status_code is StatusCode.UNSET
    assert not [name for name in old.attributes if name.endswith("_s")]
    assert new.attributes["weightsync.outcome"] == "applied"  # a late joiner's reply decides no send's outcome
    assert new.attributes["weightsync.transfer_s"] == 0.2
    assert "weightsync.pack_s" not in new.attributes


def test_spans_whose_events_were_dropped_end_with_the_next_version_and_at_the_close(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    for version in (1, 2):
        made.take(event(EventKind.DISPATCH, version, trace_context=made.begin("policy", version, 0.0)))
    assert [span.attributes["weightsync.version"] for span in exported.named("send weights")] == [1]

    made.take(event(EventKind.CLOSED, None, None))

    assert [span.attributes["weightsync.version"] for span in exported.named("send weights")] == [1, 2]
    assert len(exported.named("update worker")) == 2


def test_a_late_joiner_that_catches_up_with_an_older_version_leaves_no_newer_send_open(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.take(event(EventKind.DISPATCH, 1, 0, trace_context=made.begin("policy", 1, 0.0)))
    made.take(event(EventKind.REPLY, 1, 0, outcome=OutcomeKind.APPLIED))
    made.take(event(EventKind.DISPATCH, 2, 0, trace_context=made.begin("policy", 2, 0.0)))
    made.take(event(EventKind.DISPATCH, 1, 1))
    made.take(event(EventKind.REPLY, 2, 0, outcome=OutcomeKind.APPLIED))
    made.begin("policy", 3, 0.0)
    made.take(event(EventKind.REPLY, 1, 1))

    assert [span.attributes["weightsync.version"] for span in exported.named("send weights")] == [1, 2]


def test_the_loss_of_a_worker_does_not_end_the_span_of_a_send_that_has_just_begun(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.begin("policy", 1, 0.0)
    made.take(event(EventKind.LOST, None))

    assert exported.named("send weights") == []


@pytest.mark.parametrize("value", [None, 3, MultiProcessWeightSyncScheme])
def test_trace_scheme_refuses_objects_that_are_not_schemes(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^trace_scheme\(\) was given .*: give the scheme"):
        trace_scheme(value)


def test_trace_scheme_refuses_a_tracer_in_place_of_a_tracer_provider(exported: Exported) -> None:
    scheme, tracer = MultiProcessWeightSyncScheme(), exported.provider.get_tracer("test")
    for value in (tracer, TracerProvider):
        with pytest.raises(ConfigurationError, match="give a TracerProvider"):
            trace_scheme(scheme, value)  # type: ignore[arg-type]


def test_a_target_lost_before_the_dispatch_has_a_span_too(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    context = made.begin("policy", 1, 0.0)
    made.take(event(EventKind.LOST, 1, 5, outcome=OutcomeKind.LOST, reason="it died", trace_context=context))

    [send], [below] = exported.named("send weights"), exported.named("update worker")
    assert (below.parent.span_id, below.status.description) == (send.context.span_id, "it died")


def test_a_tracestate_is_carried_and_one_that_is_too_long_is_left_out(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    carried = []
    for state in ({"vendor": "value"}, {"vendor": "x" * 250, "other": "y" * 250, "third": "z" * 250}):
        parent = trace.SpanContext(1, 2, True, trace.TraceFlags(1), trace.TraceState(list(state.items())))
        with trace.use_span(trace.NonRecordingSpan(parent)):
            carried.append(made.begin("policy", 1, 0.0))

    assert all(map(is_trace_context, carried))
    assert carried[0].endswith("\nvendor=value")
    assert "\n" not in carried[1]


def test_a_cancelled_subscription_starts_no_spans_even_if_another_callback_is_registered(
    pair: Pair,  # noqa: F811
    exported: Exported,
) -> None:
    events: list[SyncEvent] = []
    pair.scheme.on_event(events.append)
    for subscription in [trace_scheme(pair.scheme, exported.provider) for _ in range(2)]:
        pair.sync()
        subscription.cancel()
    pair.sync()
    pair.scheme.close()

    contexts = [event.trace_context for event in events if event.kind is EventKind.DISPATCH]
    assert [bool(context) for context in contexts] == [True, True, False]


def test_cancelling_the_subscription_during_a_send_ends_the_open_spans(
    pair: Pair,  # noqa: F811
    exported: Exported,
) -> None:
    dispatched = threading.Event()
    subscription = trace_scheme(pair.scheme, exported.provider)
    pair.scheme.on_event(lambda _: dispatched.set())  # called after the tracing has handled the same event
    pair.sender.send_async()
    assert dispatched.wait(PATIENCE)
    subscription.cancel()

    [send], [below] = exported.named("send weights"), exported.named("update worker")
    assert below.parent.span_id == send.context.span_id
    assert below.attributes["weightsync.outcome"] == "pending"
    assert below.attributes["weightsync.reason"] == "the tracing was cancelled before the worker had an outcome"
    assert below.status.status_code is StatusCode.UNSET
    pair.receiver.receive(timeout=PATIENCE)
    assert pair.sender.wait_async(timeout=PATIENCE).ok
    subscription.cancel()
    assert len(exported.named("send weights")) == len(exported.named("update worker")) == 1


def test_cancelling_the_tracing_ends_the_span_of_a_timed_out_worker_with_an_error(exported: Exported) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.take(event(EventKind.DISPATCH, 1, trace_context=made.begin("policy", 1, 0.0)))
    made.take(event(EventKind.TIMED_OUT, 1, outcome=OutcomeKind.TIMED_OUT))
    made.end()

    [below] = exported.named("update worker")
    assert (below.attributes["weightsync.outcome"], below.status.status_code) == ("pending", StatusCode.ERROR)


@pytest.mark.parametrize(
    ("late", "outcome", "says"),
    [
        (EventKind.DISPATCH, None, "pending"),
        (EventKind.LOST, OutcomeKind.LOST, "lost"),
        (EventKind.TIMED_OUT, None, ""),
    ],
)
def test_a_call_that_runs_while_the_tracing_is_cancelled_leaves_no_span_open(
    exported: Exported, late: EventKind, outcome: OutcomeKind | None, says: str
) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.end()  # as another thread may do once the calls below have begun

    assert made.begin("policy", 1, 0.0) == ""
    made.take(event(late, 1, outcome=outcome))

    assert len(exported.named("send weights")) == 1
    assert [span.attributes["weightsync.outcome"] for span in exported.named("update worker")] == (
        [says] if says else []
    )


@pytest.mark.parametrize(
    "call",
    [
        Spans.end,
        lambda made: made.begin("policy", 2, 0.0),
        lambda made: made.take(event(EventKind.DISPATCH, 1, worker=1)),
        lambda made: made._keep(1, made._workers[0]),
        lambda made: made.take(event(EventKind.REPLY, 1, outcome=OutcomeKind.APPLIED)),
        lambda made: made.take(event(EventKind.CLOSED, None, None)),
    ],
    ids=["cancelled", "send", "dispatch", "kept", "outcome", "closed"],
)
def test_each_span_is_kept_or_taken_by_one_thread_at_a_time(
    exported: Exported, call: Callable[[Spans], object]
) -> None:
    made = Spans(exported.provider.get_tracer("test"))
    made.take(event(EventKind.DISPATCH, 1, trace_context=made.begin("policy", 1, 0.0)))
    calling = threading.Thread(target=call, args=(made,))
    with made._lock:  # as another thread holds it in such a call
        kept = dict(made._sends), dict(made._workers), made._cancelled
        calling.start()
        calling.join(0.03)
        assert calling.is_alive()
        assert (made._sends, made._workers, made._cancelled) == kept
    calling.join(PATIENCE)
    assert not calling.is_alive()


def test_without_an_sdk_there_is_no_trace_context_and_nothing_fails() -> None:
    made = Spans(trace.NoOpTracerProvider().get_tracer("test"))
    assert made.begin("policy", 1, 0.0) == ""
    made.take(event(EventKind.DISPATCH, 1))
    made.take(event(EventKind.REPLY, 1, outcome=OutcomeKind.APPLIED))


@pytest.mark.parametrize(
    ("module", "package"), [("otel", "opentelemetry.context"), ("prometheus", "prometheus_client")]
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    spec = importlib.util.find_spec(f"weightsync.telemetry.{module}")
    assert spec is not None
    assert spec.loader is not None

    with pytest.raises(MissingExtraError, match=re.escape(f"pip install 'weightsync[{module}]'")):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
