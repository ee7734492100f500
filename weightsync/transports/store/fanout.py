"""The trainer's side of a fan-out: which worker passes a payload on to which, and which workers the trainer serves.

The updates of one dispatch are gathered, and a tree is made of the workers that are to get the same payload. The
trainer sends it to the first ones; all others are told a parent. A payload stays pinned until each of those has
answered, or has asked for it: then it is sent as without a fan-out.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import xxhash

from weightsync.protocol.codec import malformed
from weightsync.protocol.messages import Ack, Message, NoBase, Refusal, Update
from weightsync.transports.base import Gathering
from weightsync.transports.buffers import Buffer
from weightsync.transports.exposure import is_loopback
from weightsync.transports.sealing import sent_digest
from weightsync.transports.store.mailbox import INLINE_NBYTES, QueuedMessage
from weightsync.transports.store.routes import TOKEN_NBYTES, Ask, FetchFailure, Listen, ParentAddress, Routed, Supply
from weightsync.transports.store.tree import Node, tree_of

logger = logging.getLogger("weightsync")

_REASONS: Final = {
    FetchFailure.UNREACHABLE: "could not be reached",
    FetchFailure.ENDED: "ended the connection",
    FetchFailure.SILENT: "sent nothing for a while",
    FetchFailure.WRONG: "sent other bytes",
}


class Payload:
    """The payload of an update, with the digest that workers compare if a peer passes it on to them.

    Args:
        keyed: whether the digest must withstand an attacker.
    """

    def __init__(self, update: Update, buffer: Buffer, keyed: bool) -> None:
        self.token = os.urandom(TOKEN_NBYTES)
        self._update, self._buffer, self._keyed = update, buffer, keyed
        self._lock = threading.Lock()
        self._digest = b""

    @property
    def version(self) -> int:
        """The version that the payload belongs to."""
        return self._update.version

    def digest(self) -> bytes:
        """The digest. Computed once, by the first thread that asks; the buffer is pinned then."""
        with self._lock:
            if not self._digest and self._keyed:
                self._digest = sent_digest(self._update, self._buffer)
            elif not self._digest:
                self._digest = xxhash.xxh3_128_digest(self._buffer.view[: self._update.nbytes])
            return self._digest

    def route(self, children: int) -> bytes:
        """The text before an update whose payload the trainer sends itself."""
        return Routed(self.token, children, b"", "").encoded()

    def route_from(self, parent: str, children: int) -> bytes:
        """The text before an update whose payload comes from the worker at that address."""
        return Routed(self.token, children, self.digest(), parent).encoded()


class _OwedPayload(NamedTuple):
    """A payload that a worker may still ask for."""

    message: QueuedMessage
    parent: Branch


class _GatheredUpdate(NamedTuple):
    """An update of the dispatch in progress."""

    branch: Branch
    update: Update
    buffer: Buffer
    message: QueuedMessage


class Branch:
    """One link of a fan-out.

    Args:
        post: queues a message for the worker.
        peer: the worker, for messages to people.
        keyed: whether the link has a key.
    """

    def __init__(self, fanout: Fanout, post: Callable[[QueuedMessage], None], peer: str, keyed: bool) -> None:
        self._fanout, self._post, self._peer, self.keyed = fanout, post, peer, keyed
        self._lock = threading.Lock()
        self._owed_payloads: dict[int, _OwedPayload] = {}
        self._over = False
        #: Where its worker listens; empty if it does not, or could not be reached there.
        self.address = ""
        self._host = b""
        self._at_loopback = False
        #: Whether it has failed a child, and has not answered since.
        self._doubted = False
        #: Whether a child has got a payload from it.
        self._proved = False
        #: Whether its worker cannot reach others: it gets all payloads from the trainer.
        self._cut_off = False
        post(QueuedMessage(Listen().encoded(), None))

    def send(self, update: Update, buffer: Buffer, message: QueuedMessage) -> None:
        """Send an update, which is gathered while a dispatch is in progress."""
        if not self._fanout.gathers(self, update, buffer, message):
            self._post(message)

    def send_now(self, message: QueuedMessage) -> None:
        """Send a gathered update, unless the link has ended meanwhile."""
        with self._lock:
            over = self._over
        if over:
            message.done()
        else:
            self._post(message)

    def send_routed(
        self, message: QueuedMessage, payload: Payload, parent: Branch, address: str, children: int
    ) -> None:
        """Send an update without its payload, which its worker gets from ``parent``, at that address."""
        with self._lock:
            is_over = self._over
            if not is_over:
                version = payload.version
                self._owed_payloads[version] = _OwedPayload(
                    replace(message, frame=Supply(version).encoded(), hint=None), parent
                )
        if is_over:
            message.done()
            return
        head = partial(payload.route_from, address, children)
        self._post(replace(message, payload=None, head=head, done=_do_nothing))

    @property
    def node(self) -> Node | None:
        """Its place in a tree; None: its worker gets payloads only from the trainer."""
        if not self.address or self._cut_off:
            return None
        return Node(self._host, self._at_loopback, not self._doubted)

    def listens(self, route: ParentAddress) -> None:
        """Note the address at which its worker listens."""
        self._host, self._at_loopback = route.host, is_loopback(route.address.rpartition(":")[0])
        self.address = route.address

    def answered(self, message: Message) -> None:
        """Its worker has answered an update: it has the payloads of all updates up to that one."""
        if not isinstance(message, Ack | Refusal | NoBase) or not message.version:
            return
        self._doubted = False
        for debt in self._pop_settled(message.version):
            debt.parent._proved = True
            debt.message.done()

    def _pop_settled(self, version: int) -> list[_OwedPayload]:
        with self._lock:
            versions = [each for each in self._owed_payloads if each <= version]
            return [self._owed_payloads.pop(each) for each in versions]

    def asked(self, route: Ask) -> None:
        """Its worker did not get a payload from its parent: send it.

        Raises ProtocolError: it was not told to get it from a parent, or has asked before.
        """
        with self._lock:
            if self._over:
                return
            debt = self._owed_payloads.pop(route.version, None)
            if debt is None:
                raise malformed(f"{self._peer} asks for a payload of version {route.version} that it is not owed", b"")
            self._post(debt.message)
        self._fanout.log_fallback(self._peer, debt.parent._peer, route)
        self._blame(debt.parent, route.why)

    def _blame(self, parent: Branch, why: FetchFailure) -> None:
        if why is not FetchFailure.UNREACHABLE:
            parent._doubted = True
        elif parent._proved:
            self._cut_off = True
        else:
            parent.address = ""

    def end(self) -> None:
        """The link has ended: nothing more is sent over it."""
        with self._lock:
            self._over = True
        for debt in self._pop_settled(_ALL_VERSIONS):
            debt.message.done()

    def forget(self) -> None:
        """In a forked child: the payloads are the parent's."""
        self._lock, self._owed_payloads = threading.Lock(), {}


class Fanout(Gathering):
    """The trees of one sender.

    `begin`, `end` and `Branch.send` are called under the lock of its driver.

    Args:
        width: to how many workers the trainer, and each worker, sends a payload.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._gathered: list[_GatheredUpdate] | None = None
        self._warned = False

    def begin(self) -> None:
        """Gather updates from now on."""
        self._gathered = []

    def gathers(self, branch: Branch, update: Update, buffer: Buffer, message: QueuedMessage) -> bool:
        """Gather an update; False: it is to be sent at once."""
        if self._gathered is None or update.nbytes <= INLINE_NBYTES:
            return False
        self._gathered.append(_GatheredUpdate(branch, update, buffer, message))
        return True

    def end(self) -> None:
        """Send what was gathered: a tree for each payload."""
        gathered, self._gathered = self._gathered or [], None
        by_payload: dict[tuple[int, int], list[tuple[_GatheredUpdate, Node]]] = {}
        for each in gathered:
            node = each.branch.node
            if node is None:
                each.branch.send_now(each.message)
            else:
                by_payload.setdefault((id(each.buffer), each.update.nbytes), []).append((each, node))
        for group in by_payload.values():
            self._send([each for each, _ in group], tree_of([node for _, node in group], self._width))

    def _send(self, gathered: Sequence[_GatheredUpdate], parents: Sequence[int | None]) -> None:
        first = gathered[0]
        payload = Payload(first.update, first.buffer, first.branch.keyed)
        children = [0] * len(gathered)
        for parent in parents:
            if parent is not None:
                children[parent] += 1
        for each, parent, count in zip(gathered, parents, children, strict=True):
            # Read once: it is empty if another thread has heard meanwhile that nobody reaches the parent.
            address = "" if parent is None else gathered[parent].branch.address
            if parent is not None and address:
                each.branch.send_routed(each.message, payload, gathered[parent].branch, address, count)
            elif count:
                each.branch.send_now(replace(each.message, head=partial(payload.route, count)))
            else:
                each.branch.send_now(each.message)

    def log_fallback(self, worker: str, parent: str, route: Ask) -> None:
        """A worker gets a payload from here instead of its parent: log it."""
        logger.debug(
            "version %d: %s did not get the payload from %s, which %s: the trainer sends it",
            *(route.version, worker, parent, _REASONS[route.why]),
        )
        if not self._warned:
            self._warned = True
            logger.warning(
                "fan-out: %s did not get version %d from %s, which %s; the trainer sends it instead. Further cases are "
                "logged at debug level.",
                *(worker, route.version, parent, _REASONS[route.why]),
            )


_ALL_VERSIONS: Final = 2**64


def _do_nothing() -> None:
    return None
