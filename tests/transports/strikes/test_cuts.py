"""The network between one worker and the rest fails, idle and mid-payload, over each transport (G10).

The connections of the link, those to the store, or both are cut, reset, or fall silent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any

import pytest
from fleet import serve_until_gone
from fleets import APPLIED, LOST, MARKS, TIMED_OUT, kinds
from networks import Cut, Part
from proxy_network import Failure
from striking import abandon, follow_through, holds, look, send

STORE, LINK, ALL = Part
CUT, RESET, SILENCE = Failure
CONNECTION_ENDING = (CUT, RESET)
#: The cases that run in `make test`. The others run in `make verify`.
DAILY = {("idle", "store", STORE, CUT), ("idle", "store", STORE, SILENCE), ("mid-payload", "tcp", LINK, CUT)}


def over(when: str, **transports: Iterable[tuple[Part, Failure]]) -> Any:
    """Parametrize over transports behind a network, the part of the network that fails, and the kind of failure."""
    cases = [
        pytest.param(
            transport,
            part,
            failure,
            id=f"{transport}-{part}-{failure}",
            marks=(
                *MARKS.get(transport, ()),
                *(() if (when, transport, part, failure) in DAILY else (pytest.mark.slow,)),
            ),
        )
        for transport, failing in transports.items()
        for part, failure in failing
    ]
    return pytest.mark.parametrize(("cut", "part", "failure"), cases, indirect=["cut"])


@over(
    "mid-payload",
    tcp=[(LINK, failure) for failure in CONNECTION_ENDING],
    rpc=[(LINK, failure) for failure in CONNECTION_ENDING],
    store=[(part, failure) for part in Part for failure in Failure if (part, failure) != (LINK, SILENCE)],
)
def test_g10_a_network_failure_mid_payload_loses_only_the_worker_behind_it(
    cut: Cut, part: Part, failure: Failure
) -> None:
    cut.in_the_middle(lambda: cut.fail(part, failure))
    _is_reported(cut, part)
    if part is not LINK:
        cut.fleet.victim.end()  # its connection to the store is gone
    elif cut.readmit is not None:
        _comes_back(cut)
        return
    cut.fleet.goes_on(3)


@over(
    "idle",
    tcp=[(LINK, failure) for failure in CONNECTION_ENDING],
    store=[(part, failure) for part in (STORE, ALL) for failure in Failure],
)
def test_g10_a_network_failure_between_sends_is_reported_by_the_next_send(
    cut: Cut, part: Part, failure: Failure
) -> None:
    cut.fail(part, failure)
    _is_reported(cut, part)
    if part is not LINK:
        cut.fleet.victim.end()
    cut.fleet.goes_on(3)


def _is_reported(cut: Cut, part: Part) -> None:
    """Send version 2, and check that the victim is lost, with a reason, and that the other worker applies it."""
    fleet = cut.fleet
    fleet.follow(fleet.other, 2)
    fleet.victim.tell(serve_until_gone if cut.heard else look)
    report = fleet.trainer.do(send, 2.0)
    fleet.followed(fleet.other)
    reason = fleet.victim.answer()

    # A link without its store works until the loss is noticed: the update may arrive before that.
    assert report[0].kind in ((LOST, APPLIED) if part is STORE else (LOST,))
    assert report[1].kind is APPLIED
    assert report[0].reason or report[0].kind is APPLIED
    if cut.heard:
        assert "no sender any more" in reason
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]


def _comes_back(cut: Cut) -> None:
    """Add the victim over a new link, and check that it applies version 3."""
    fleet = cut.fleet
    assert cut.readmit is not None
    fleet.victim.tell(follow_through, 3)
    fleet.follow(fleet.other, 3)
    cut.readmit()
    assert fleet.trainer.do(send, 3.0).ok
    fleet.followed(fleet.other)
    assert 3 == fleet.victim.answer()
    assert (3, {3.0}) == fleet.victim.do(holds)


@over("silent", tcp=[(LINK, SILENCE)], rpc=[(LINK, SILENCE)], store=[(LINK, SILENCE)])
def test_g10_a_worker_behind_a_silent_link_times_out_and_later_sends_succeed(
    cut: Cut, part: Part, failure: Failure
) -> None:
    """Since the connection does not end, only the deadline shows that the worker is unreachable."""
    fleet = cut.fleet
    cut.in_the_middle(lambda: cut.fail(part, failure))
    fleet.victim.tell(look)
    report = fleet.send_without_the_victim(2)
    fleet.victim.answer()

    assert (TIMED_OUT, APPLIED) == kinds(report)
    assert fleet.victim.do(holds) in [(1, {1.0}), *([] if cut.tears else [(2, {2.0})])]
    fleet.trainer.do(abandon)
    if cut.readmit is None:
        fleet.goes_on_without_the_victim(3)
    else:
        _comes_back(cut)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("cut", ["store"], indirect=True)
def test_g10_a_trainer_killed_mid_payload_is_reported_by_each_worker(cut: Cut) -> None:
    """The bytes that the kernel has already taken still arrive, possibly the whole payload."""
    fleet = cut.fleet
    cut.in_the_middle(lambda: os.kill(fleet.trainer.pid, signal.SIGKILL))
    for worker in (fleet.victim, fleet.other):
        worker.tell(serve_until_gone)
    fleet.trainer.tell(send, 2.0)

    assert "no sender any more" in fleet.victim.answer()
    assert "no sender any more" in fleet.other.answer()
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]


@pytest.mark.slow
@pytest.mark.gloo
def test_g10_a_worker_whose_handshake_is_lost_by_the_network_times_out(unstarted: Cut) -> None:
    fleet = unstarted.fleet
    for worker in (fleet.victim, fleet.other):
        fleet.start_receiver(worker)
    unstarted.fail(STORE, SILENCE)
    fleet.start_sender(fleet.trainer)
    report = fleet.send_without_the_victim(1)

    assert (TIMED_OUT, APPLIED) == kinds(report)
    assert "never connected" in report[0].reason
