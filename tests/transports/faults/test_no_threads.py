"""While no thread can be started, calls raise a typed error; afterwards they work again."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from fleet import PATIENCE, SCHEMES, Pair, constants, filled, small

from weightsync import EngineWeightSyncScheme, MultiProcessWeightSyncScheme, TransportError, WorkerLostError
from weightsync.schemes.engines.client import Engine
from weightsync.schemes.peers.base import JobThread
from weightsync.transports.ray import session

REASON = "cannot be started: can't start new thread"


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """In the block, no thread of this library can be started."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("weightsync"):
            raise RuntimeError("can't start new thread")
        real(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield


def test_g10_a_background_reader_that_cannot_start_raises_and_starts_at_the_next_connect() -> None:
    pair = Pair(MultiProcessWeightSyncScheme)
    pair.sender.send_async()
    with no_threads(), pytest.raises(TransportError, match=f"The thread for the weightsync receiver .* {REASON}"):
        pair.schemes[0].connect(timeout=PATIENCE)

    pair.schemes[0].connect(timeout=PATIENCE)
    assert pair.sender.wait_async(timeout=PATIENCE).ok
    assert constants(pair.model) == {1.0}
    pair.close()


@pytest.mark.parametrize("scheme_class", SCHEMES.values(), ids=list(SCHEMES))
def test_g10_a_link_that_was_added_while_no_thread_could_start_is_read_by_the_next_receive(
    scheme_class: type[MultiProcessWeightSyncScheme],
) -> None:
    pair = Pair(scheme_class)
    pair.sender.send_async()
    (receiving,) = pair.schemes
    receiving.connect(timeout=PATIENCE)
    reading = receiving.get_receiver()
    pair.scheme.close()
    with pytest.raises(TransportError, match="no sender any more"):
        receiving.receive(timeout=PATIENCE)
    ours, theirs = multiprocessing.Pipe()
    pair.pipes.append((ours, theirs))
    with no_threads(), pytest.raises(TransportError, match=REASON):
        reading.register_worker_transport(theirs)

    with scheme_class() as another:
        another.init_on_sender("policy", pipes=[ours], model=filled(small(), 9.0))
        another.get_sender().send_async()
        assert receiving.receive(timeout=PATIENCE) is not None
        assert another.get_sender().wait_async(timeout=PATIENCE).ok
    assert constants(pair.model) == {9.0}
    pair.close()


class Idle(Engine):
    """An engine that ignores its weights."""

    def open(self) -> None: ...
    def load(self, buckets: object, version: str) -> None: ...
    def abort(self) -> None: ...
    def __str__(self) -> str:
        return "an idle engine"


def test_g11_an_engine_whose_thread_cannot_start_is_lost_for_that_reason_and_its_scheme_closes() -> None:
    with EngineWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", engines=[Idle()], model=small())
        with no_threads(), pytest.raises(WorkerLostError, match=f"weightsync feeds an idle engine {REASON}"):
            scheme.connect(timeout=PATIENCE)


class Silent:
    """A user's transport that never delivers anything."""

    def send_weights(self, model_id: str, weights: object) -> None: ...
    def receive_weights(self, timeout: float = 1.0) -> None: ...
    def check_connection(self) -> bool:
        return True


def test_a_user_transport_whose_thread_cannot_start_raises_and_another_can_be_registered() -> None:
    with MultiProcessWeightSyncScheme().create_receiver() as receiver:
        receiver.register_model(small())
        with no_threads(), pytest.raises(TransportError, match=f"The thread for the weightsync transport .* {REASON}"):
            receiver.register_worker_transport(Silent())

        receiver.register_worker_transport(Silent())
        assert not receiver.receive(timeout=0)


def test_a_job_thread_that_could_not_start_starts_with_the_next_job() -> None:
    thread, done = JobThread("weightsync jobs"), threading.Event()
    with no_threads(), pytest.raises(TransportError, match=f"The thread for weightsync jobs {REASON}"):
        thread.begin(done.set)
    assert thread.end() is None

    thread.begin(done.set)
    assert done.wait(PATIENCE)
    ending = thread.end()
    assert ending is not None
    ending.join(PATIENCE)


def test_calls_to_actors_are_watched_again_once_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, call, begun = session.ActorWatch(), Future[None](), []
    with no_threads(), pytest.raises(TransportError, match=f"The thread for watching Ray's calls {REASON}"):
        watch.watch(call, "worker 0")

    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread.name))
    watch.watch(call, "worker 0")
    assert begun == ["weightsync-ray"]
