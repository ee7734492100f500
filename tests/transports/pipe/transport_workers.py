"""The functions that the tests run in other processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from weightsync.errors import TransportError
from weightsync.protocol.messages import Ack, Bye, Hello, Update
from weightsync.transports.base import Waker, wait
from weightsync.transports.buffers import Pool
from weightsync.transports.pipe.link import PipeLink
from weightsync.transports.process import own_identity

MODEL = "policy"


def hello(link: PipeLink) -> None:
    pid, started = own_identity()
    link.send(Hello(model_id=MODEL, incarnation=1, pid=pid, started=started))


def echo(connection: Connection) -> None:
    """Ack each update whose payload has the right first byte, until a Bye or the end."""
    link, waker = PipeLink(connection, MODEL, peer="the trainer"), Waker()
    hello(link)
    while True:
        wait(waker, [link], 10.0)
        try:
            received = link.receive()
        except TransportError:
            return
        for one in received:
            if isinstance(one.message, Bye):
                link.close()
                return
            if isinstance(one.message, Update):
                whole = bytes(one.payload) == bytes([one.message.version % 256]) * one.message.nbytes
                one.payload[:3] = b"own"
                if one.slot is not None:
                    one.slot.remap()
                link.send(Ack(model_id=MODEL, incarnation=1, version=one.message.version if whole else 0))
                link.user.send(("acked", one.message.version, one.message.slot is not None))


def stay(connection: Connection) -> None:
    """Send a Hello and nothing more."""
    link = PipeLink(connection, MODEL)
    hello(link)
    signal.pause()


def hold(*connections: Connection) -> None:
    """Keep ends of pipes open, as a sibling process that inherited them would."""
    signal.pause()
    del connections


def last_words(connection: Connection) -> None:
    """Send fifty acks, and die at once."""
    link = PipeLink(connection, MODEL)
    hello(link)
    for version in range(1, 51):
        link.send(Ack(model_id=MODEL, incarnation=1, version=version))
    os.kill(os.getpid(), signal.SIGKILL)


def trainer_that_dies(connection: Connection, nbytes: int) -> None:
    """Publish one version in shared memory, and die on request."""
    link, pool = PipeLink(connection, MODEL), Pool()
    hello(link)
    buffer = pool.acquire(nbytes)
    buffer.view[:] = b"t" * nbytes
    update = Update(model_id=MODEL, incarnation=1, version=1, layout_digest=b"", nbytes=nbytes)
    link.send(update, buffer)
    link.user.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def check_torn(connection: Connection, linger: float) -> None:
    """Read the served payload again and again, while the trainer writes as fast as its pins permit."""
    link, waker, served, torn = PipeLink(connection, MODEL), Waker(), None, 0
    hello(link)
    while True:
        wait(waker, [link], 0.001 if served else 10.0)
        for received in link.receive():
            if isinstance(received.message, Bye):
                link.user.send(torn)
                link.close()
                return
            time.sleep(linger)
            if served is not None:
                torn += not whole(*served)
            served = (received.payload, received.message.version)
            torn += not whole(*served)
            link.send(Ack(model_id=MODEL, incarnation=1, version=received.message.version))
        if served is not None:
            torn += not whole(*served)


def whole(payload: memoryview, version: int) -> bool:
    """Whether every page of the payload is of this version."""
    return bytes(payload[::512]) == bytes([version % 251]) * len(payload[::512])


def in_a_fork(check: Callable[[], None]) -> None:
    """Run ``check`` in a forked child. The test fails if it raises or hangs."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            check()
            code = 0
        except BaseException as error:  # noqa: BLE001
            sys.stderr.write(f"in the child: {error!r}\n")
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
