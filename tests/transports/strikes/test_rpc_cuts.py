"""A network that fails between one worker and the rest, in the middle of a send, over torch's RPC (G10).

TensorPipe takes no proxy. Its ranks tell each other through the store where they listen, and that is rewritten on its
way (tests/network.py), so that the connections that carry calls pass through wires of ours. What torch does not allow:
those that carry tensors are agreed upon over the first ones, and go past any wire (`basic` channels, here,
since the others are shared memory). So a cut ends calls, not tensors.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import PATIENCE
from fleets import RpcFleet
from judging import LOST, TIMED_OUT, all_sent, goes_on, kinds, some
from rpc_fleet import World, enter
from rpc_over import TCP
from severed import HERE, Failure, Network
from striking import SHORT, SOON, abandon, holds, look, remove_worker, send, within

from weightsync import OutcomeKind
from weightsync.clock import Deadline

pytestmark = [pytest.mark.slow, pytest.mark.rpc]

#: On one machine TensorPipe would take shared memory, which no network carries.
OVER_TCP = {**TCP, "rpc_timeout": PATIENCE}


class WiredWorld(World):
    """A world whose worker 0 is reached, and reaches others, by way of a network."""

    network: Network

    def begin(self) -> None:
        """Let all of them join: worker 0 through the network."""
        with socket.create_server((HERE, 0)) as free:
            port = free.getsockname()[1]
        everybody = [self.trainer, *self.workers]
        for rank, (name, process) in enumerate(zip(["trainer", *self.names], everybody, strict=True)):
            if rank == 1:
                _wait_for(port)  # the trainer hosts the store
                self.network = Network(port)
            address = f"tcp://{HERE}:{self.network.port if rank == 1 else port}"
            process.tell(enter, name, rank, len(everybody), {"init_method": address, **OVER_TCP})
        for process in everybody:
            process.answer()


def _wait_for(port: int) -> None:
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((HERE, port)):
            return
    raise AssertionError("the trainer hosts no store")


@pytest.fixture
def wired(forkserver: Any, tmp_path: Path) -> Iterator[WiredWorld]:
    made = WiredWorld(forkserver, tmp_path, 3)
    yield made
    made.end()
    made.network.end()


@pytest.mark.parametrize("failure", some(Failure, Failure.CUT))
def test_g10_a_network_that_fails_as_a_call_begins(wired: WiredWorld, failure: Failure) -> None:
    """Cut or reset: its worker is lost at once. Silent: it costs the deadline, since torch tells nobody."""
    fleet = RpcFleet(wired)
    for worker in (fleet.victim, fleet.other):
        fleet.start_receiver(worker)
    fleet.start_sender(fleet.trainer)
    all_sent(fleet, 1)
    wires = list(wired.network.peers.values())
    for wire in wires:
        wire.when_carried(1, lambda: [each.fail(failure) for each in wires])
    fleet.follow(fleet.other, 2)
    fleet.victim.tell(look)
    with within(SOON):
        report = fleet.trainer.do(send, 2.0, SHORT if failure is Failure.SILENCE else PATIENCE)
        fleet.followed(fleet.other)
        fleet.victim.answer()

    assert (TIMED_OUT if failure is Failure.SILENCE else LOST, OutcomeKind.APPLIED) == kinds(report)
    assert fleet.victim.do(holds) in [(1, {1.0}), (2, {2.0})]
    if failure is Failure.SILENCE:
        fleet.trainer.do(abandon)
        fleet.trainer.do(remove_worker, 0)
        fleet.follow(fleet.other, 3)
        assert fleet.trainer.do(send, 3.0).ok
        fleet.followed(fleet.other)
    else:
        assert "RPC can no longer reach worker 0" in report[0].reason
        goes_on(fleet, 3)
