"""The kit waits for a transport's threads, however late they are."""

from __future__ import annotations

from threading import Event, Thread, Timer

import pytest
from in_process_call_client import DirectCallClient

from weightsync.testing.bench import Bench
from weightsync.testing.ends import Ends
from weightsync.testing.link_setup import LinkSetup
from weightsync.transports.calls.client import Answers, CallLink
from weightsync.transports.calls.server import CallServer, Parcel

PATIENCE = 20.0
LATE = 0.2


class LateCallClient(DirectCallClient):
    """Brings no call before it is let go."""

    def __init__(self, call_server: CallServer, let_go: Event) -> None:
        super().__init__(call_server)
        self._let_go = let_go

    def _bring(self, parcel: Parcel, answers: Answers) -> None:
        Thread(target=self._bring_late, args=(parcel, answers)).start()

    def _bring_late(self, parcel: Parcel, answers: Answers) -> None:
        self._let_go.wait(PATIENCE)
        super()._bring(parcel, answers)


@pytest.mark.untraced("the kit's own bench")
def test_a_link_that_comes_up_once_everything_is_closed_holds_no_buffer() -> None:
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
