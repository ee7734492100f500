"""New links: a sender announces each under the worker's key, and the worker accepts it once."""

from __future__ import annotations

import hmac
import itertools
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from weightsync.transports.process import PerProcess
from weightsync.transports.sealing import Identity, Reason, announcement, new_name, refusal
from weightsync.transports.store import heartbeat
from weightsync.transports.store.fanout import Fanout
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.mailbox import Outbox, Side
from weightsync.transports.store.seals import Guard, NoGuard, SenderGuard, WorkerGuard
from weightsync.transports.store.store import DIAL, Client, Store, StoreEndpoint, base_of

_NAME: Final = re.compile("[0-9a-f]{32}")
_TAKER: Final = re.compile("[0-9a-f]{32} [0-9a-f]{32}")
_WITHDRAWN: Final = "closed"
#: Seconds that a goodbye waits for a link that is being announced: longer than its connection to the store may take.
_PATIENCE: Final = DIAL.total_seconds() + 5.0
_NO_RECEIVER: Final = (
    "rank {rank} has a receiver of {known} in this store, and none of {model_id!r} so far: "
    "give both sides the same model_id"
)
_UNTAKEN: Final = (
    "no process has taken the link at rank {rank} of this store: is its process running, has it called "
    "init_on_worker(..., rank={rank}) with the same store, and does it call receive()?"
)


class WorkerLocation(NamedTuple):
    """Identifies a worker at a store."""

    host: str
    port: int
    #: The worker's key there: see `base_key`.
    key: str


def base_key(model_id: str, rank: int) -> str:
    """The key under which links to the worker of that rank are announced."""
    return f"weightsync/{model_id}/{rank}"


def announced_key(base: str, number: int) -> str:
    """The key of one announcement to the worker with that key."""
    return f"{base}/announced/{number}"


def worker_location(endpoint: StoreEndpoint, model_id: str) -> WorkerLocation:
    """Identifies the worker at an endpoint."""
    store = base_of(endpoint.store)
    return WorkerLocation(store.host, store.port, base_key(model_id, endpoint.rank))


class _OngoingAnnouncements(PerProcess):
    """The links that this process is announcing. A goodbye to the same worker waits for them.

    So a worker that gets a new link sees it before the end of the old one, after which it might leave.
    """

    def _begin(self) -> None:
        #: Each event is set once its link is announced, or never will be.
        self._pending: dict[WorkerLocation, list[threading.Event]] = {}

    def begin(self, location: WorkerLocation) -> threading.Event:
        """Add a link: see `end`."""
        settled = threading.Event()
        with self._lock:
            self._pending.setdefault(location, []).append(settled)
        return settled

    def end(self, location: WorkerLocation, settled: threading.Event) -> None:
        """Note that a link is announced, or never will be. May be called again."""
        settled.set()
        with self._lock:
            pending = self._pending.get(location, [])
            if settled in pending:
                pending.remove(settled)
            if not pending:
                self._pending.pop(location, None)

    def wait(self, location: WorkerLocation) -> None:
        """Return once all links are announced that were begun before, or after a while."""
        with self._lock:
            begun = tuple(self._pending.get(location, ()))
        for settled in begun:
            settled.wait(_PATIENCE)


_under_way = _OngoingAnnouncements()


class _Announcement:
    """One link of a sender, from its announcement in the store until the worker takes it."""

    def __init__(self, endpoint: StoreEndpoint, model_id: str) -> None:
        self.name = new_name()
        self.identity = _identity(endpoint, model_id, self.name)
        self._rank, self._model_id = endpoint.rank, model_id
        key = endpoint.key
        self._announced = self.name if key is None else f"{self.name} {announcement(key, self.identity)}"
        self._where = worker_location(endpoint, model_id)
        self._reads_models = Models.are_readable_in(endpoint.store)
        self._settled = _under_way.begin(self._where)

    def settle(self) -> None:
        """No goodbye is to wait for this link any longer: it is announced, or never will be."""
        _under_way.end(self._where, self._settled)

    def announce(self, client: Client) -> None:
        """Write the link's name to the first free announcement."""
        # Not a counter: a sender may die between counting and writing, and the worker would wait forever. Also not a
        # hint at the newest link: any client could write it, and the worker reads all announcements in turn anyway.
        try:
            Models(self._rank, SENDERS).add(client, self._model_id)  # first: a worker that takes the link removes it
            for number in itertools.count():
                place = announced_key(self._where.key, number)
                if client.value(place) is None and client.claim(place, self._announced) == self._announced:
                    break
        finally:  # if the store is gone, it never will be announced: no goodbye is to wait for that
            self.settle()

    def withdraw(self, client: Client) -> None:
        """Claim the link, so that no worker can accept it."""
        self.settle()
        if client.claim(_taken_key(self.name), _WITHDRAWN, _is_taker_value) == _WITHDRAWN:
            Models(self._rank, SENDERS).remove(client, self._model_id)

    def wait_for_others(self) -> None:
        """Wait until the links whose announcement began before are announced."""
        _under_way.wait(self._where)

    def remark(self, client: Client, follow: Callable[[str], None]) -> str:
        """A remark for a send that times out: the models that the worker listens for, if this is none of them.

        Follows the process that has taken the link: it may die before it says who it is.
        """
        if not self._reads_models:
            return ""
        taken = (client.value(_taken_key(self.name)) or b"").decode("ascii", "replace")
        if _TAKER.fullmatch(taken):
            follow(taken.partition(" ")[0])
        known = Models(self._rank, RECEIVERS).without(client, self._model_id)
        return known and _NO_RECEIVER.format(rank=self._rank, known=known, model_id=self._model_id)


def sender_link(endpoint: StoreEndpoint, model_id: str, peer: str, fanout: Fanout | None = None) -> StoreLink:
    """The sender's end of a new link, announced to the worker.

    Args:
        fanout: what all links of the sender share; None: each payload goes over its own link.

    Raises:
        ConfigurationError: the backend is not available here.
        TransportError: no descriptor or thread is left.
    """
    endpoint.warn_if_exposed()
    announcement = _Announcement(endpoint, model_id)
    key = endpoint.key
    guard: Guard = NoGuard(peer) if key is None else SenderGuard(key, announcement.identity, peer)
    untaken = _UNTAKEN.format(rank=endpoint.rank)
    side = Side(
        rank=0,
        writes="down",
        reads="up",
        peer=peer,
        introduced=announcement.announce,  # last: a sender that died in between would be watched by nobody
        leave=announcement.withdraw,
        before_goodbye=announcement.wait_for_others,
        remark=announcement.remark,
        untaken=untaken,
        unconnected=announcement.settle,
    )
    try:
        return StoreLink(endpoint, announcement.name, side, guard, fanout=fanout)
    except BaseException:
        announcement.settle()
        raise


def worker_link(
    endpoint: StoreEndpoint,
    model_id: str,
    name: str,
    sender_left: Callable[[], None],
    before_end: Callable[[Client], None],
) -> StoreLink:
    """The worker's end of a link that it has accepted. Raises TransportError: no descriptor or thread is left."""
    side = Side(rank=1, writes="up", reads="down", peer="the sender", peer_left=sender_left, before_end=before_end)
    key, identity = endpoint.key, _identity(endpoint, model_id, name)
    guard: Guard = NoGuard("the sender") if key is None else WorkerGuard(key, identity)
    return StoreLink(endpoint, name, side, guard)


def decline(client: Client, name: str) -> None:
    """Tell the sender of an accepted link that there is no other end. Raises TransportError: the store is gone."""
    Outbox(client, f"weightsync/link/{name}/up").shut()


@dataclass(frozen=True, slots=True)
class Announced:
    """An announcement that a sender wrote under the worker's key."""

    name: str
    #: Proves that the sender has the key; empty if it has none.
    proof: str

    @classmethod
    def of(cls, written: str) -> Announced | None:
        """The announcement in a value; None if no sender wrote it."""
        name, _, proof = written.partition(" ")
        return cls(name, proof) if _NAME.fullmatch(name) else None

    def refusal_reason(self, endpoint: StoreEndpoint, model_id: str) -> Reason | None:
        """Why the sender is refused; None if it is not."""
        if endpoint.key is None:
            return Reason.WORKER_HAS_NONE if self.proof else None
        if not self.proof:
            return Reason.SENDER_HAS_NONE
        wanted = announcement(endpoint.key, _identity(endpoint, model_id, self.name))
        # Compared as bytes: text from another program may be anything.
        fits = hmac.compare_digest(self.proof.encode(errors="replace"), wanted.encode())
        return None if fits else Reason.OTHER_KEY

    def refuse(self, client: Client, reason: Reason) -> None:
        """Tell the sender that it is refused. Raises TransportError: the store is gone."""
        Outbox(client, f"weightsync/link/{self.name}/up").put(refusal(reason))


def _identity(endpoint: StoreEndpoint, model_id: str, name: str) -> Identity:
    return Identity("store", model_id, str(endpoint.rank), name)


def claim_link(client: Client, name: str) -> bool:
    """Claim an announced link. Returns whether it is ours now: each is accepted once."""
    mine = f"{heartbeat.process_name()} {uuid.uuid4().hex}"
    return client.claim(_taken_key(name), mine, _is_taker_value) == mine


def _taken_key(name: str) -> str:
    """The key for who has accepted a link, or that it was withdrawn."""
    return f"weightsync/link/{name}/taken"


def _is_taker_value(value: str) -> bool:
    return value == _WITHDRAWN or _TAKER.fullmatch(value) is not None


#: The models whose senders wait for a worker, and those that have had a receiver.
SENDERS: Final = "senders"
RECEIVERS: Final = "receivers"
#: The most models that are read, and the longest name: any client of the store may write here.
_MAX_MODELS: Final = 32
_MAX_NAME_LENGTH: Final = 200


class Models:
    """A list in the store."""

    def __init__(self, rank: int, whose: str) -> None:
        self._key = f"weightsync/rank/{rank}/{whose}"

    @staticmethod
    def are_readable_in(store: Store) -> bool:
        """Whether the connection of a heartbeat finds the lists that are written through that store.

        It has no prefix, and would find those of another group.
        """
        return store is base_of(store)

    def add(self, client: Client, model_id: str) -> None:
        """Add a model, unless it is there. Raises TransportError: the store is gone."""
        for number in range(_MAX_MODELS):
            if client.claim(f"{self._key}/{number}", model_id) == _as_claimed(model_id):
                return

    def remove(self, client: Client, model_id: str) -> None:
        """Remove a model, if it is there. Raises TransportError: the store is gone."""
        for number, found in enumerate(self._read_names(client)):
            if found == _as_claimed(model_id):
                client.set(f"{self._key}/{number}", b"")

    def without(self, client: Client, model_id: str) -> str:
        """The models that are there, if this one is not. Empty: it is there, none are, or there was no room for it.

        Raises TransportError: the store is gone.
        """
        known = [name for name in self._read_names(client) if name]
        if _as_claimed(model_id) in known or len(known) == _MAX_MODELS:
            return ""
        return ", ".join(repr(each[:_MAX_NAME_LENGTH]) for each in known)

    def _read_names(self, client: Client) -> Iterator[str]:
        """The names in their places; those that were removed are empty."""
        for number in range(_MAX_MODELS):
            value = client.value(f"{self._key}/{number}")
            if value is None:
                return
            yield value.decode("ascii", "replace")


def _as_claimed(model_id: str) -> str:
    """A name as `Client.claim` returns it."""
    return model_id.encode().decode("ascii", "replace")
