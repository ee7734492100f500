"""The one list of all adapters that are held to the contract: how each is laid, and what it cannot reach."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from in_process_courier import DirectCourier, ThreadedCourier

from weightsync._tables import Delivery
from weightsync.testing import Ends, Factory
from weightsync.transports.base import Link, Payloads
from weightsync.transports.calls import CallLink
from weightsync.transports.doors import Door
from weightsync.transports.local import local_pair
from weightsync.transports.pipe import PipeLink

ONE_MODEL = "each link here carries one model, and nothing of it is shared"
ANSWERS_GO_HOME = (
    "a worker's words go home with the sender's calls: one that is gone, and whose process lives, is noticed at the "
    "next call"
)
WORDLESS = "a sender that says no goodbye is told by the end of its process alone, and here both ends are in one"
NO_CABLE = "nothing lies between the ends of a call that could break while both live"


@dataclass(frozen=True)
class Adapter:
    """An entry of the list."""

    name: str
    factory: Factory
    unreachable: Mapping[str, str] = field(default_factory=dict)
    marks: tuple[Any, ...] = ()

    def param(self) -> Any:
        return pytest.param(self, id=self.name, marks=self.marks)


def local(delivery: Delivery, payloads: Payloads) -> Callable[[str], Ends]:
    def lay(model_id: str) -> Ends:
        first, second = local_pair(delivery, payloads=payloads)
        return Ends(first, second, cut=first.network.cut)

    return lay


def pipe(payloads: Payloads) -> Callable[[str], Ends]:
    def lay(model_id: str) -> Ends:
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

    return lay


def door(courier: Callable[[Door], Any]) -> Callable[[str], Ends]:
    def lay(model_id: str) -> Ends:
        opened = Door(model_id)
        link: Link = CallLink(courier(opened), "the worker")
        return Ends(link, opened.open)

    return lay


CALLS = {
    "a receiver that is gone": ANSWERS_GO_HOME,
    "an idle worker says bye": ANSWERS_GO_HOME,
    "the sender's last words": WORDLESS,
    "the sender is lost": WORDLESS,
    "a cut": NO_CABLE,
    "a cut with an update outstanding": NO_CABLE,
    "several models": ONE_MODEL,
}

ADAPTERS = [
    *(
        Adapter(f"local {delivery.name} {payloads.value}", local(delivery, payloads), {"several models": ONE_MODEL})
        for delivery in Delivery
        for payloads in Payloads
    ),
    *(Adapter(f"pipe {payloads.value}", pipe(payloads)) for payloads in Payloads),
    Adapter("calls in this process", door(DirectCourier), CALLS),
    Adapter("calls in threads", door(ThreadedCourier), CALLS),
]
