"""The kit waits for a transport's threads, however late they are."""

from __future__ import annotations

from functools import partial
from threading import Timer

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
    """Brings each call a while after it was begun."""

    def _bring(self, parcel: Parcel, answers: Answers) -> None:
        Timer(LATE, partial(super()._bring, parcel, answers)).start()


def late(model_id: str) -> Ends:
    opened = CallServer(model_id)
    return Ends(CallLink(LateCallClient(opened), "the worker"), opened.open)


@pytest.mark.untraced("the kit's own bench")
def test_a_link_that_comes_up_once_everything_is_closed_holds_no_buffer() -> None:
    link_setup = LinkSetup(late, PATIENCE)
    bench = Bench(link_setup)
    bench.join(0)
    bench.connect()
    bench.send()
    assert not bench.receivers[0].links, "the link is not there yet"

    bench.finish()

    assert not any(buffer.pinned for buffer in bench.payloads._buffers)
    link_setup.tear_down()
