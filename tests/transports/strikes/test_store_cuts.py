"""A network that fails between one worker and the rest, idle and mid-payload, over torch.distributed (G10).

The worker's connections to the store, its link's own, or both are cut, reset, or fall silent. A worker announces where
it listens in the store, and that is rewritten on its way (tests/severed.py).
"""

from __future__ import annotations

import enum
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import Crew
from fleets import StoreFleet, endpoint
from judging import all_sent, goes_on
from severed import Failure, Network, Wire
from striking import (
    SHORT,
    SOON,
    abandon,
    add_worker,
    follow_through,
    follow_until_gone,
    holds,
    look,
    send,
    within,
)

from weightsync import OutcomeKind

pytestmark = [pytest.mark.slow, pytest.mark.gloo]

APPLIED, LOST, TIMED_OUT = OutcomeKind.APPLIED, OutcomeKind.LOST, OutcomeKind.TIMED_OUT
MIDDLE_NBYTES = 2 * 2**20


class Part(enum.StrEnum):
    """What of the network fails."""

    STORE = "store"
    PAIR = "pair"
    ALL = "all"

    def of(self, network: Network) -> list[Wire]:
        """The wires that are meant."""
        pairs = list(network.peers.values())
        return {Part.STORE: [network.store], Part.PAIR: pairs, Part.ALL: [network.store, *pairs]}[self]


@pytest.fixture
def network(store: Any) -> Iterator[Network]:
    made = Network(store.port)
    yield made
    made.end()


@pytest.fixture
def fleet(crew: Crew, store: Any, network: Network) -> Iterator[StoreFleet]:
    """Both workers serve version 1; worker 0 by way of the network."""
    made = StoreFleet(crew, store.port, network.port)
    for worker in (made.victim, made.other):
        made.start_receiver(worker)
    made.start_sender(made.trainer)
    all_sent(made, 1)
    yield made
    crew.end()


def failing(network: Network, part: Part, failure: Failure) -> Callable[[], None]:
    def act() -> None:
        for wire in part.of(network):
            wire.fail(failure)

    return act


def in_the_middle(network: Network, act: Callable[[], None]) -> None:
    """Have it done once half of the next payload has come to the pair's wire."""
    assert network.peers, "the link has not gone by way of the network"
    for wire in network.peers.values():
        wire.when_carried(MIDDLE_NBYTES, act)


TOLD = [(part, failure) for part in Part for failure in Failure if (part, failure) != (Part.PAIR, Failure.SILENCE)]
IDLE = [(part, failure) for part in (Part.STORE, Part.ALL) for failure in Failure]


def few(pairs: list[Any], *chosen: Any) -> list[Any]:
    """All of them as parameters; those that were not chosen run in `make verify` only."""
    return [pytest.param(*each, marks=() if each in chosen else pytest.mark.slow) for each in pairs]


@pytest.mark.parametrize(("part", "failure"), few(TOLD, (Part.PAIR, Failure.CUT), (Part.ALL, Failure.RESET)))
def test_g10_a_network_that_fails_mid_payload_loses_its_worker_only(
    fleet: StoreFleet, network: Network, part: Part, failure: Failure
) -> None:
    in_the_middle(network, failing(network, part, failure))
    fleet.follow(fleet.other, 2)
    fleet.victim.tell(follow_until_gone)
    with within(SOON):
        report = fleet.trainer.do(send, 2.0)
        fleet.followed(fleet.other)
        reason = fleet.victim.answer()

    # Without its store a link goes on until that is missed: its update may arrive before.
    assert report[0].kind in ((LOST, APPLIED) if part is Part.STORE else (LOST,))
    assert report[1].kind is APPLIED
    assert report[0].reason or report[0].kind is APPLIED
    assert "no sender any more" in reason
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]
    if part is Part.PAIR:
        _comes_back(fleet)
    else:
        fleet.victim.end()  # it has no store any more
        goes_on(fleet, 3)


def _comes_back(fleet: StoreFleet) -> None:
    fleet.victim.tell(follow_through, 3)
    fleet.follow(fleet.other, 3)
    fleet.trainer.do(add_worker, 0, endpoint)
    assert fleet.trainer.do(send, 3.0).ok
    fleet.followed(fleet.other)
    assert 3 == fleet.victim.answer()
    assert (3, {3.0}) == fleet.victim.do(holds)


def test_g10_a_pair_that_falls_silent_costs_the_deadline_and_a_new_link_brings_its_worker_back(
    fleet: StoreFleet, network: Network
) -> None:
    """Nothing is wrong with the worker, as far as the store tells: it is nobody's to say but the deadline's."""
    in_the_middle(network, failing(network, Part.PAIR, Failure.SILENCE))
    fleet.follow(fleet.other, 2)
    fleet.victim.tell(look)
    with within(SHORT + 5):
        report = fleet.trainer.do(send, 2.0, SHORT)
        fleet.followed(fleet.other)
        assert not fleet.victim.answer()

    assert (TIMED_OUT, APPLIED) == (report[0].kind, report[1].kind)
    assert (1, {1.0}) == fleet.victim.do(holds)
    fleet.trainer.do(abandon)
    _comes_back(fleet)


@pytest.mark.parametrize(("part", "failure"), few(IDLE, (Part.STORE, Failure.CUT)))
def test_g10_a_network_that_fails_idle_is_reported_by_the_next_send(
    fleet: StoreFleet, network: Network, part: Part, failure: Failure
) -> None:
    failing(network, part, failure)()
    fleet.follow(fleet.other, 2)
    fleet.victim.tell(follow_until_gone)
    with within(SOON):
        report = fleet.trainer.do(send, 2.0)
        fleet.followed(fleet.other)
        assert "no sender any more" in fleet.victim.answer()

    assert report[0].kind in ((LOST, APPLIED) if part is Part.STORE else (LOST,))
    assert report[1].kind is APPLIED
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]
    fleet.victim.end()
    goes_on(fleet, 3)


def test_g10_a_trainer_killed_in_the_middle_of_a_payload_is_reported(fleet: StoreFleet, network: Network) -> None:
    """What the kernel had taken of it still arrives, which may be the whole."""
    in_the_middle(network, lambda: os.kill(fleet.trainer.pid, signal.SIGKILL))
    for worker in (fleet.victim, fleet.other):
        worker.tell(follow_until_gone)
    fleet.trainer.tell(send, 2.0)
    with within(SOON):
        assert "no sender any more" in fleet.victim.answer()
        assert "no sender any more" in fleet.other.answer()
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]


def test_g10_a_handshake_over_a_network_that_swallows_it_times_out(crew: Crew, store: Any, network: Network) -> None:
    fleet = StoreFleet(crew, store.port, network.port)
    for worker in (fleet.victim, fleet.other):
        fleet.start_receiver(worker)
    network.store.fail(Failure.SILENCE)
    fleet.start_sender(fleet.trainer)
    fleet.follow(fleet.other, 1)
    report = fleet.trainer.do(send, 1.0, SHORT)

    fleet.followed(fleet.other)
    assert (TIMED_OUT, APPLIED) == (report[0].kind, report[1].kind)
    assert "never connected" in report[0].reason
    crew.end()
