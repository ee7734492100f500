"""`FaultyTransport` causes the faults that its delivery allows, and the drivers obey the protocol under all of them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
from faults_by_delivery import FAULTS
from local_links import local_pair

from weightsync import ConfigurationError, TransportError
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Hello
from weightsync.testing import SCENARIOS, Ends, FaultyTransport, Nonconforming, Rule, check_transport
from weightsync.transports.base import Link, Waker, wait
from weightsync.transports.pipe.link import PipeLink

#: The scenario that these links cannot run, and the reason.
UNREACHABLE = {"several models": "one model a connection here"}


def faulty(delivery: Delivery, seed: int, **faults: float) -> Callable[[str], Ends]:
    def connect(model_id: str) -> Ends:
        ours, theirs = multiprocessing.Pipe()
        ends = [
            FaultyTransport(PipeLink(end, model_id), delivery, seed=seed + index, **faults)
            for index, end in enumerate((ours, theirs))
        ]
        return Ends(*ends, cut=ends[0].cut)

    return connect


@pytest.mark.parametrize("delivery", Delivery, ids=lambda delivery: delivery.name)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_protocol_holds_over_a_faulty_transport(
    delivery: Delivery, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    # Skip the graphs: they end a machine while the wrapper still holds back its messages.
    names = [name for name in SCENARIOS if not name.startswith("the graph of ") and name not in UNREACHABLE]
    found = check_transport(
        faulty(delivery, seed, **FAULTS[delivery]), unreachable=UNREACHABLE, only=names, patience=20.0
    )

    assert found.delivery is delivery
    assert {f"walk {number}" for number in range(12)} <= set(found.passed)


def test_the_kit_finds_faults_that_a_transport_does_not_declare() -> None:
    """The kit finds a wrapper that promises more than the link inside keeps."""

    def connect(model_id: str) -> Ends:
        inner = [
            FaultyTransport(link, Delivery.AT_LEAST_ONCE, seed=3, duplicate=0.5, delay=0.5) for link in local_pair()
        ]
        return Ends(*(FaultyTransport(link, Delivery.ORDERED) for link in inner))

    with pytest.raises(Nonconforming) as refused:
        check_transport(connect, only=["many messages"], patience=2.0)
    assert refused.value.rules <= {Rule.ORDER, Rule.ONCE}


@pytest.mark.parametrize(
    ("delivery", "fault"),
    [(Delivery.ORDERED, "drop"), (Delivery.AT_LEAST_ONCE, "drop"), (Delivery.REORDERED, "duplicate")],
)
def test_a_fault_that_the_delivery_does_not_allow_is_refused(delivery: Delivery, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=f"promises not to {fault}"):
        FaultyTransport(local_pair(delivery)[0], delivery, **{fault: 0.5})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"delivery": "ORDERED"}, r"^delivery= is 'ORDERED': give a weightsync\.Delivery"),
        ({"link": None}, r"^link= is of type NoneType, which lacks delivery, peer, send, .*: give a link"),
        ({"drop": "0.5"}, r"^drop= is '0\.5': give a probability, from 0 to 1"),
        ({"duplicate": 2}, r"^duplicate= is 2: give a probability"),
        ({"delay": float("nan")}, r"^delay= is nan: give a probability"),
        ({"delay": True}, r"^delay= is True: give a probability"),
        ({"seed": "1"}, r"^seed= is '1': give an int"),
    ],
)
def test_invalid_arguments_are_refused_with_the_reason(given: dict[str, Any], match: str) -> None:
    link = local_pair(Delivery.BEST_EFFORT)[0]
    with pytest.raises(ConfigurationError, match=match):
        FaultyTransport(**{"link": link, "delivery": Delivery.BEST_EFFORT, **given})


def handshake_and_acks(count: int) -> list[Ack | Hello]:
    return [
        Hello(model_id="m", incarnation=1),
        *(Ack(model_id="m", incarnation=1, version=v) for v in range(1, count + 1)),
    ]


def received_versions(delivery: Delivery, seed: int, **faults: float) -> list[int | str]:
    first, second = local_pair(delivery)
    link = FaultyTransport(first, delivery, seed=seed, **faults)
    for message in handshake_and_acks(30):
        link.send(message)
    while not link.flush():
        pass
    return [message.version if isinstance(message := one.message, Ack) else "Hello" for one in second.receive()]


def test_the_same_seed_causes_the_same_faults() -> None:
    faults = FAULTS[Delivery.BEST_EFFORT]

    assert received_versions(Delivery.BEST_EFFORT, 7, **faults) == received_versions(Delivery.BEST_EFFORT, 7, **faults)
    assert received_versions(Delivery.BEST_EFFORT, 7, **faults) != received_versions(Delivery.BEST_EFFORT, 8, **faults)


@pytest.mark.parametrize("delivery", Delivery, ids=lambda delivery: delivery.name)
def test_each_allowed_fault_occurs_and_never_affects_the_handshake(delivery: Delivery) -> None:
    found = received_versions(delivery, 5, **FAULTS[delivery])
    versions = found[1:]

    assert found[0] == "Hello"
    assert (versions != sorted(versions, key=int)) == delivery.reorders
    assert (len(versions) != len(set(versions))) == delivery.duplicates
    assert (set(versions) != set(range(1, 31))) == delivery.loses


def test_a_cut_is_reported_at_both_ends() -> None:
    first, second = (FaultyTransport(link, Delivery.ORDERED) for link in local_pair())
    first.send(handshake_and_acks(0)[0])
    first.cut()

    assert [second] == wait(Waker(), [second], 5.0)
    assert len(second.receive()) == 1
    for use in (second.receive, first.receive, first.flush, lambda: first.send(handshake_and_acks(0)[0])):
        with pytest.raises(TransportError):
            use()


def test_links_accepted_in_an_adapters_thread_are_added_to_drivers_in_one_other_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver belongs to one thread: two links of a worker that came up at once used to get the same number."""
    threads: set[str] = set()
    shipped = ReceiverDriver.add_link

    def add_link(driver: ReceiverDriver, link: Any) -> int:
        threads.add(threading.current_thread().name)
        return shipped(driver, link)

    def connect(model_id: str) -> Ends:
        first, second = local_pair()

        def listen(accept: Callable[[Link], None]) -> Callable[[], None]:
            thread = threading.Thread(target=accept, args=(second,), name="the adapter's")
            thread.start()
            return thread.join

        return Ends(first, listen)

    monkeypatch.setattr(ReceiverDriver, "add_link", add_link)
    check_transport(connect, unreachable=UNREACHABLE, only=["walk 0"])

    assert len(threads) == 1
    assert "the adapter's" not in threads
