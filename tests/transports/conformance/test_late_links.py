"""The kit tolerates transports with threads: links that come up late, and links that see an end early."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from threading import Event, Thread, Timer

import pytest
from in_process_call_client import DirectCallClient

from weightsync import TransportError
from weightsync.protocol.messages import Ack, Message
from weightsync.testing.bench import Bench
from weightsync.testing.ends import Ends
from weightsync.testing.link_setup import LinkSetup
from weightsync.transports.base import Link
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, CallLink
from weightsync.transports.calls.server import CallServer, Parcel
from weightsync.transports.pipe.link import PipeLink

PATIENCE = 20.0
LATE = 0.2


class LateCallClient(DirectCallClient):
    """Holds back each call until an event is set."""

    def __init__(self, call_server: CallServer, let_go: Event) -> None:
        super().__init__(call_server)
        self._let_go = let_go

    def _bring(self, parcel: Parcel, answers: Answers) -> None:
        Thread(target=self._bring_late, args=(parcel, answers)).start()

    def _bring_late(self, parcel: Parcel, answers: Answers) -> None:
        self._let_go.wait(PATIENCE)
        super()._bring(parcel, answers)


@pytest.mark.untraced("the kit's own bench")
def test_a_link_accepted_after_everything_is_closed_pins_no_buffer() -> None:
    let_go = Event()

    def late(model_id: str) -> Ends:
        opened = CallServer(model_id)
        return Ends(CallLink(LateCallClient(opened, let_go), "the worker"), opened.open)

    link_setup = LinkSetup(late, PATIENCE)
    bench = Bench(link_setup)
    bench.join(0)
    bench.connect()
    bench.send()
    assert not bench.receivers[0].links, "the link is not there yet"
    Timer(LATE, let_go.set).start()

    bench.finish()

    assert not any(buffer.pinned for buffer in bench.payloads._buffers)
    link_setup.tear_down()


class FailsOnceAnswered(PipeLink):
    """Writes late, as a thread would: it notices that the sender's end has closed only when it writes an ack."""

    _answered = False

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        self._answered = self._answered or isinstance(message, Ack)

    def flush(self) -> bool:
        if self._answered:
            raise TransportError("the connection is closed.")
        return True


@pytest.mark.untraced("the kit's own bench")
def test_a_link_may_fail_between_two_messages_that_arrived_together() -> None:
    kinds = iter((PipeLink, FailsOnceAnswered))

    def connect(model_id: str) -> Ends:
        ours, theirs = multiprocessing.Pipe()
        worker_end = next(kinds)(theirs, model_id)

        def listen(accept: Callable[[Link], None]) -> Callable[[], None]:
            accept(worker_end)
            return worker_end.close

        return Ends(PipeLink(ours, model_id), listen)

    link_setup = LinkSetup(connect, PATIENCE)
    bench = Bench(link_setup)
    bench.join(0)
    bench.connect()
    bench.send()
    bench.receive(0)
    bench.apply(0)
    bench.join(0)
    bench.close_sender()

    bench.receive(0)  # the handshake, the version that the worker already serves, and the goodbye

    sent = [name for name, *_ in bench.receivers[0].links[2].attempts]
    assert sent == ["Hello", "Ack", "Refusal"]
    bench.finish()
    link_setup.tear_down()
