"""The transports over which tests send weights: a sender in this process, and its worker."""

from __future__ import annotations

import abc
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from in_process_call_client import DirectCallClient, ThreadedCallClient
from local_links import local_pair
from weight_kinds import snapshot

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, SyncReport, WeightSender
from weightsync.schemes.base import WeightSyncScheme
from weightsync.transports.base import Link, Payloads
from weightsync.transports.calls.client import CallLink
from weightsync.transports.calls.server import CallServer
from weightsync.transports.pipe.link import PipeLink

#: Seconds until a wait gives up. Only a failing test waits this long.
PATIENCE = 60.0


class Carrier(abc.ABC):
    """A sender and a worker, joined by one transport."""

    sender: WeightSender

    @abc.abstractmethod
    def send(self, weights: Any) -> SyncReport:
        """Send the weights, and wait for the report."""

    @abc.abstractmethod
    def served(self) -> dict[str, Any]:
        """All weights that the worker serves, bit by bit."""

    @abc.abstractmethod
    def digest(self) -> bytes:
        """The digest of the weights that the worker serves."""


class InProcessCarrier(Carrier):
    """A worker in this process, driven by the thread of the sender."""

    def __init__(self, sending: Any, receiving: Any, theirs: Any, make: Callable[[], Any], **given: Any) -> None:
        self.model = make()
        sending.init_on_sender("policy", **given)
        receiving.init_on_worker("policy", model=self.model, **theirs)
        self.sender, self.receiver = sending.get_sender(), receiving.get_receiver()

    def send(self, weights: Any) -> SyncReport:
        self.sender.send_async(weights)
        while self.sender.poll() is not None and not self._over():
            self.receiver.receive(timeout=0.01)
        return self.sender.wait_async(timeout=PATIENCE)

    def _over(self) -> bool:
        outstanding = self.sender._driver.data.outstanding
        return outstanding is None or not outstanding.owed

    def served(self) -> dict[str, Any]:
        return snapshot(self.model)

    def digest(self) -> bytes:
        return self.receiver.digest()


@contextlib.contextmanager
def over_pipes(scheme: Any, make: Callable[[], Any]) -> Iterator[Carrier]:
    ours, theirs = multiprocessing.Pipe()
    with scheme() as sending, scheme() as receiving:
        yield InProcessCarrier(sending, receiving, {"pipe": theirs}, make, pipes=[ours])
    ours.close()
    theirs.close()


class LinkScheme(WeightSyncScheme):
    """A scheme whose endpoints are links or call servers."""

    _sender_arguments = ("ends",)
    _worker_arguments = ("end",)

    def _endpoints(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Mapping[int, Any]:
        return dict(enumerate(keywords["ends"]))

    def _endpoint(self, keywords: Mapping[str, Any], context: Any, model_id: str) -> Any:
        return keywords["end"]

    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        link: Link = endpoint
        return link

    def listen(self, endpoint: Any, model_id: str, accept: Any) -> Any:
        return endpoint.open(accept) if isinstance(endpoint, CallServer) else super().listen(endpoint, model_id, accept)


def linked(connect: Callable[[], tuple[Any, Any]]) -> Callable[[Callable[[], Any]], Any]:
    @contextlib.contextmanager
    def carry(make: Callable[[], Any]) -> Iterator[Carrier]:
        first, second = connect()
        with LinkScheme() as sending, LinkScheme() as receiving:
            yield InProcessCarrier(sending, receiving, {"end": second}, make, ends=[first])

    return carry


def inline() -> tuple[Any, Any]:
    ends = multiprocessing.Pipe()
    return tuple(PipeLink(end, "policy", payloads=Payloads.INLINE) for end in ends)


def called(call_client: Any) -> tuple[Any, Any]:
    call_server = CallServer("policy")
    return CallLink(call_client(call_server), "the worker"), call_server


CARRIERS = {
    "pipe": lambda make: over_pipes(MultiProcessWeightSyncScheme, make),
    "shared": lambda make: over_pipes(SharedMemWeightSyncScheme, make),
    "pipe inline": linked(inline),
    "local": linked(local_pair),
    "calls": linked(lambda: called(DirectCallClient)),
    "calls in threads": linked(lambda: called(ThreadedCallClient)),
}
PARAMS = [pytest.param(carry, id=name) for name, carry in CARRIERS.items()]
