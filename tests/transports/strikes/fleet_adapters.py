"""The subclasses of `fleets.Fleet` for pipes, RPC, and torch.distributed without and with a fan-out.

Every child process imports this module. The one for Ray is in `ray_adapters`, since importing Ray takes long.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import rpc_fleet
import store_fleet
from fleet import Crew, join
from fleets import APPLIED, TIMED_OUT, Child, Fleet, LocalTrainer, Order
from striking import Place, Strike, WorkerPoint, add_worker, in_parts, megabytes

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from weightsync.engine import parts
from weightsync.transports import rpc
from weightsync.transports.base import Link, Payloads
from weightsync.transports.pipe import framing, link
from weightsync.transports.store import heartbeat, stream

# ------------------------------------------------------------------------------------------------------- pipes


class InlineScheme(MultiProcessWeightSyncScheme):
    """Sends all payloads through the pipe itself, as over connections that cannot share memory."""

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Link:
        return link.PipeLink(endpoint, model_id, peer=peer, payloads=Payloads.INLINE)


PIPES = {"pipe": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme, "inline": InlineScheme}


class PipeFleet(Fleet):
    """Two child processes as workers; the trainer is the test's process."""

    # Here the worker has read the message, and has neither read nor mapped the payload.
    worker_payload = (Place(framing.__name__, "Inflow", "_memory_for"), Place(link.__name__, "MappedSegments", "find"))
    answered = (APPLIED,)

    def __init__(self, crew: Crew, scheme_class: Any) -> None:
        self._crew, self._scheme_class = crew, scheme_class
        self.trainer = LocalTrainer()
        self.victim, self.other = (Child(worker) for worker in crew.start(scheme_class(), 2))

    def receiver_order(self, worker: Any) -> Order:
        return join, (megabytes,)

    def sender_order(self) -> Order:
        return lead_over_pipes, (self._scheme_class(), [self.victim.pipe, self.other.pipe])

    def replace_victim(self) -> str:
        (worker,) = self._crew.start(self._scheme_class())
        self.victim = Child(worker)
        self.start_receiver(self.victim)
        self.trainer.do(add_worker, 0, lambda _: worker.pipe)
        return ""

    def close(self) -> None:
        self.trainer.close()


def lead_over_pipes(setup: Any, scheme: Any, pipes: list[Any]) -> None:
    setup.model = megabytes()
    setup.schemes.append(scheme)
    scheme.init_on_sender("policy", pipes=pipes, model=setup.model)
    setup.kept["sender"] = scheme.get_sender()


class PipePartsFleet(PipeFleet):
    """The trainer announces a slot's chunks while it packs them, and the workers hash them."""

    worker_payload = (Place(parts.__name__, "IncomingParts", "arrived", time=3),)

    def __init__(self, crew: Crew) -> None:
        super().__init__(crew, partial(SharedMemWeightSyncScheme, verify="digest"))

    def start(self) -> None:
        """Start, and send versions 2 and 3. Version 3 is the first whose slot all workers have mapped already."""
        super().start()
        for version in (2, 3):
            self.send_to_all(version)


# --------------------------------------------------------------------------------------------------------- RPC


class RpcFleet(Fleet):
    """Four ranks: the trainer, two workers and the trainer's successor. A rank that died cannot be replaced."""

    worker_payload = (Place(rpc.__name__, "", "_payload_of"),)
    trainer_payload = (Place(rpc.__name__, "", "begin", after=True),)

    def __init__(self, world: rpc_fleet.World) -> None:
        self.trainer = Child(world.trainer)
        self.victim, self.other, self._successor = (Child(worker) for worker in world.workers)

    def receiver_order(self, worker: Any) -> Order:
        return rpc_fleet.listen, (megabytes,)

    def sender_order(self) -> Order:
        return rpc_fleet.command, (["w0", "w1"], megabytes)

    def replace_victim(self) -> str:
        self.trainer.do(add_worker, 0, w0)
        return "cannot replace a rank that died"

    def successor(self) -> Any:
        return self._successor

    def retire(self) -> None:
        """Reset the world's processes, which are all alive, for the next test."""
        for process in (self.trainer, self.victim, self.other):
            process.do(rpc_fleet.retire)


def w0(_: Any) -> str:
    return "w0"


# ------------------------------------------------------------------------------------------- torch.distributed

#: Small enough that a payload of 4 MiB travels in several pieces.
PIECE_NBYTES = 2**20


class StoreFleet(Fleet):
    """A store in the test's process, and a trainer and two workers with separate connections to it."""

    worker_payload = (Place(stream.__name__, "Stream", "_read_piece", time=2),)
    trainer_payload = (Place(stream.__name__, "Stream", "_write_piece", time=2),)
    # The trainer never hears of a worker that died before its handshake.
    outcome_before_handshake = TIMED_OUT

    def __init__(self, crew: Crew, port: int, victims_port: int | None = None) -> None:
        self._crew, self._port = crew, port
        #: The port at which the victim reaches the store.
        self._victims_port = victims_port or port
        self.trainer, self.victim, self.other = (self._start() for _ in range(3))

    def _start(self) -> Child:
        (worker,) = self._crew.start(None)
        worker.do(use_small_pieces)
        return Child(worker)

    def outlast_stops(self) -> None:
        for process in (self.trainer, self.victim, self.other):
            process.do(never_miss_heartbeats)

    def receiver_order(self, worker: Any) -> Order:
        port, rank = (self._port, 2) if worker is self.other else (self._victims_port, 1)
        return store_fleet.meet, (port, rank, megabytes)

    def sender_order(self) -> Order:
        return store_fleet.lead, (self._port, 2, megabytes)

    def replace_victim(self) -> str:
        self.victim, self._victims_port = self._start(), self._port
        self.start_receiver(self.victim)
        self.trainer.do(add_worker, 0, endpoint)
        return ""

    def relink_victim(self) -> None:
        """Have the trainer add the victim, which is alive, over a new link."""
        self.trainer.do(add_worker, 0, endpoint)

    def successor(self) -> Child:
        return self._start()


class FanoutFleet(StoreFleet):
    """The trainer sends payloads only to the victim, which passes them on to the other worker."""

    def __init__(self, crew: Crew, port: int) -> None:
        super().__init__(crew, port)
        self._listening = 0

    def start_receiver(self, worker: Any, strike: Strike | None = None) -> None:
        super().start_receiver(worker, strike)
        self._listening += strike is None or strike.at is not WorkerPoint.AHEAD

    def sender_order(self) -> Order:
        return store_fleet.lead_tree, (self._port, self._listening, megabytes)


class StorePartsFleet(StoreFleet):
    """The trainer sends a payload's first chunks while it packs the rest."""

    worker_payload = (Place(parts.__name__, "IncomingParts", "arrived", time=3),)
    trainer_payload = (Place(parts.__name__, "OutgoingParts", "_send", time=3),)

    def _start(self) -> Child:
        child = super()._start()
        child.do(in_parts)
        return child

    def start(self) -> None:
        """Start, and send versions 2 and 3, as over pipes. Here all versions but the first travel in parts."""
        super().start()
        for version in (2, 3):
            self.send_to_all(version)


def use_small_pieces(_: Any) -> None:
    stream.PIECE_NBYTES = PIECE_NBYTES  # type: ignore[misc]


def never_miss_heartbeats(_: Any) -> None:
    """Make this process never report a peer lost because its heartbeat stopped."""
    heartbeat.ROUNDS = sys.maxsize  # type: ignore[misc]


def endpoint(setup: Any) -> Any:
    return setup.kept["store"], 1
