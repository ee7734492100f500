"""`FaultyTransport` causes the faults that its delivery allows, and the drivers obey the protocol under all of them."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

import pytest
from local_links import local_pair

from weightsync import ConfigurationError, TransportError
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Hello
from weightsync.testing import SCENARIOS, Ends, FaultyTransport, Nonconforming, Rule, check_transport
from weightsync.transports.base import Link, Waker, wait
from weightsync.transports.pipe.link import PipeLink

FAULTS = {
    Delivery.ORDERED: {"delay": 0.3},
    Delivery.REORDERED: {"delay": 0.4},
    Delivery.AT_LEAST_ONCE: {"delay": 0.3, "duplicate": 0.3},
    Delivery.BEST_EFFORT: {"delay": 0.2, "duplicate": 0.2, "drop": 0.2},
}
#: The scenario that these links cannot run, and the reason.
HELD = {"several models": "one model a connection here"}


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
def test_the_protocol_holds_over_it(delivery: Delivery, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    # Skip the graphs: they end a machine while the wrapper still holds back its messages.
    names = [name for name in SCENARIOS if not name.startswith("the graph of ") and name not in HELD]
    found = check_transport(faulty(delivery, seed, **FAULTS[delivery]), unreachable=HELD, only=names, patience=20.0)

    assert found.delivery is delivery
    assert {f"walk {number}" for number in range(12)} <= set(found.passed)


def test_faults_that_it_does_not_declare_are_found() -> None:
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
def test_no_fault_goes_beyond_what_is_declared(delivery: Delivery, fault: str) -> None:
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
def test_arguments_of_another_type_are_refused_at_once(given: dict[str, Any], match: str) -> None:
    link = local_pair(Delivery.BEST_EFFORT)[0]
    with pytest.raises(ConfigurationError, match=match):
        FaultyTransport(**{"link": link, "delivery": Delivery.BEST_EFFORT, **given})


def said(count: int) -> list[Ack | Hello]:
    return [
        Hello(model_id="m", incarnation=1),
        *(Ack(model_id="m", incarnation=1, version=v) for v in range(1, count + 1)),
    ]


def heard(delivery: Delivery, seed: int, **faults: float) -> list[int | str]:
    first, second = local_pair(delivery)
    link = FaultyTransport(first, delivery, seed=seed, **faults)
    for message in said(30):
        link.send(message)
    while not link.flush():
        pass
    return [message.version if isinstance(message := one.message, Ack) else "Hello" for one in second.receive()]


def test_one_seed_does_the_same_every_time() -> None:
    faults = FAULTS[Delivery.BEST_EFFORT]

    assert heard(Delivery.BEST_EFFORT, 7, **faults) == heard(Delivery.BEST_EFFORT, 7, **faults)
    assert heard(Delivery.BEST_EFFORT, 7, **faults) != heard(Delivery.BEST_EFFORT, 8, **faults)


@pytest.mark.parametrize("delivery", Delivery, ids=lambda delivery: delivery.name)
def test_each_fault_happens_where_it_is_allowed_and_never_to_the_handshake(delivery: Delivery) -> None:
    found = heard(delivery, 5, **FAULTS[delivery])
    versions = found[1:]

    assert found[0] == "Hello"
    assert (versions != sorted(versions, key=int)) == delivery.reorders
    assert (len(versions) != len(set(versions))) == delivery.duplicates
    assert (set(versions) != set(range(1, 31))) == delivery.loses


def test_a_cut_is_reported_at_both_ends() -> None:
    first, second = (FaultyTransport(link, Delivery.ORDERED) for link in local_pair())
    first.send(said(0)[0])
    first.cut()

    assert [second] == wait(Waker(), [second], 5.0)
    assert len(second.receive()) == 1
    for use in (second.receive, first.receive, first.flush, lambda: first.send(said(0)[0])):
        with pytest.raises(TransportError):
            use()


def test_links_that_come_up_in_the_adapters_own_threads_reach_their_drivers_in_the_kits(
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
    check_transport(connect, unreachable=HELD, only=["walk 0"])

    assert len(threads) == 1
    assert "the adapter's" not in threads
