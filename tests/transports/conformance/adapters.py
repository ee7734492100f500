"""All adapters that the conformance kit checks: how each is created, and which scenarios it cannot reach."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults_by_delivery import FAULTS
from in_process_call_client import DirectCallClient, ThreadedCallClient
from local_links import LocalLink, local_pair
from ray_relay import ray_factory
from world_adapters import conforms, rpc_factory, store_factory

from weightsync.clock import Deadline
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Bye, Hello
from weightsync.schemes.peers.user_transport import user_link
from weightsync.testing import SCENARIOS, Conformance, Ends, Factory, FaultyTransport, Nonconforming, check_transport
from weightsync.torchrl.transports.queues import QueueChannel, QueueLink
from weightsync.transports.base import Link, Payloads, Received
from weightsync.transports.calls.client import BlockingLink, CallLink
from weightsync.transports.calls.server import CallServer
from weightsync.transports.pipe.link import PipeLink

ONE_MODEL = "each link here carries one model, and nothing of it is shared"
ANSWERS_RETURN_WITH_CALLS = (
    "a worker's messages return with the sender's calls: one that is gone, and whose process lives, is noticed at the "
    "next call"
)
NO_GOODBYE = (
    "without a goodbye, a sender's end is noticed only by the end of its process, and here both ends are in one"
)
#: Seconds. Only a failing check takes this long.
LONG = 900.0
#: The marks of all tests of Ray, whose processes start slowly and which leaves sockets to the garbage collector.
RAY = (pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::ResourceWarning"))
CALLS_CANNOT_BREAK = "a call cannot break while both ends are alive"


@dataclass(frozen=True)
class Adapter:
    """An adapter whose two ends are in this process, and which needs nothing else."""

    name: str
    factory: Factory
    unreachable: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()

    def param(self) -> Any:
        return pytest.param(self, id=self.name, marks=self.marks)

    def check(self, request: pytest.FixtureRequest, **how: Any) -> Conformance:
        """Run the conformance kit, in the process in which the ends must be, and return its result."""
        try:
            return check_transport(self.factory, unreachable=self.unreachable, **how)
        except Nonconforming as refused:
            return refused.conformance


@dataclass(frozen=True)
class InChildProcess(Adapter):
    """An adapter with process-wide threads and settings: a child process makes the factory, given a folder."""

    def check(self, request: pytest.FixtureRequest, **how: Any) -> Conformance:
        (worker,) = request.getfixturevalue("crew").start(None)
        folder = str(request.getfixturevalue("tmp_path"))
        worker.tell(conforms, self.factory, folder, {"unreachable": self.unreachable, **how})
        waited = Deadline(LONG)
        while not worker.answered() and not waited.passed:
            time.sleep(0.05)
        found: Conformance = worker.answer()
        worker.kill()
        return found


@dataclass(frozen=True)
class OnRay(Adapter):
    """An adapter that needs a Ray cluster, and whose factory is a context manager."""

    def check(self, request: pytest.FixtureRequest, **how: Any) -> Conformance:
        request.getfixturevalue("cluster")
        with tempfile.TemporaryDirectory(prefix="ws") as folder, self.factory(folder) as connect:
            return Adapter(self.name, connect, self.unreachable).check(request, **how)


def local(delivery: Delivery, payloads: Payloads) -> Callable[[str], Ends]:
    def connect(model_id: str) -> Ends:
        first, second = local_pair(delivery, payloads=payloads)
        return Ends(first, second, cut=first.network.cut)

    return connect


class GoodbyesFirst(LocalLink):
    """Delivers a goodbye before the messages that arrived with it, as a link that reorders may."""

    def receive(self) -> list[Received]:
        return sorted(super().receive(), key=lambda each: _FIRST.get(type(each.message), len(_FIRST)))


_FIRST = {Hello: 0, Bye: 1}


def goodbyes_first(model_id: str) -> Ends:
    pair = local_pair(Delivery.REORDERED, payloads=Payloads.SHARED)
    first, second = (GoodbyesFirst(link.network, link.side, Payloads.SHARED) for link in pair)
    return Ends(first, second, cut=first.network.cut)


def pipe(payloads: Payloads) -> Callable[[str], Ends]:
    def connect(model_id: str) -> Ends:
        ours, theirs = multiprocessing.Pipe()

        def over(model: str) -> Ends:
            link = partial(PipeLink, model_id=model, payloads=payloads)
            return Ends(link(ours), link(theirs), cut=cut, another=over, dispose=dispose)

        def cut() -> None:
            with socket.socket(fileno=ours.fileno()) as shared:
                shared.shutdown(socket.SHUT_RDWR)
                shared.detach()

        def dispose() -> None:
            ours.close()
            theirs.close()

        return over(model_id)

    return connect


def call_server(call_client: Callable[[CallServer], Any], over: type[CallLink] = CallLink) -> Callable[[str], Ends]:
    def connect(model_id: str) -> Ends:
        opened = CallServer(model_id)
        link: Link = over(call_client(opened), "the worker")
        return Ends(link, opened.open)

    return connect


def queues(model_id: str) -> Ends:
    """Links over two queues, as a user of `MPTransport` passes them."""
    there, back = multiprocessing.Queue(), multiprocessing.Queue()
    ours, theirs = QueueChannel(there, back), QueueChannel(back, there)

    def over(model: str) -> Ends:
        return Ends(QueueLink(ours, model, "the worker"), QueueLink(theirs, model, "the sender"), another=over)

    def dispose() -> None:
        for each in (there, back):
            each.close()
            empty(each)

    return replace(over(model_id), dispose=dispose)


def empty(queue: Any) -> None:
    """Read the unread messages of a queue, so that its feeder thread can end."""
    with contextlib.suppress(OSError, EOFError, TypeError):  # the queue's thread has just closed it
        while queue._thread is not None and queue._thread.is_alive():
            if queue._reader.poll(0.01):
                queue._reader.recv_bytes()


def example(model_id: str) -> Ends:
    """The transport of docs/testing.md."""
    path = Path(__file__).parents[3] / "docs" / "examples" / "queue_transport.py"
    spec = importlib.util.spec_from_file_location("queue_transport", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ends: Ends = module.connect(model_id)
    return ends


class DiscardingTransport:
    """A user's transport, as the reference documents it."""

    def send_weights(self, model_id: str, weights: Any) -> None:
        """Accept the weights and discard them."""


def users_own_transport(model_id: str) -> Ends:
    """The link that `WeightSender` creates over a user's own transport."""
    return Ends(user_link(DiscardingTransport(), "policy", "the worker"), lambda accept: lambda: None)


def wrapped(connect: Factory, delivery: Delivery, seed: int, **faults: float) -> Factory:
    """The same links, wrapped in `FaultyTransport` with all faults that ``delivery`` allows."""

    def over(model_id: str) -> Ends:
        inner = connect(model_id)
        near = FaultyTransport(inner.sender, delivery, seed=seed, **faults)

        def far(link: Link) -> FaultyTransport:
            return FaultyTransport(link, delivery, seed=seed + 1, **faults)

        receiver: Any = inner.receiver
        if callable(receiver):
            return replace(
                inner, sender=near, receiver=lambda accept: receiver(lambda link: accept(far(link))), another=None
            )
        ends = (near, far(receiver))

        def cut() -> None:
            # In the model, messages that were sent before a link broke still arrive.
            for end in ends:
                end.release()
            (inner.cut or near.cut)()

        return replace(inner, sender=near, receiver=ends[1], cut=cut, another=None)

    return over


CALLS = {
    "a receiver that is gone": ANSWERS_RETURN_WITH_CALLS,
    "an idle worker says bye": ANSWERS_RETURN_WITH_CALLS,
    "the sender's last words": NO_GOODBYE,
    "an update that is cut off": NO_GOODBYE,
    "the sender is lost": NO_GOODBYE,
    "a cut": CALLS_CANNOT_BREAK,
    "a cut with an update outstanding": CALLS_CANNOT_BREAK,
    "several models": ONE_MODEL,
}
STORE = {
    "several models": ONE_MODEL,
    "a cut": CALLS_CANNOT_BREAK,
    "a cut with an update outstanding": CALLS_CANNOT_BREAK,
}
QUEUES_HAVE_NO_END = (
    "a queue has no end: that its other side was given up is noticed by a goodbye, or by the end of a process"
)
QUEUES = dict.fromkeys(
    (
        "the sender's last words",
        "an update that is cut off",
        "a receiver that is gone",
        "a send to one that is gone",
        "the sender is lost",
        "a worker is lost",
        "a cut",
        "a cut with an update outstanding",
    ),
    QUEUES_HAVE_NO_END,
)
HELD_GOODBYE = "a goodbye that is held back is lost with its link, and a queue has no end"
LATE_HANDSHAKE = "a handshake that is held back until its link closes is a call that may come after the next link's"
WEIGHTS_ONLY = "a user's own transport takes weights, not messages: no link of ours is at its other end"


def faulty(
    name: str, connect: Factory, unreachable: Mapping[str, str], deliveries: Iterable[Delivery]
) -> list[Adapter]:
    """The same adapter, wrapped once for each delivery."""
    return [
        Adapter(
            f"{name}, faulty {delivery.name}",
            wrapped(connect, delivery, 1, **FAULTS[delivery]),
            {"several models": ONE_MODEL, **unreachable},
            () if name == "pipe inline" else (pytest.mark.slow,),
        )
        for delivery in deliveries
    ]


ADAPTERS = [
    *(
        Adapter(f"local {delivery.name} {payloads.value}", local(delivery, payloads), {"several models": ONE_MODEL})
        for delivery in Delivery
        for payloads in Payloads
    ),
    Adapter("local REORDERED, goodbyes first", goodbyes_first, {"several models": ONE_MODEL}),
    *(Adapter(f"pipe {payloads.value}", pipe(payloads)) for payloads in Payloads),
    Adapter("queue", queues, QUEUES),
    Adapter("calls in this process", call_server(DirectCallClient), CALLS),
    Adapter("calls in threads", call_server(ThreadedCallClient), CALLS),
    Adapter("blocking calls", call_server(ThreadedCallClient, BlockingLink), CALLS),
    Adapter("a user's own transport", users_own_transport, dict.fromkeys(SCENARIOS, WEIGHTS_ONLY)),
    Adapter("the example of the docs", example, {"several models": ONE_MODEL}),
    InChildProcess("RPC", rpc_factory, CALLS, (pytest.mark.rpc,)),
    InChildProcess("distributed", store_factory, STORE, (pytest.mark.gloo,)),
    InChildProcess("distributed, fan-out", partial(store_factory, fanout=1), STORE, (pytest.mark.gloo,)),
    OnRay("Ray", ray_factory, CALLS, RAY),
    *faulty("pipe inline", pipe(Payloads.INLINE), {}, Delivery),
    *faulty("pipe shared", pipe(Payloads.SHARED), {}, Delivery),
    *faulty(
        "queue",
        queues,
        {**QUEUES, **dict.fromkeys(("a worker says bye", "an idle worker says bye"), HELD_GOODBYE)},
        Delivery,
    ),
    # A call returns one answer: a duplicate would return with another call.
    *faulty(
        "calls in threads",
        call_server(ThreadedCallClient),
        CALLS | {"the graph of losses": LATE_HANDSHAKE},
        (Delivery.ORDERED,),
    ),
    *faulty("calls in threads", call_server(ThreadedCallClient), CALLS, (Delivery.REORDERED,)),
    *faulty("the example of the docs", example, {}, Delivery),
]
