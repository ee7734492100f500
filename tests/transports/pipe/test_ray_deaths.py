"""The death of an actor ends the calls in transit to it; tested without a cluster, so that every run includes it."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from skipping import not_tested
from torch import nn
from unpicklable import NotUnpickled

from weightsync import (
    ConfigurationError,
    RayModuleTransformScheme,
    RayWeightSyncScheme,
    State,
    StateError,
    TransportError,
    WeightSyncActor,
)
from weightsync.protocol.codec import encode
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal, Update
from weightsync.protocol.report import Evidence
from weightsync.schemes import ray_server
from weightsync.testing import FakeClock
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import EARLY, PATIENCE_FOR_ORDER, UNKNOWN, CallLink, ClosedByPeer
from weightsync.transports.calls.server import Parcel
from weightsync.transports.calls.waiting import AskingClient
from weightsync.transports.calls.without_receiver import ack
from weightsync.transports.ray import client as module
from weightsync.transports.ray import server, session

try:
    import ray
    import ray.exceptions
except ImportError:
    ray = None

UPDATE = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=3)


class Session:
    """A fake of this process's connection to Ray."""

    def __init__(self, peer: str) -> None:
        del peer

    def require(self) -> Any:
        return ray


class ActorWatch:
    """A fake actor watch that records calls and delayed functions."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []
        self.watched: set[Future[Any]] = set()

    def watch(self, call: Future[Any], peer: str) -> None:
        del peer
        self.watched.add(call)
        call.add_done_callback(self.watched.discard)

    def leave(self, call: Future[Any]) -> None:
        self.watched.discard(call)

    def call_soon(self, act: Callable[[], None]) -> None:
        self.later.append(act)


class FakeObjectCache:
    """A fake of cached objects, without an object store."""

    def of(self, incarnation: int) -> FakeObjectCache:
        del incarnation
        return self

    def put(self, update: Update, payload: Buffer | None) -> bytes:
        del update, payload
        return b"a reference"

    def forget(self, version: int) -> None:
        del version


class Actor:
    """A fake actor, and its method, whose calls the test ends."""

    def __init__(self) -> None:
        self.calls: list[Future[Any]] = []
        self.full = False

    def remote(self, *_: Any) -> Actor:
        if self.full:
            raise ray.exceptions.PendingCallsLimitExceeded("more than 2 tasks are queued on the actor")
        self.calls.append(Future())
        return self

    def future(self) -> Future[Any]:
        return self.calls[-1]


def with_our_receiver(actor: Actor) -> Any:
    return module.ActorCallClient(actor, "m", "worker 0", FakeObjectCache())  # type: ignore[arg-type]


def without(actor: Actor) -> Any:
    return module.PlainActorCallClient(actor.remote, "worker 0", FakeObjectCache())  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> ActorWatch:
    if ray is None:
        not_tested("RAY", "ray is not installed")
    monkeypatch.setattr(module, "Session", Session)
    watch = ActorWatch()
    monkeypatch.setattr(module, "ACTOR_WATCH", watch)
    monkeypatch.setattr(module, "keep_if_ray_ended", lambda row: None)
    return watch


@pytest.mark.parametrize("call_client", [with_our_receiver, without])
@pytest.mark.parametrize("died", ["ActorDiedError", "ActorUnavailableError", "RayActorError", "WorkerCrashedError"])
def test_g10_an_actor_that_dies_while_it_is_called_ends_its_link(
    call_client: Callable[[Actor], Any], died: str
) -> None:
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(call_client(actor), "worker 0")
    link.send(UPDATE, buffer)
    (call,) = actor.calls
    assert link.receive() == []
    error = getattr(ray.exceptions, died)
    call.set_exception(error("the actor is gone", None) if died == "ActorUnavailableError" else error())

    with pytest.raises(TransportError, match="worker 0 did not return"):
        link.receive()
    assert not buffer.pinned
    link.close()


def raised_with_parts() -> Exception:
    """The error that Ray raises in the trainer if an actor raises `NotUnpickled`."""
    error = ray.exceptions.RayTaskError(
        "update", "Traceback ...\nNotUnpickled: not for me", NotUnpickled("not for me", 2), "ray::update", 1, "there"
    )
    found: Exception = ray.exceptions.RayError.from_bytes(error.to_bytes())
    return found


def test_a_receiver_whose_exception_cannot_be_unpickled_ends_its_link_for_that_reason() -> None:
    actor = Actor()
    answers = with_our_receiver(actor).start(UPDATE, None)

    actor.calls[0].set_exception(raised_with_parts())

    with pytest.raises(TransportError, match=r"^worker 0 ended its link: NotUnpickled: not for me$"):
        answers.result(timeout=0)


@pytest.mark.parametrize("returned", [True, False])
def test_a_method_whose_result_or_error_cannot_be_unpickled_refuses_and_is_not_lost(returned: bool) -> None:
    actor = Actor()
    answers = without(actor).start(UPDATE, None)

    unread = ray.exceptions.RaySystemError(TypeError("no part"), "Traceback ...\nTypeError: no part")
    actor.calls[0].set_exception(unread if returned else raised_with_parts())

    refusal = answers.result(timeout=0)[0]
    assert isinstance(refusal, Refusal)
    assert refusal.reason.endswith("TypeError: no part" if returned else "NotUnpickled: not for me")
    assert refusal.evidence is Evidence.CALL
    assert refusal.remote_traceback


def test_the_reason_of_an_exception_group_is_its_last_exception() -> None:
    actor = Actor()
    answers = without(actor).start(UPDATE, None)
    group = ExceptionGroup("both", [ValueError("not for me"), TypeError("nor for you")])
    trace = "".join(traceback.format_exception(group))

    actor.calls[0].set_exception(ray.exceptions.RayTaskError("update", trace, group, "ray::update", 1, "there"))

    assert trace.rstrip().endswith("---")
    assert answers.result(timeout=0)[0].reason == "TypeError: nor for you"


@pytest.mark.parametrize("raised", [StopIteration, StopAsyncIteration])
def test_a_method_that_raises_stop_iteration_refuses_and_its_actor_is_not_lost(raised: type[Exception]) -> None:
    """Ray raises the actor's error inside a generator, which wraps it in a RuntimeError."""
    actor = Actor()
    answers = without(actor).start(UPDATE, None)
    reason = f"{raised.__name__}: for good"
    error = ray.exceptions.RayTaskError("update", f"Traceback ...\n{reason}", raised(), "ray::update", 1, "there")
    wrapped = RuntimeError(f"generator raised RayTaskError({raised.__name__})")
    wrapped.__cause__ = error.as_instanceof_cause()

    actor.calls[0].set_exception(wrapped)

    refusal = answers.result(timeout=0)[0]
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.evidence) == (reason, Evidence.CALL)
    assert refusal.remote_traceback.endswith(reason)


def test_an_actor_that_could_not_be_started_is_lost() -> None:
    actor = Actor()
    answers = without(actor).start(UPDATE, None)

    actor.calls[0].set_exception(ray.exceptions.RaySystemError("the worker process failed to start"))

    with pytest.raises(TransportError, match="did not return: System error: the worker process failed to start"):
        answers.result(timeout=0)


def test_the_reason_of_a_dead_actor_is_one_line() -> None:
    """Reports, and log lines about them, contain the reason of each lost actor."""
    died = "The actor died.\n\tclass_name: Rollout\n\tpid: 7\n\tip: 192.0.2.2\nIt was killed by `ray.kill`."

    said = session.plain(died)

    assert said == "The actor died (class_name: Rollout, pid: 7, ip: 192.0.2.2). It was killed by `ray.kill`."


@pytest.mark.parametrize("call_client", [with_our_receiver, without])
def test_weights_sent_to_a_dead_actor_are_freed_with_its_link(call_client: Callable[[Actor], Any]) -> None:
    """They must not wait for the garbage collector, which may not run for hours in some programs."""
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(call_client(actor), "worker 0")
    link.send(UPDATE, buffer)
    sent = weakref.ref(buffer)
    del buffer
    gc.disable()
    try:
        actor.calls.pop().set_exception(ray.exceptions.ActorDiedError())
        with pytest.raises(TransportError, match="worker 0 did not return"):
            link.receive()
        link.close()
        del link

        assert sent() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("call_client", [with_our_receiver, without])
def test_an_actor_whose_queue_is_full_refuses_and_takes_the_next_version(call_client: Callable[[Actor], Any]) -> None:
    """The actor has reached its ``max_pending_calls``, and is alive."""
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(call_client(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    for call in actor.calls:
        call.set_result([])
    link.receive()
    actor.full = True

    link.send(UPDATE, buffer)

    (received,) = link.receive()
    refusal = received.message
    assert isinstance(refusal, Refusal)
    assert (refusal.version, refusal.evidence) == (1, Evidence.NONE)
    assert "more than 2 tasks are queued" in refusal.reason
    assert not buffer.pinned
    actor.full = False
    calls = len(actor.calls)
    link.send(replace(UPDATE, version=2), buffer)
    assert len(actor.calls) == calls + 1
    assert link.receive() == []
    actor.calls[-1].set_result([])
    link.close()


def test_a_handshake_waits_while_the_actors_queue_is_full_and_versions_never_overtake_it(watch: ActorWatch) -> None:
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    actor.full = True
    link.send(Hello(model_id="m", incarnation=1))
    watch.later.pop()()
    assert link.receive() == []
    actor.full = False
    link.send(UPDATE, buffer)
    assert not actor.calls

    watch.later.pop()()
    link.send(replace(UPDATE, version=2), buffer)

    handshake, update = actor.calls
    handshake.set_result([])
    update.set_result([encode(ack(replace(UPDATE, version=2)))])
    refusal, acked = [received.message for received in link.receive()]
    assert isinstance(refusal, Refusal)
    assert (refusal.version, refusal.evidence) == (1, Evidence.NONE)
    assert acked == ack(replace(UPDATE, version=2))
    assert not watch.later
    link.close()


@pytest.mark.parametrize("use", ["start", "close"])
def test_a_held_handshake_may_be_taken_by_another_thread_during_start_or_close(watch: ActorWatch, use: str) -> None:
    class Client(module.ActorCallClient):
        """A client whose held handshake another thread makes right after each read of ``_held``."""

        @property
        def _held(self) -> Any:
            held, self.__dict__["_held"] = self.__dict__["_held"], None
            return held

        @_held.setter
        def _held(self, held: Any) -> None:
            self.__dict__["_held"] = held

    actor = Actor()
    actor.full = True
    client = Client(actor, "m", "worker 0", FakeObjectCache())  # type: ignore[arg-type]
    client.__dict__["_held"] = None
    handshake = client.start(Hello(model_id="m", incarnation=1), None)
    if use == "start":
        assert isinstance(client.start(UPDATE, None).result(timeout=0)[0], Refusal)
    else:
        client.close()
        with pytest.raises(TransportError, match="more than 2 tasks are queued"):
            handshake.result(timeout=0)
    watch.later.clear()


def test_a_handshake_waiting_for_room_is_not_begun_after_its_link_is_closed(watch: ActorWatch) -> None:
    actor = Actor()
    actor.full = True
    call_client = with_our_receiver(actor)
    answers = call_client.start(Hello(model_id="m", incarnation=1), None)
    call_client.close()
    assert answers.done()
    actor.full = False

    watch.later.pop()()

    assert not actor.calls
    assert not watch.later


def test_an_actor_with_a_full_queue_is_asked_for_its_receiver_once_it_has_room(watch: ActorWatch) -> None:
    actor = Actor()
    actor.full = True
    found = with_our_receiver(actor).ask_models(SimpleNamespace(__ray_call__=actor))
    watch.later.pop()()
    assert not found.done()
    actor.full = False

    watch.later.pop()()

    actor.calls[0].set_result(["m"])
    assert found.result() == ["m"]
    assert not watch.later


def asking(actor: Actor) -> CallLink:
    """A link to an actor that has not answered yet whether it has a weightsync receiver."""
    ours, asked = with_our_receiver(actor), SimpleNamespace(__ray_call__=actor)
    return CallLink(AskingClient("m", lambda: ours.ask_models(asked), ours, without(actor)), "worker 0")


def test_closing_a_link_ends_the_watch_of_an_actor_asked_for_its_receiver(watch: ActorWatch) -> None:
    link = asking(Actor())
    link.send(UPDATE, Buffer(3))
    assert watch.watched

    link.close()

    assert not watch.watched


@pytest.mark.parametrize("full", [True, False])
def test_an_actor_is_not_asked_for_its_receiver_again_after_the_link_is_closed(watch: ActorWatch, full: bool) -> None:
    actor, buffer = Actor(), Buffer(3)
    actor.full = full
    link = asking(actor)
    link.send(UPDATE, buffer)
    if not full:
        actor.calls[0].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
    watch.later.pop()()
    link.close()
    if not full:
        actor.calls[1].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
    calls = len(actor.calls)

    watch.later.pop()()

    assert not watch.later
    assert not watch.watched
    assert len(actor.calls) == calls
    assert not buffer.pinned


def test_weights_are_freed_if_the_actor_is_not_asked_again_and_nothing_else_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of the actor watch has already ended when Ray reports that it restarts the actor."""
    real = session.ActorWatch()
    monkeypatch.setattr(module, "ACTOR_WATCH", real)
    monkeypatch.setattr(session, "require_ray", lambda _: SimpleNamespace(is_initialized=lambda: True))
    actor, buffer = Actor(), Buffer(3)
    link = asking(actor)
    link.send(UPDATE, buffer)
    thread = real._thread
    link.close()
    assert thread is not None
    thread.join(60.0)

    actor.calls[0].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))

    thread = real._thread
    assert thread is not None
    thread.join(60.0)
    assert not buffer.pinned
    assert len(actor.calls) == 1


def test_all_messages_fail_if_the_actor_could_not_be_asked_for_its_receiver() -> None:
    """Otherwise its goodbye would wait forever for the answer, and so would the goodbyes of older links."""

    def ask() -> Future[Any]:
        raise TransportError("no call was accepted")

    actor = Actor()
    client = AskingClient("m", ask, with_our_receiver(actor), without(actor))
    for message in (Hello(model_id="m", incarnation=1), Bye(model_id="m", incarnation=1)):
        with pytest.raises(TransportError, match="no call was accepted"):
            client.start(message, None)


def test_a_handshake_is_repeated_while_ray_restarts_the_actor(watch: ActorWatch) -> None:
    actor = Actor()
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    for number in range(2):
        actor.calls[number].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
        assert link.receive() == []
        watch.later.pop()()
    link.close()
    actor.calls[2].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))

    assert not watch.later
    assert len(actor.calls) == 3


@pytest.mark.parametrize("early", [True, False])
def test_a_call_that_was_repeated_a_thousand_times_still_ends(watch: ActorWatch, early: bool) -> None:
    actor = Actor()
    answers = with_our_receiver(actor).start(Hello(model_id="m", incarnation=1), None)
    for _ in range(1000):
        if early:
            actor.calls[-1].set_result([EARLY + b"earlier calls have not arrived"])
        else:
            actor.calls[-1].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
            watch.later.pop()()

    actor.calls[-1].set_result([])

    assert answers.done()
    assert answers.result() == []


def test_a_call_that_is_to_be_repeated_waits_while_the_actors_queue_is_full(watch: ActorWatch) -> None:
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    actor.calls[0].set_result([])
    link.send(UPDATE, buffer)
    actor.full = True

    actor.calls[1].set_result([EARLY + b"earlier calls have not arrived"])
    watch.later.pop()()

    assert link.receive() == []
    actor.full = False
    watch.later.pop()()
    assert len(actor.calls) == 3
    actor.calls[2].set_result([encode(ack(UPDATE))])
    assert [received.message for received in link.receive()] == [ack(UPDATE)]
    assert not watch.later
    link.close()


@pytest.mark.parametrize("dies", [True, False])
def test_a_plain_actor_is_given_one_version_at_a_time(dies: bool) -> None:
    """In an async or threaded actor, the older version could be the last to go live."""
    actor = Actor()
    call_client = without(actor)
    first, second, third = (call_client.start(replace(UPDATE, version=version), None) for version in (1, 2, 3))
    assert len(actor.calls) == 1

    actor.calls[0].set_result(None)

    assert first.done()
    assert len(actor.calls) == 2
    if dies:
        actor.calls[1].set_exception(ray.exceptions.ActorDiedError())
        assert isinstance(second.exception(), TransportError)
        assert len(actor.calls) == 3
        return
    actor.calls[1].set_result(None)
    assert not third.done()
    actor.calls[2].set_result(None)
    assert [answers.result()[0].version for answers in (first, second, third)] == [1, 2, 3]


def test_a_closed_link_to_a_plain_actor_begins_no_waiting_call() -> None:
    """The actor's next link may have delivered a newer version in the meantime."""
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(without(actor), "worker 0")
    for version in (1, 2, 3):
        link.send(replace(UPDATE, version=version), buffer)
    link.close()

    actor.calls[0].set_result(None)

    assert len(actor.calls) == 1
    assert not buffer.pinned


def test_a_closed_link_begins_no_call_that_waits_for_the_answer_about_a_receiver() -> None:
    actor, buffer, found = Actor(), Buffer(3), Future[Any]()
    link = CallLink(AskingClient("m", lambda: found, with_our_receiver(actor), without(actor)), "worker 0")
    link.send(UPDATE, buffer)
    link.close()

    found.set_result([])

    assert not actor.calls
    assert not buffer.pinned


@pytest.mark.parametrize("met", [True, False])
def test_an_unknown_link_means_a_restarted_actor_only_if_the_actor_had_answered_on_it(met: bool) -> None:
    """If the link has not met the actor, the call has overtaken the handshake and is repeated."""
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    if met:
        actor.calls[0].set_result([])
    link.send(UPDATE, buffer)

    actor.calls[1].set_result([UNKNOWN + b"the actor was restarted"])

    if met:
        with pytest.raises(TransportError, match="was restarted"):
            link.receive()
    else:
        assert link.receive() == []
    assert len(actor.calls) == (2 if met else 3)
    link.close()


def test_an_update_that_overtakes_its_handshake_is_repeated_for_a_limited_time_after_the_actor_has_started() -> None:
    """Regression: the time in which the actor starts counted too, and the worker was lost as restarted."""
    with FakeClock() as clock:
        actor, buffer, link = sent_behind_a_handshake()
        clock.advance(2 * PATIENCE_FOR_ORDER)

        actor.calls[1].set_result([UNKNOWN + b"the actor was restarted"])

        assert link.receive() == []
        assert buffer.pinned
        clock.advance(PATIENCE_FOR_ORDER)
        actor.calls[2].set_result([UNKNOWN + b"the actor was restarted"])
        with pytest.raises(TransportError, match="was restarted"):
            link.receive()
        assert len(actor.calls) == 3
        link.close()


def test_a_goodbye_is_not_repeated_if_its_handshake_was_not_delivered(watch: ActorWatch) -> None:
    """Each repetition would hold the actor's event loop, which waits for the handshake, for a minute in all."""
    actor = Actor()
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    link.send(Bye(model_id="m", incarnation=1))
    handshake, goodbye = actor.calls
    handshake.set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
    link.close()
    watch.later.pop()()

    goodbye.set_result([UNKNOWN + b"the actor was restarted"])

    assert len(actor.calls) == 2
    assert not watch.later


def test_a_call_waiting_for_a_lost_call_is_repeated_with_the_lost_calls_number() -> None:
    """Without the numbers of lost calls, the actor would send the call back again and again for a minute."""

    class Recording(Actor):
        lost: list[Any]

        def remote(self, *arguments: Any) -> Actor:
            self.lost = [*vars(self).get("lost", []), arguments[-1]]
            return super().remote()

    actor, buffer = Recording(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    for version in (1, 2):
        link.send(replace(UPDATE, version=version), buffer)
    actor.calls[0].set_exception(ray.exceptions.ObjectLostError("00", "an address", "a call site"))
    actor.calls[1].set_result([EARLY + b"earlier calls have not arrived"])

    assert actor.lost == [(), (), (0,)]
    actor.calls[2].set_result([encode(ack(replace(UPDATE, version=2)))])
    assert [type(received.message) for received in link.receive()] == [Refusal, Ack]
    link.close()


def sent_behind_a_handshake() -> tuple[Actor, Buffer, CallLink]:
    """A link with an update sent right after the handshake, neither of which the actor has answered."""
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    link.send(UPDATE, buffer)
    return actor, buffer, link


def test_an_update_after_a_handshake_is_repeated_once_after_it_if_the_actor_restarts() -> None:
    actor, buffer, link = sent_behind_a_handshake()
    handshake, update = actor.calls

    update.set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))

    assert link.receive() == []
    assert buffer.pinned
    handshake.set_result([])
    assert link.receive() == []
    (repeated,) = actor.calls[2:]
    repeated.set_exception(ray.exceptions.ActorUnavailableError("it is being restarted again", None))
    with pytest.raises(TransportError, match="restarted again"):
        link.receive()
    assert not buffer.pinned
    link.close()


def test_an_update_after_a_handshake_fails_with_it() -> None:
    actor, buffer, link = sent_behind_a_handshake()
    handshake, update = actor.calls
    update.set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))

    handshake.set_exception(ray.exceptions.ActorDiedError())

    with pytest.raises(TransportError, match="died unexpectedly"):
        link.receive()
    assert len(actor.calls) == 2
    assert not buffer.pinned
    link.close()


def test_a_link_closed_while_ray_restarts_the_actor_repeats_no_handshake(watch: ActorWatch) -> None:
    """The worker's next link may have made its handshake, and the actor would drop that link for this one."""
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    link.send(UPDATE, buffer)
    for call in reversed(actor.calls):
        call.set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
    link.close()

    watch.later.pop()()

    assert len(actor.calls) == 2
    assert not watch.later
    assert not buffer.pinned


def test_a_link_closed_while_ray_restarts_the_actor_frees_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    real = session.ActorWatch()
    real._thread = threading.current_thread()  # prevents the watch from running before the link is closed
    monkeypatch.setattr(module, "ACTOR_WATCH", real)
    monkeypatch.setattr(session, "require_ray", lambda _: SimpleNamespace(is_initialized=lambda: True))
    actor, buffer = Actor(), Buffer(3)
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    link.send(UPDATE, buffer)
    for call in reversed(actor.calls):
        call.set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))
    link.close()

    real._run()

    assert not buffer.pinned
    assert len(actor.calls) == 2


def test_a_failed_repetition_ends_its_call_and_not_the_watch_of_other_calls(
    watch: ActorWatch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    actor, real, other = Actor(), session.ActorWatch(), Future[int]()
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(Hello(model_id="m", incarnation=1))
    actor.calls[0].set_exception(ray.exceptions.ActorUnavailableError("it is being restarted", None))

    def fail(*_: Any) -> None:
        raise RuntimeError("Ray is ending")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "require", fail)
        watch.later.pop()()
    with pytest.raises(TransportError, match="Ray is ending"):
        link.receive()
    link.close()

    monkeypatch.setattr(session, "require_ray", lambda _: SimpleNamespace(is_initialized=lambda: True))
    real.call_soon(fail)
    real.call_soon(lambda: other.set_result(1))
    real.watch(other, "worker 1")
    assert other.result(timeout=60.0) == 1
    assert "a call to an actor could not be repeated" in caplog.text


def answered_by(frames: Any) -> CallLink:
    """A link whose update the actor has answered with these frames."""
    actor = Actor()
    link = CallLink(with_our_receiver(actor), "worker 0")
    link.send(UPDATE, Buffer(3))
    actor.calls[0].set_result(frames)
    return link


@pytest.mark.parametrize("init", ["init_on_worker", "init_on_receiver"])
@pytest.mark.parametrize("kind", [RayWeightSyncScheme, RayModuleTransformScheme])
def test_init_of_a_receiver_outside_a_ray_actor_is_refused(kind: type[RayWeightSyncScheme], init: str) -> None:
    with kind() as scheme:
        with pytest.raises(ConfigurationError, match=r"not a Ray actor, .*: call init_on_worker\(\) .* of the actor"):
            getattr(scheme, init)(model_id="m", model=nn.Linear(2, 2))

        assert not scheme.initialized_on_receiver


@pytest.mark.usefixtures("in_an_actor")
@pytest.mark.parametrize("scheme_is_there", [True, False])
def test_an_error_in_a_collectors_actor_is_returned_instead_of_raised(scheme_is_there: bool) -> None:
    """Ray would end the process of a TorchRL collector's actor if a method raised in it."""
    scheme = RayWeightSyncScheme()
    if scheme_is_there:
        scheme.init_on_worker("m", model=nn.Linear(2, 2))
    try:
        frames = server.call(None, "m", "a link", 1, b"a frame", None)
    finally:
        scheme.close()
        ray_server._servers.pop("m", None)
    link = answered_by(frames)

    with pytest.raises(TransportError, match="was restarted" if scheme_is_there else "no receiver of model"):
        link.receive()
    link.close()


@pytest.mark.usefixtures("in_an_actor")
def test_a_goodbye_to_a_collectors_actor_raises_nothing_in_it() -> None:
    scheme, calls = RayWeightSyncScheme(), count()
    scheme.init_on_worker("m", model=nn.Linear(2, 2))
    try:
        for message in (Hello(model_id="m", incarnation=1), Bye(model_id="m", incarnation=1)):
            frames = server.call(None, "m", "a link", next(calls), encode(message), None)
    finally:
        scheme.close()
        ray_server._servers.pop("m", None)
    link = answered_by(frames)

    with pytest.raises(ClosedByPeer, match="closed this link"):
        link.receive()
    link.close()


@pytest.mark.usefixtures("in_an_actor")
def test_an_actor_of_a_collector_may_connect_again_if_the_trainer_did_not_connect() -> None:
    """After a failed first update, a `RayCollector` makes all its actors connect again in the next update."""
    collector = SimpleNamespace(_weight_sync_schemes=None)
    scheme = RayWeightSyncScheme()
    scheme.init_on_receiver(model_id="m", context=collector, model=nn.Linear(2, 2), worker_idx=0)
    try:
        scheme.connect()
        scheme.connect()

        assert scheme.synchronized_on_receiver
        scheme.context = SimpleNamespace()
        with pytest.raises(StateError, match="connected"):
            scheme.connect()
    finally:
        scheme.close()
        ray_server._servers.pop("m")


@pytest.mark.usefixtures("in_an_actor")
def test_a_late_call_from_before_a_restart_does_not_create_the_receiver() -> None:
    """Only a handshake makes the receiver, not a late goodbye, for example."""
    actor, scheme = WeightSyncActor(), RayWeightSyncScheme()
    try:
        with pytest.raises(TransportError, match="the actor was restarted"):
            actor._weightsync_call("late", "a link", 1, b"a frame", None)
        scheme.init_on_worker("late", model=nn.Linear(2, 2))
        assert scheme.get_receiver().state is State.UNINITIALIZED
    finally:
        scheme.close()
        ray_server._servers.pop("late")


def test_an_answer_set_by_another_thread_meanwhile_is_returned_by_one_call_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a key, a repeated answer would end the link."""

    class AnsweredMeanwhile(Future[list[bytes]]):
        """A future that another thread answers right after `done` has returned False."""

        def done(self) -> bool:
            if super().done():
                return True
            self.set_result([b"a handshake's answer"])
            return False

    actor_server, later = ray_server.ActorServer("m"), Future[list[bytes]]()
    answers = iter([AnsweredMeanwhile(), later])

    def no_model_yet(*_: Any) -> None:
        if not later.done():
            raise ConfigurationError("there is no model yet")

    monkeypatch.setattr(actor_server._call_server, "submit", lambda _: next(answers))
    monkeypatch.setattr(actor_server, "_decide", no_model_yet)
    hello = Parcel("a link", 0, encode(Hello(model_id="m", incarnation=1)))
    first = actor_server.call(hello, ())
    later.set_result([b"an update's answer"])
    second = actor_server.call(hello, ())

    assert [*first, *second] == [b"a handshake's answer", b"an update's answer"]
