"""Fleets whose victim is behind a network that can fail: over TCP pipes, RPC and torch.distributed."""

from __future__ import annotations

import contextlib
import enum
import socket
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from typing import Any

from fleet import PATIENCE, Crew, free_port
from fleet_adapters import PipeFleet, RpcFleet, StoreFleet, lead_over_pipes
from fleets import Fleet, Order
from proxy_network import LOOPBACK, Failure, Network, Wire
from rpc_fleet import World, enter
from rpc_processes import TCP_ONLY

from weightsync import MultiProcessWeightSyncScheme
from weightsync.clock import Deadline

#: Forces TCP: within one machine TensorPipe would use shared memory.
OVER_TCP = {**TCP_ONLY, "rpc_timeout": PATIENCE}
MIDDLE_NBYTES = 2 * 2**20
AUTHKEY = b"a secret of both"


class Part(enum.StrEnum):
    """The part of the network that fails: the connection to the store, the link's connections, or both."""

    STORE = "store"
    LINK = "link"
    ALL = "all"


@dataclass
class Cut:
    """A fleet that serves version 1, and the network between its victim and the others."""

    fleet: Fleet
    links: Callable[[], list[Wire]]
    store: Wire | None = None
    #: The bytes of a payload that pass before the network fails in the middle of it.
    carried: int = MIDDLE_NBYTES
    #: Whether payloads pass through the network, so that a cut tears them.
    tears: bool = True
    #: Whether a worker notices that its link was cut.
    heard: bool = True
    #: Adds the victim again over a new link. None if its transport cannot.
    readmit: Callable[[], None] | None = None

    def fail(self, part: Part, failure: Failure) -> None:
        """Let this part of the network fail."""
        if part is not Part.LINK:
            assert self.store is not None
            self.store.fail(failure)
        for wire in self.links() if part is not Part.STORE else ():
            wire.fail(failure)

    def in_the_middle(self, act: Callable[[], None]) -> None:
        """Call ``act`` once a wire of the link has carried `carried` bytes of the next payload."""
        wires = self.links()
        assert wires, "the link does not pass through the network"
        for wire in wires:
            wire.when_carried(self.carried, act)


class TcpFleet(PipeFleet):
    """Workers behind pipes of which the victim's is a TCP connection, as between hosts, through a wire."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(crew, MultiProcessWeightSyncScheme)
        with Listener((LOOPBACK, 0), authkey=AUTHKEY) as listener:
            self.wire = Wire(listener.address[1])
            self.victim.tell(dial, self.wire.port)
            self._far_end = listener.accept()
            self.victim.answer()

    def sender_order(self) -> Order:
        return lead_over_pipes, (MultiProcessWeightSyncScheme(), [self._far_end, self.other.pipe])

    def close(self) -> None:
        super().close()
        self._far_end.close()
        self.wire.end()


def dial(setup: Any, port: int) -> None:
    """Replace the worker's pipe to the trainer by a TCP connection."""
    setup.pipe.close()
    setup.pipe = Client((LOOPBACK, port), authkey=AUTHKEY)


class WiredWorld(World):
    """An RPC world in which all calls to and from worker 0 pass through a network.

    TensorPipe has no option for a proxy. Its ranks announce their addresses in the store, and tests/proxy_network.py
    rewrites these addresses in transit, so that the connections of calls pass through wires. TensorPipe negotiates the
    connections for tensors over those of the calls, and these bypass the wires: a cut ends calls, not transfers of
    tensors.
    """

    network: Network

    def begin(self) -> None:
        """Let all processes join the world, worker 0 through the network."""
        port = free_port()
        everybody = [self.trainer, *self.workers]
        for rank, (name, process) in enumerate(zip(["trainer", *self.names], everybody, strict=True)):
            if rank == 1:
                _wait_for(port)  # the trainer hosts the store
                self.network = Network(port)
            address = f"tcp://{LOOPBACK}:{self.network.port if rank == 1 else port}"
            process.tell(enter, name, rank, len(everybody), {"init_method": address, **OVER_TCP})
        for process in everybody:
            process.answer()

    def end(self) -> None:
        super().end()
        self.network.end()


def _wait_for(port: int) -> None:
    deadline = Deadline(PATIENCE)
    while not deadline.passed:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
            return
    raise AssertionError("the trainer hosts no store")


def over_tcp_pipes(crew: Crew) -> Cut:
    fleet = TcpFleet(crew)
    return Cut(fleet, lambda: [fleet.wire])


def over_rpc(world: WiredWorld) -> Cut:
    return Cut(RpcFleet(world), lambda: list(world.network.peers.values()), carried=1, tears=False, heard=False)


def over_store(crew: Crew, port: int, network: Network) -> Cut:
    """A fleet whose worker 0 announces its address in the store; tests/proxy_network.py rewrites it in transit."""
    fleet = StoreFleet(crew, port, network.port)
    return Cut(fleet, lambda: list(network.peers.values()), network.store, readmit=fleet.relink_victim)
