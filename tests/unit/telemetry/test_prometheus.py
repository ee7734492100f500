"""Prometheus: a scraped page shows what happened to each worker, even in a run in which one is killed."""

from __future__ import annotations

import gc
import threading
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import PATIENCE, Crew, crew, join, receive, serve, small  # noqa: F401 - a fixture
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from weightsync import (
    ConfigurationError,
    EventKind,
    MultiProcessWeightSyncScheme,
    OutcomeKind,
    SyncEvent,
    SyncPhase,
    SyncRole,
    WeightStrategy,
)
from weightsync.telemetry.prometheus import Metrics

Page = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Counted:
    """Metrics, and the page that their registry generates."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)

    def text(self) -> str:
        return generate_latest(self.registry).decode()

    def page(self) -> Page:
        """The page as Prometheus parses it: the value of each sample, by its name and labels."""
        families = text_string_to_metric_families(self.text())
        return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


class Scraped(Counted):
    """Metrics whose page is scraped over HTTP."""

    def __init__(self) -> None:
        super().__init__()
        self._server, self._thread = start_http_server(0, "127.0.0.1", self.registry)

    def text(self) -> str:
        address = f"http://127.0.0.1:{self._server.server_port}/metrics"
        with urllib.request.urlopen(address, timeout=PATIENCE) as page:
            text: str = page.read().decode()
        return text

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    made = Scraped()
    yield made
    made.end()


@pytest.fixture
def counted() -> Counted:
    return Counted()


def sample(page: Page, name: str, **labels: Any) -> float | None:
    """The value of a sample; None if the page lacks it."""
    return page.get((name, frozenset((key, str(value)) for key, value in labels.items())))


def test_a_scraped_page_follows_a_run_in_which_a_worker_is_killed(crew: Crew, scraped: Scraped) -> None:  # noqa: F811
    workers = crew.start(MultiProcessWeightSyncScheme(), 2)
    arrived, seen = threading.Condition(), []

    def note(event: SyncEvent) -> None:
        with arrived:
            seen.append(event.kind)
            arrived.notify_all()

    scheme, model = MultiProcessWeightSyncScheme(), small()
    scraped.metrics.watch(scheme)
    scheme.on_event(note)  # called after the metrics are updated
    scheme.init_on_sender(
        "actor", pipes=[each.pipe for each in workers], processes=[each.process for each in workers], model=model
    )
    sender = scheme.get_sender()
    for each in workers:
        each.do(_join_actor)
    for version in (1, 2):
        for each in workers:
            each.tell(serve, version)
        assert sender.send(timeout=PATIENCE).ok
        for each in workers:
            each.answer()
    with arrived:
        assert arrived.wait_for(lambda: seen.count(EventKind.REPLY) == 4, PATIENCE)
    before = scraped.page()
    workers[1].kill()
    workers[0].tell(receive)
    report = sender.send(timeout=PATIENCE, on_failure="report")
    workers[0].answer()
    with arrived:
        assert arrived.wait_for(lambda: EventKind.LOST in seen and seen.count(EventKind.REPLY) == 5, PATIENCE)
    after = scraped.page()
    scheme.close()

    served = {"model": "actor", "role": "trainer"}
    assert [sample(before, "weightsync_served_version", worker=each, **served) for each in (0, 1)] == [2, 2]
    assert sample(before, "weightsync_workers", model="actor") == 2
    assert [sample(after, "weightsync_served_version", worker=each, **served) for each in (0, 1)] == [3, None]
    assert [sample(after, "weightsync_staleness_versions", model="actor", worker=each) for each in (0, 1)] == [0, None]
    assert sample(after, "weightsync_workers", model="actor") == 1
    assert sample(after, "weightsync_sent_version", model="actor") == 3
    assert sample(after, "weightsync_outcomes_total", model="actor", outcome="applied") == 5
    assert (
        sample(after, "weightsync_outcomes_total", model="actor", outcome="lost")
        == len(report.of(OutcomeKind.LOST))
        == 1
    )
    assert sample(after, "weightsync_phase_seconds_count", phase="pack", **served) == 3
    assert sample(after, "weightsync_phase_seconds_count", phase="apply", **served) == 5
    assert (sample(before, "weightsync_bytes_total", model="actor") or 0) == 4 * report.nbytes
    assert sample(after, "weightsync_dropped_events_total") == 0


def _join_actor(setup: Any) -> None:
    setup.model = small()
    setup.scheme.init_on_worker("actor", pipe=setup.pipe, model=setup.model)
    setup.receiver = setup.scheme.get_receiver()


def event(kind: EventKind, version: int | None = None, worker: int | None = 0, **more: Any) -> SyncEvent:
    more = {"role": SyncRole.TRAINER, "model_id": "policy", **more}
    return SyncEvent(kind=kind, version=version, worker=worker, **more)


def test_the_staleness_of_a_worker_that_does_not_answer_grows_with_each_version(counted: Counted) -> None:
    for worker in (0, 1):
        counted.metrics.take(event(EventKind.JOINED, worker=worker))
    for version in (1, 2, 3):
        counted.metrics.take(event(EventKind.DISPATCH, version, 0, nbytes=8, seconds={SyncPhase.PACK: 1.0}))
        counted.metrics.take(event(EventKind.DISPATCH, version, 1, nbytes=8, seconds={SyncPhase.PACK: 1.0}))
        counted.metrics.take(event(EventKind.REPLY, version, 0, outcome=OutcomeKind.APPLIED))
        counted.metrics.take(event(EventKind.TIMED_OUT, version, 1, outcome=OutcomeKind.TIMED_OUT))
    page = counted.page()

    assert [sample(page, "weightsync_staleness_versions", model="policy", worker=each) for each in (0, 1)] == [0, 3]
    assert sample(page, "weightsync_outcomes_total", model="policy", outcome="timed_out") == 3
    assert sample(page, "weightsync_bytes_total", model="policy") == 48
    assert sample(page, "weightsync_phase_seconds_sum", model="policy", role="trainer", phase="pack") == 3


def test_the_values_of_a_closed_sender_stay_until_the_next_sender_replaces_them(counted: Counted) -> None:
    first, second = {"incarnation": 10}, {"incarnation": 11}
    for worker, version in ((0, 1), (1, 1), (0, 2), (1, 2)):
        counted.metrics.take(event(EventKind.DISPATCH, version, worker, **first))
        counted.metrics.take(event(EventKind.REPLY, version, worker, outcome=OutcomeKind.APPLIED, **first))
    counted.metrics.take(event(EventKind.CLOSED, worker=None, **first))
    closed = counted.page()
    counted.metrics.take(event(EventKind.JOINED, **second))
    counted.metrics.take(event(EventKind.DISPATCH, 1, **second))
    counted.metrics.take(event(EventKind.LOST, **first))  # another scheme of this model, which is taken over
    again = counted.page()

    names = ("weightsync_sent_version", "weightsync_workers")
    assert [sample(closed, name, model="policy") for name in names] == [2, 0]
    assert sample(closed, "weightsync_staleness_versions", model="policy", worker=0) == 0
    assert [sample(again, name, model="policy") for name in names] == [1, 1]
    assert [sample(again, "weightsync_staleness_versions", model="policy", worker=each) for each in (0, 1)] == [1, None]
    served = {"model": "policy", "role": "trainer"}
    assert [sample(closed, "weightsync_served_version", worker=each, **served) for each in (0, 1)] == [2, 2]
    assert [sample(again, "weightsync_served_version", worker=each, **served) for each in (0, 1)] == [None, None]


def test_events_of_a_worker_are_counted_under_the_worker_role(counted: Counted) -> None:
    of_worker: Any = {"role": SyncRole.WORKER, "worker": 7}
    counted.metrics.take(
        event(EventKind.REPLY, 4, outcome=OutcomeKind.APPLIED, seconds={SyncPhase.APPLY: 0.5}, **of_worker)
    )
    for stale in (2, 3):
        counted.metrics.take(event(EventKind.STALE, stale, **of_worker))
    page = counted.page()

    assert sample(page, "weightsync_served_version", model="policy", role="worker", worker=7) == 4
    assert sample(page, "weightsync_phase_seconds_sum", model="policy", role="worker", phase="apply") == 0.5
    assert sample(page, "weightsync_stale_total", model="policy", role="worker") == 2


def test_restarts_are_counted_per_worker_and_kept_after_another_loss(counted: Counted) -> None:
    for worker in (0, 1, 0):
        counted.metrics.take(event(EventKind.LOST, worker=worker))
        counted.metrics.take(event(EventKind.RESTARTED, worker=worker, reason="its process was ended by SIGKILL"))
        counted.metrics.take(event(EventKind.JOINED, worker=worker))
    counted.metrics.take(event(EventKind.LOST, worker=0))
    page = counted.page()

    assert [sample(page, "weightsync_restarts_total", model="policy", worker=each) for each in (0, 1, 2)] == [
        2,
        1,
        None,
    ]
    assert sample(page, "weightsync_workers", model="policy") == 1


def test_dropped_events_are_summed_over_all_watched_schemes(counted: Counted) -> None:
    schemes = [MultiProcessWeightSyncScheme() for _ in range(2)]
    for count, scheme in enumerate(schemes, start=2):
        subscription = counted.metrics.watch(scheme)
        subscription._events.drops.count = count

    assert sample(counted.page(), "weightsync_dropped_events_total") == 5


def test_dropped_events_of_a_scheme_watched_again_after_cancelling_are_counted_once(counted: Counted) -> None:
    scheme = MultiProcessWeightSyncScheme()
    counted.metrics.watch(scheme).cancel()
    counted.metrics.watch(scheme)._events.drops.count = 2

    assert sample(counted.page(), "weightsync_dropped_events_total") == 2


def test_watching_a_scheme_again_returns_the_same_subscription(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = MultiProcessWeightSyncScheme()
    watched = counted.metrics.watch(scheme)
    with monkeypatch.context() as unused:  # two subscriptions would count the events before one is cancelled
        unused.setattr(scheme, "on_event", None)
        assert counted.metrics.watch(scheme) is watched
    scheme.emit(event(EventKind.DISPATCH, 1, nbytes=5))
    scheme.close()  # afterwards all callbacks have run
    assert sample(counted.page(), "weightsync_bytes_total", model="policy") == 5

    watched.cancel()
    assert counted.metrics.watch(scheme) is not watched


def test_a_scheme_that_two_threads_watch_at_once_is_counted_once(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = MultiProcessWeightSyncScheme()
    subscribe = scheme.on_event
    others: list[Any] = []

    def on_event(callback: Callable[[SyncEvent], object]) -> Any:
        others.append(subscribe(callback))  # the other thread was faster
        return subscribe(callback)

    monkeypatch.setattr(scheme, "on_event", on_event)
    assert [counted.metrics.watch(scheme)] == others
    scheme.emit(event(EventKind.DISPATCH, 1, nbytes=5))
    scheme.close()  # afterwards all callbacks have run
    assert sample(counted.page(), "weightsync_bytes_total", model="policy") == 5


def test_dropped_events_of_garbage_collected_schemes_are_still_counted(counted: Counted) -> None:
    for count in range(1, 4):
        events = counted.metrics.watch(MultiProcessWeightSyncScheme())._events
        events.drops.count = count
        gone = weakref.ref(events)
        del events
        gc.collect()
        assert gone() is None
    counted.metrics.watch(MultiProcessWeightSyncScheme())

    assert sample(counted.page(), "weightsync_dropped_events_total") == 1 + 2 + 3
    assert len(counted.metrics._watched) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda counted: counted.metrics.watch(MultiProcessWeightSyncScheme()),
        Counted.text,
        lambda counted: counted.metrics.take(event(EventKind.JOINED)),
    ],
    ids=["watch", "scrape", "event"],
)
def test_metrics_are_read_and_changed_by_one_thread_at_a_time(
    counted: Counted, call: Callable[[Counted], object]
) -> None:
    calling = threading.Thread(target=call, args=(counted,))
    with counted.metrics._lock:  # as another thread holds it in such a call
        calling.start()
        calling.join(0.03)
        assert calling.is_alive()
        assert not counted.metrics._watched
    calling.join(PATIENCE)
    assert not calling.is_alive()


@pytest.mark.parametrize("value", [None, 3, MultiProcessWeightSyncScheme, WeightStrategy()])
def test_watch_refuses_objects_that_are_not_schemes(counted: Counted, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^Metrics.watch\(\) was given .*: give the scheme"):
        counted.metrics.watch(value)


def test_metrics_refuse_a_scheme_in_place_of_a_registry() -> None:
    with pytest.raises(ConfigurationError, match=r"give a CollectorRegistry.* A scheme is given to watch\(\)"):
        Metrics(MultiProcessWeightSyncScheme())  # type: ignore[arg-type]


def test_a_second_set_of_metrics_in_one_registry_raises(counted: Counted) -> None:
    with pytest.raises(ValueError, match="Duplicated"):
        Metrics(counted.registry)
