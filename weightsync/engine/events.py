"""Typed events of one scheme, and the thread that gives them to callbacks. No sync waits for a callback."""

from __future__ import annotations

import contextlib
import enum
import inspect
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn, Protocol

from weightsync.clock import wall_time
from weightsync.engine.context import optional
from weightsync.errors import ConfigurationError
from weightsync.protocol.report import OutcomeKind
from weightsync.transports.process import forget_after_fork

logger = logging.getLogger("weightsync")

#: How many events may wait for the callbacks. Further ones are dropped, and counted.
CAPACITY: Final = 4096
#: The thread ends after this many seconds without an event; the next event starts another.
_IDLE_S: Final = 5.0
#: How many seconds `Events.close` waits for the callbacks to take what is queued.
_CLOSING_S: Final = 5.0


class EventKind(enum.Enum):
    """What happened."""

    #: The trainer sends a version to a worker.
    DISPATCH = "dispatch"
    #: A worker serves a version: in the trainer its ack has arrived, in the worker the version is live.
    REPLY = "reply"
    #: A worker refused a version, or the handshake, and serves what it served before.
    REFUSED = "refused"
    #: In the trainer, a worker is lost or gone; in the worker, the trainer is.
    LOST = "lost"
    #: The handshake with a worker, or in a worker with a trainer, is complete.
    JOINED = "joined"
    #: In the trainer, an answer came that was no longer awaited; in the worker, an update that was out of date.
    STALE = "stale"
    #: A wait ended at its deadline, and this worker had not answered. The version is still outstanding.
    TIMED_OUT = "timed_out"
    #: The trainer gave a version up, and this worker had not answered.
    ABANDONED = "abandoned"
    #: In the trainer, a `WorkerGroup` starts a worker that failed again.
    RESTARTED = "restarted"
    #: This side was closed.
    CLOSED = "closed"


class SyncRole(enum.Enum):
    """Which side reports an event."""

    TRAINER = "trainer"
    WORKER = "worker"


class SyncPhase(enum.Enum):
    """What the time of one version on one worker was spent on."""

    #: Extracting and packing the weights; once for all workers.
    PACK = "pack"
    #: From the dispatch until the worker was connected; 0 if it was.
    CONNECT = "connect"
    #: From the dispatch to the answer, without `CONNECT`. It includes `APPLY`.
    TRANSFER = "transfer"
    #: In the worker, from the arrival of the update to the end of its swap.
    APPLY = "apply"


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncEvent:
    """Something that happened to one version on one worker, to one worker, or to one side.

    Attributes:
        kind: what happened.
        role: which side reports it.
        model_id: the name of the model.
        time: when, in seconds since the epoch.
        incarnation: the sender's; 0 if it has none yet.
        worker: the worker's id; None if the event concerns no single worker, or if this worker does not know its id.
        version: the version, or None if the event concerns none.
        outcome: the worker's outcome, if this event decides it; otherwise None.
        reason: why, as text; empty if nothing went wrong.
        seconds: the phases that are known, in seconds.
        nbytes: for `EventKind.DISPATCH`, the size of the weights in bytes; otherwise 0.
        trace_context: the W3C trace context that the version carries; empty: none.
    """

    kind: EventKind
    role: SyncRole
    model_id: str
    time: float = field(default_factory=wall_time)
    incarnation: int = 0
    worker: int | None = None
    version: int | None = None
    outcome: OutcomeKind | None = None
    reason: str = ""
    seconds: Mapping[SyncPhase, float] = field(default_factory=dict)
    nbytes: int = 0
    trace_context: str = ""


#: Takes the events of a scheme, in a thread of their own.
Callback = Callable[[SyncEvent], object]


class Tracer(Protocol):
    """Gives each version the trace context that its updates carry."""

    def begin(self, model_id: str, version: int, pack_s: float) -> str:
        """A version is about to be sent. Called in the thread that sends it.

        Args:
            model_id: the name of the model.
            version: the version.
            pack_s: how many seconds it took to pack it.

        Returns:
            A ``traceparent``, or that, a newline and a ``tracestate``; empty: none.
        """


class SpanTracer(ABC):
    """A tracer that has spans open, and ends them when its subscription is cancelled."""

    @abstractmethod
    def end(self) -> None:
        """End what is open, and begin nothing more. Called in the thread that cancels; must not block."""


class DropCounter:
    """How many events of a scheme were dropped. A reference to it does not keep the scheme's events."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Subscription:
    """A callback of `WeightSyncScheme.on_event`.

    Args:
        events: the events of the scheme.
        callback: the callback.
        tracer: gives versions their trace context; None: this subscription gives none.

    Attributes:
        failures: how many times the callback has raised.
    """

    def __init__(self, events: Events, callback: Callback, tracer: Tracer | None = None) -> None:
        self._events = events
        self.callback = callback
        self.tracer = tracer
        self.failures = 0

    @property
    def dropped(self) -> int:
        """How many events of the scheme were dropped because its callbacks were too slow."""
        return self._events.drops.count

    def cancel(self) -> None:
        """Begin no further call of the callback, and drop its tracer, whose spans end now.

        Does not wait for a call that runs. Calling this again does nothing.
        """
        self._events.cancel(self)

    def __reduce__(self) -> NoReturn:
        """Raises ConfigurationError: a copy would belong to no scheme."""
        raise ConfigurationError(
            "a Subscription of on_event() can be neither pickled nor copied. If it is an attribute of an object that "
            "is, have that object's __getstate__() leave it out; in the other process call on_event() again."
        )


class Events:
    """The events of one scheme. Safe to use from several threads; a forked child has no callbacks."""

    def __init__(self) -> None:
        self.drops = DropCounter()
        self._reset()
        forget_after_fork(self)

    def _reset(self) -> None:
        self.drops.count = 0
        self._subscriptions: tuple[Subscription, ...] = ()
        # Not queue.Queue: the garbage collector may emit an event in a thread that holds its lock.
        # Each event goes to the callbacks that were registered when it happened.
        self._queue: queue.SimpleQueue[tuple[SyncEvent, tuple[Subscription, ...]]] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def forget(self) -> None:
        """In a forked child, which does not have the thread: have no callbacks."""
        self._reset()

    def subscribe(self, callback: Callback, tracer: Tracer | None = None) -> Subscription:
        """Call ``callback`` with each event from now on, and ask ``tracer`` for the trace context of each version.

        Raises:
            ConfigurationError: it cannot be called, or is an async function; or so is the tracer's ``begin()``.
        """
        if not callable(callback):
            raise ConfigurationError(f"on_event() was given {callback!r}: give a function that takes a SyncEvent.")
        if inspect.iscoroutinefunction(callback) or inspect.iscoroutinefunction(type(callback).__call__):
            raise ConfigurationError(
                f"on_event() was given {callback!r}, an async function: a call of it does not run its body. Give a "
                "plain function that takes a SyncEvent."
            )
        begin = optional(tracer, "begin")
        if tracer is not None and (not callable(begin) or inspect.iscoroutinefunction(begin)):
            raise ConfigurationError(
                f"on_event(tracer=) was given {tracer!r}: give an object with a Tracer's begin(), a plain method."
            )
        subscription = Subscription(self, callback, tracer)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def cancel(self, subscription: Subscription) -> None:
        """See `Subscription.cancel`."""
        with self._lock:
            self._subscriptions = tuple(each for each in self._subscriptions if each is not subscription)
        if isinstance(subscription.tracer, SpanTracer):
            subscription.tracer.end()

    @property
    def have_callbacks(self) -> bool:
        """Whether a callback is registered."""
        return bool(self._subscriptions)

    @property
    def tracer(self) -> Tracer | None:
        """Gives versions their trace context: the newest that is subscribed. None if they carry none."""
        return next((each.tracer for each in reversed(self._subscriptions) if each.tracer is not None), None)

    def emit(self, event: SyncEvent) -> None:
        """Queue an event for the callbacks. Never blocks; if the queue is full, the event is dropped."""
        subscriptions = self._subscriptions
        if not subscriptions or self._closed:
            return
        if self._queue.qsize() >= CAPACITY:
            self._drop(1)
            return
        self._queue.put((event, subscriptions))
        with self._lock:
            if self._thread is None:
                self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._deliver, name="weightsync-events", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            logger.error("the thread for event callbacks cannot be started (%s): their events wait", error)

    def _drop(self, count: int) -> None:
        with self._lock:
            before = self.drops.count
            after = self.drops.count = before + count
        if before == 0 or before // CAPACITY != after // CAPACITY:
            logger.warning("%d events were dropped: a callback of on_event() is too slow", after)

    def _deliver(self) -> None:
        event: SyncEvent | None = None
        while not self._should_end(event):
            try:
                event, subscriptions = self._queue.get(timeout=_IDLE_S)
            except queue.Empty:
                event = None
                continue
            for subscription in subscriptions:
                if subscription in self._subscriptions:  # it may have been cancelled meanwhile
                    _run_callback(subscription, event)

    def _should_end(self, last_event: SyncEvent | None) -> bool:
        """Whether the thread ends: nothing is queued, and a side was closed, or nothing came for a while."""
        with self._lock:
            more_may_come = last_event is not None and last_event.kind is not EventKind.CLOSED and not self._closed
            if more_may_come or not self._queue.empty():
                return False
            self._thread = None
            return True

    def close(self) -> None:
        """End the thread, once the callbacks have handled the queued events; events left after 5 s are dropped."""
        self._closed = True
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(_CLOSING_S)
        if thread.is_alive():
            logger.warning("a callback of on_event() still runs: its thread ends when it returns")
            self._drop(self._empty_queue())

    def _empty_queue(self) -> int:
        """Empty the queue; returns how many events were in it."""
        count = 0
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                return count
            count += 1


class OnDemandEvents:
    """The events of one scheme, which begin with its first callback: until then its two sides report nothing."""

    def __init__(self) -> None:
        self._events: Events | None = None
        #: What has each side that was initialised report its events.
        self._sides: list[Callable[[Events], None]] = []
        #: Held while the first callback is registered, so that only one thread makes the events.
        self._first_callback = threading.RLock()

    def subscribe(self, callback: Callback, tracer: Tracer | None) -> Subscription:
        """See `WeightSyncScheme.on_event`."""
        with self._first_callback:
            events = self._events or Events()
            subscription = events.subscribe(callback, tracer)
            if self._events is None:
                self._events = events
                for report_to in self._sides:
                    report_to(events)
        return subscription

    def subscription_of(self, callback: Callback) -> Subscription | None:
        """The first subscription of a callback that was not cancelled; None: there is none."""
        subscriptions = () if self._events is None else self._events._subscriptions
        return next((each for each in subscriptions if each.callback == callback), None)

    @contextlib.contextmanager
    def reported_by(self, report_to: Callable[[Events], None]) -> Iterator[None]:
        """Initialise a side inside; unless an exception leaves the block, it also reports to later callbacks.

        Args:
            report_to: has the side report its events.
        """
        events = self._events
        if events is not None:
            report_to(events)
        yield
        with self._first_callback:
            if events is None and self._events is not None:  # a callback was registered meanwhile
                report_to(self._events)
            self._sides.append(report_to)

    def emit(self, event: SyncEvent) -> None:
        """Queue an event for the callbacks, if there are any."""
        if self._events is not None:
            self._events.emit(event)

    def close(self) -> None:
        """See `Events.close`."""
        if self._events is not None:
            self._events.close()


def _run_callback(subscription: Subscription, event: SyncEvent) -> None:
    try:
        subscription.callback(event)
    except BaseException:  # sys.exit() in a callback ends neither the thread nor the events
        subscription.failures += 1
        logger.exception("a callback of on_event() failed on %s; the sync is not affected", event.kind.value)
