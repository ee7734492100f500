"""New links: a sender announces them under the worker's key, and the worker takes each once."""

from __future__ import annotations

import itertools
import re
import threading
import uuid
from collections.abc import Callable
from typing import Final

from weightsync.transports.distributed import pulse
from weightsync.transports.distributed.letters import Outbox, Side
from weightsync.transports.distributed.link import StoreLink
from weightsync.transports.distributed.store import Client, StoreEnd, base_of
from weightsync.transports.fork import forget_after_fork

#: Seconds that a goodbye waits for a link that is being announced.
_PATIENCE: Final = 2.0
#: A worker, by the store's host and port and its key there.
Where = tuple[str, int, str]


def base_key(model_id: str, rank: int) -> str:
    """Where links to the worker of that rank are announced."""
    return f"weightsync/{model_id}/{rank}"


class _UnderWay:
    """The links of this process that are being announced: a goodbye to the same worker waits for them.

    So a worker that gets a new link sees it before it sees the end of the old one, after which it may leave.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: there are none."""
        self._lock = threading.Lock()
        self._made: dict[Where, list[threading.Event]] = {}
        forget_after_fork(self)

    def begin(self, where: Where) -> threading.Event:
        """One more; to be set once it is announced, or never will be."""
        made = threading.Event()
        with self._lock:
            self._made[where] = [each for each in self._made.get(where, ()) if not each.is_set()] + [made]
        return made

    def wait(self, where: Where) -> None:
        """Return once all are announced that have begun, or after a while."""
        with self._lock:
            begun = tuple(self._made.get(where, ()))
        for made in begun:
            made.wait(_PATIENCE)


_under_way = _UnderWay()


def sender_link(meeting: StoreEnd, model_id: str, peer: str) -> StoreLink:
    """The sender's end of a new link, announced to the worker.

    Raises:
        ConfigurationError: the backend is not to be had here.
        TransportError: no descriptor or thread is left.
    """
    name = uuid.uuid4().hex
    base = base_key(model_id, meeting.rank)
    store = base_of(meeting.store)
    where = store.host, store.port, base
    made = _under_way.begin(where)

    def announce(client: Client) -> None:
        # No counter: between counting and writing a sender may die, and the worker would wait for ever. No hint at
        # the newest either: anybody could write there, and the worker passes all doors in turn, too.
        doors = (f"{base}/door/{number}" for number in itertools.count())
        while client.value(door := next(doors)) is not None or client.claim(door, name) != name:
            continue
        made.set()

    def withdraw(client: Client) -> None:
        made.set()
        client.claim(f"weightsync/link/{name}/taken", "closed")

    def wait_for_others(_: Client) -> None:
        _under_way.wait(where)

    try:
        return StoreLink(meeting, name, Side(0, "down", "up", peer, announce, withdraw, wait_for_others))
    except BaseException:
        made.set()
        raise


def worker_link(meeting: StoreEnd, name: str, before_end: Callable[[Client], None]) -> StoreLink:
    """The worker's end of a link that it has taken.

    Args:
        meeting: the store, and the worker's rank.
        name: of the link.
        before_end: called by a thread of the link's before it tells that the sender has ended it.

    Raises:
        TransportError: no descriptor or thread is left.
    """
    side = Side(1, "up", "down", "the sender", _nothing, _nothing, before_end=before_end)
    return StoreLink(meeting, name, side)


def decline(client: Client, name: str) -> None:
    """Tell the sender of a link that was taken that there is nobody at the other end.

    Raises:
        TransportError: the store is gone.
    """
    Outbox(client, f"weightsync/link/{name}/up").shut()


def is_name(text: str) -> bool:
    """Whether that can be the name of a link: a stranger may write where links are announced."""
    return re.fullmatch("[0-9a-f]{32}", text) is not None


def taken(client: Client, name: str) -> bool:
    """Whether a link that was announced is ours now: each is taken once."""
    mine = f"{pulse.process_name()} {uuid.uuid4().hex}"
    return client.claim(f"weightsync/link/{name}/taken", mine) == mine


def _nothing(_: Client) -> None:
    return None
