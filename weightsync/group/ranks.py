"""Workers as ranks of a running `torch.distributed` world: rank 0 is the trainer, and each other rank is a worker.

The ranks belong to their launcher, torchrun for example: the group does not start, restart or kill them. Rank 0 leaves
a note for each rank in the world's store; from then on each has its own connection.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import nn

from weightsync.clock import Deadline, Timeout
from weightsync.engine.driver import Shield
from weightsync.errors import AckTimeoutError, ConfigurationError, TransportError
from weightsync.group.channel import TrainerEnd
from weightsync.group.function import require_run
from weightsync.group.launcher import GroupArguments, Launched
from weightsync.group.members import MemberState, Running
from weightsync.group.reception import ChannelListener, Invitation
from weightsync.group.stack_dump import StackDump
from weightsync.group.steps import Staleness
from weightsync.group.worker import Job, Plan, Worker, live
from weightsync.keys import SharedKey
from weightsync.options import OnStale
from weightsync.schemes.distributed import DistributedWeightSyncScheme
from weightsync.transports.exposure import is_loopback
from weightsync.transports.store.store import Client, PrefixStore, Store, base_of
from weightsync.transports.store.stream import own_address

#: Seconds between two looks for the trainer's note.
_LOOK_SECONDS: Final = 0.05
_PREFIX: Final = "weightsync group"
#: The note that a group is closed.
_CLOSED: Final = "closed"


class _World(NamedTuple):
    """The world that this process is a rank of."""

    store: Store
    rank: int
    size: int


def _world() -> _World:
    """Raises ConfigurationError: there is none, or it has no TCPStore."""
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigurationError("torch.distributed is not initialised here: call init_process_group() first.")
    # torch has no public name for the store of a world that was made from an address or by torchrun.
    store = dist.distributed_c10d._get_default_store()
    base_of(store)
    return _World(store, dist.get_rank(), dist.get_world_size())


def _name_of(number: int) -> str:
    return f"{_PREFIX} {number}"


def _store_of_group(world: _World, number: int) -> PrefixStore:
    return PrefixStore(_name_of(number), world.store)


class RankProcess:
    """A rank, as far as the group knows it: its channel. It is dead when that has ended.

    Args:
        rank: its rank.
        channel: the trainer's end.
    """

    fate = "given up"

    def __init__(self, rank: int, channel: TrainerEnd) -> None:
        self.handle = rank
        self._channel = channel

    def fileno(self) -> int:
        """Readable when the channel is."""
        return self._channel.fileno()

    @property
    def dead(self) -> bool:
        """Whether its channel has ended."""
        return self._channel.ended

    def how_it_ended(self, state: MemberState) -> str:  # noqa: ARG002 - its launcher says why
        """How it ended, in words, once it is dead."""
        return f"its connection has ended: the process of rank {self.handle} is dead, or its host cannot be reached"

    def stack_dump(self) -> StackDump:
        """Unknown: a rank may be on any host."""
        return StackDump()

    def join(self, deadline: Deadline) -> None:
        """There is nothing to wait for: the group has closed its channel, and the process is its launcher's."""

    def kill(self) -> None:
        """Give the rank up: it wakes with `SenderClosed` at its next `put`, or where it waits for a version."""
        self._channel.close()

    def close(self) -> None:
        """Give the rank up."""
        self._channel.close()


def _require_rank_0(world: _World) -> None:
    """Raise ConfigurationError: this is not rank 0 of a world with more ranks."""
    if world.size == 1:
        raise ConfigurationError(
            "this world has one rank only, and the group needs another one as its worker: start two or more, for "
            "example by torchrun --nproc-per-node 2. Nothing was started."
        )
    if world.rank != 0:
        raise ConfigurationError(
            f"this is rank {world.rank} of {world.size}: rank 0 makes the WorkerGroup, and each other rank calls "
            "run_worker(). Nothing was started."
        )


class RankLauncher:
    """Leaves a note for each rank, which connects on its own.

    Args:
        scheme: the scheme over torch.distributed.
        arguments: what the user has asked for.

    Raises:
        ConfigurationError: this is not rank 0 of a world with more ranks; or an argument is not for ranks.
    """

    remedy = "The group cannot restart a rank: torchrun's --max-restarts starts the whole world again."

    def __init__(self, scheme: DistributedWeightSyncScheme, arguments: GroupArguments) -> None:
        if arguments.run is not None:
            raise ConfigurationError(
                "run= is given, but the ranks are processes of their own: pass None here, and call run_worker(run, "
                "model) in the other ranks. Nothing was started."
            )
        arguments.refuse_others("make_model", "max_restarts", "ctx", "actor_options")
        self.scheme = scheme
        self._world = _world()
        _require_rank_0(self._world)
        self.size = self._world.size - 1
        if arguments.num_workers not in (None, self.size):
            raise ConfigurationError(
                f"num_workers= is {arguments.num_workers}, but {self.size} other ranks are in the world: leave it out. "
                "Nothing was started."
            )
        self._terms = {
            "model_id": arguments.model_id,
            "capacity": arguments.capacity,
            "max_staleness": arguments.staleness.limit,
            "on_stale": arguments.staleness.on_stale.value,
            "names": arguments.names,
        }
        self._reception: ChannelListener | None = None
        #: Where notes are left, and the key before theirs once the group has a number.
        self._notes: Client | None = None
        self._name = ""

    def open(self) -> None:
        """Listen for the ranks' channels: see `Launcher.open`."""
        self._notes = notes = Client(self._world.store)
        host = base_of(self._world.store).host
        local = host == "localhost" or is_loopback(host)
        self._reception = ChannelListener(own_address(local, notes.own_address), SharedKey.given(self.scheme._key))
        # Last: the ranks wait for a note of each number. An interrupt would keep it from being left.
        with Shield(lambda: None):
            number = notes.add(_PREFIX, 1)
            self._name, self._store = _name_of(number), _store_of_group(self._world, number)

    def init_arguments(self, lives: Sequence[Launched]) -> Mapping[str, Any]:
        """See `Launcher.init_arguments`."""
        return {"store": self._store, "num_workers": len(lives)}

    def launch(self, index: int, restarts: int) -> Launched:  # noqa: ARG002 - it has one life
        """Leave the note for one rank in the store: see `Launcher.launch`."""
        if self._reception is None or self._notes is None:
            raise TransportError("the group is closed.")
        rank = index + 1
        invitation, channel = self._reception.expect()
        reach = {"host": invitation.host, "port": invitation.port, "token": invitation.token.hex()}
        self._notes.set(f"{self._name}/{rank}", json.dumps({**self._terms, **reach}).encode())
        return Launched(Running(RankProcess(rank, channel), channel, channel.announce), (self._store, rank), None)

    def close(self, unreached: Sequence[Launched]) -> None:  # noqa: ARG002 - ranks leave nothing to close
        """Stop listening, and leave a note that the group is closed."""
        notes, self._notes = self._notes, None
        if notes is not None:
            with contextlib.closing(notes), contextlib.suppress(TransportError):
                if self._name:
                    notes.set(f"{self._name}/{_CLOSED}", b"")
        if self._reception is not None:
            self._reception.close()
            self._reception = None


def run_worker(
    run: Callable[[Worker], object],
    model: nn.Module,
    *,
    scheme: DistributedWeightSyncScheme | None = None,
    timeout: float | Timeout | None = Timeout.START,
) -> None:
    """Be a worker of the `WorkerGroup` of rank 0, in another rank of a running `torch.distributed` world.

    The n-th call in a rank belongs to the n-th group that rank 0 starts. It returns when ``run`` has returned, or was
    ended by the end of the group, or if the group was closed before this rank had joined it.

    Args:
        run: ``run(worker)`` is called once the model has the trainer's weights.
        model: this rank's own model, laid out like the trainer's. The weights are received into it.
        scheme: a new `DistributedWeightSyncScheme` like the trainer's, if that was given a key or a backend.
        timeout: seconds to wait for rank 0 to start its group; None: forever; default: five times
            `WEIGHTSYNC_TIMEOUT` or 60.

    Raises:
        ConfigurationError: there is no such world, or this is its rank 0; ``model`` or ``scheme`` is of another type;
            or ``run`` cannot be called with a worker, or is an async or a generator function.
        AckTimeoutError: rank 0 has started no group in time.
        TransportError: rank 0 cannot be reached.
        BaseException: what ``run`` has raised. The trainer has its traceback.
    """
    require_run(run)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"model= is {model!r}: give this rank's own nn.Module, with the names and shapes of the trainer's."
        )
    if scheme is not None and not isinstance(scheme, DistributedWeightSyncScheme):
        raise ConfigurationError(f"scheme= is {scheme!r}: give a new DistributedWeightSyncScheme, or leave it out.")
    world, deadline = _world(), Deadline(timeout)
    if world.rank == 0:
        raise ConfigurationError("this is rank 0, the trainer: make a WorkerGroup here, and do not call run_worker().")
    joined = _await_note(world, deadline)
    if joined is None:
        return
    store, note = joined
    staleness = Staleness(note["max_staleness"], OnStale(note["on_stale"]))
    names = None if note["names"] is None else tuple(note["names"])
    plan = Plan(run, lambda: model, note["model_id"], note["capacity"], staleness, names)
    try:
        error = live(_job_of(note, plan, store, world.rank, scheme))
    except TransportError:
        if _is_closed(store):
            return
        raise
    if error is not None:
        raise error


def _job_of(
    note: dict[str, Any], plan: Plan, store: PrefixStore, rank: int, scheme: DistributedWeightSyncScheme | None
) -> Job:
    """This rank's job, with the channel to which rank 0's note invites it."""
    own_scheme = DistributedWeightSyncScheme() if scheme is None else scheme
    key = SharedKey.given(own_scheme._key)
    invitation = Invitation(note["host"], note["port"], bytes.fromhex(note["token"]), key)
    return Job(plan, rank - 1, 0, own_scheme, {"store": store, "rank": rank}, invitation, None)


def _is_closed(store: PrefixStore) -> bool:
    """Whether rank 0 has closed the group of this store."""
    with contextlib.suppress(TransportError), contextlib.closing(Client(store)) as client:
        return client.present(_CLOSED)
    return False


def _await_note(world: _World, deadline: Deadline) -> tuple[PrefixStore, dict[str, Any]] | None:
    """The store of the next group, and this rank's note; None if the group was closed before it left the note."""
    with contextlib.closing(Client(world.store)) as client:
        joined_key = f"{_PREFIX}s of rank {world.rank}"
        number = client.add(joined_key, 0) + 1
        key, closed_key = f"{_name_of(number)}/{world.rank}", f"{_name_of(number)}/{_CLOSED}"
        while not client.present(key):
            if client.present(closed_key):
                client.add(joined_key, 1)
                return None
            if deadline.passed:
                raise AckTimeoutError(
                    f"rank 0 has not started its WorkerGroup number {number} in time. run_worker() may be called again."
                )
            threading.Event().wait(_LOOK_SECONDS)
        client.add(joined_key, 1)
        note: dict[str, Any] = json.loads(client.await_value(key))
    return _store_of_group(world, number), note
