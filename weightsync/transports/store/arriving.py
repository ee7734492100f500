"""Turns the texts that arrive over a link into messages with their payloads, in order.

`Arrivals` reads a payload behind its message. The trainer's end of a fan-out also takes what its worker says about it,
and a worker's end may get payloads from a parent, and pass them on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from weightsync.errors import AuthenticationError, TransportError
from weightsync.protocol.codec import malformed
from weightsync.protocol.messages import Part, Update
from weightsync.transports.base import Received
from weightsync.transports.buffers import NoRoom
from weightsync.transports.pipe.framing import ReceiveBuffers
from weightsync.transports.process import own_host
from weightsync.transports.sealing import digest_of
from weightsync.transports.store.fanout import Branch
from weightsync.transports.store.fetching import NotFetched, fetch
from weightsync.transports.store.forwarding import Feed, Forwarder
from weightsync.transports.store.group import Group, NoGroup
from weightsync.transports.store.mailbox import INLINE_NBYTES, QueuedMessage, Side
from weightsync.transports.store.routes import Ask, Listen, ParentAddress, Routed, Supply, decode_route
from weightsync.transports.store.seals import Guard, Opened
from weightsync.transports.store.store import Client
from weightsync.transports.store.stream import Stream, decoded

logger = logging.getLogger("weightsync")

#: A payload that is passed on is read in pieces of this size.
_PIECE_NBYTES: Final = 2**20


@dataclass(slots=True)
class _Assembly:
    """A payload that comes in parts."""

    payload_id: bytes
    #: Where it goes; None: there is no memory for it, for the reason in `untaken`.
    whole: memoryview | None
    untaken: str = ""
    #: The ranges of it that are there.
    arrived: list[tuple[int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """How many of the payload's bytes have arrived."""
        return sum(end - start for start, end in self.arrived)


class Arrivals:
    """The end of a link that has no part in a fan-out. The reading thread calls all but `end` and `forget`.

    Raises (`take`):
        ProtocolError: a message is malformed.
        TransportError: the connection has ended.
    """

    def __init__(self, guard: Guard, group: Group | NoGroup) -> None:
        self._guard, self._group = guard, group
        self._buffers = ReceiveBuffers()
        self._assembly: _Assembly | None = None

    def take(self, opened: Opened, stream: Stream, client: Client) -> Iterable[Received]:
        """The messages that are whole with this text, in order."""
        return (self._received(opened, stream, client),)

    def _received(self, opened: Opened, stream: Stream, client: Client) -> Received:
        """A whole message with its payload in our own memory."""
        message, inline, nbytes = decoded(opened.text)
        if isinstance(message, Part):
            return self._part(message, inline, opened, stream)
        if isinstance(message, Update):
            if message.payload_id:
                return self._assemble(message)
            self._assembly = None  # its packing has failed
        if nbytes <= INLINE_NBYTES:
            return Received(message, inline)
        try:
            buffer = self._buffers.find(nbytes)
        except NoRoom as error:
            # Later messages are still for us.
            self._group.skip(stream, client, nbytes)
            return Received(message, untaken=str(error))
        self._group.read(stream, client, buffer)
        self._require_sealed(buffer, opened)
        return Received(message, buffer)

    def _part(self, part: Part, inline: memoryview | None, opened: Opened, stream: Stream) -> Received:
        """A range of a payload, in our own memory for all of it."""
        if part.segment:
            raise malformed("A part in the store's messages names a segment of shared memory", opened.text)
        if self._assembly is None or self._assembly.payload_id != part.payload_id:
            self._assembly = None  # before its memory is needed for this one
            self._assembly = self._assembly_for(part)
        payload = self._assembly.whole
        if payload is None:
            stream.skip(0 if inline is not None else part.end - part.start)
            return Received(part, untaken=self._assembly.untaken)
        if part.nbytes != len(payload):
            raise malformed(f"A part of a payload of {part.nbytes} bytes came for one of {len(payload)}", opened.text)
        if any(part.start < end and start < part.end for start, end in self._assembly.arrived):
            raise malformed(f"Bytes {part.start} to {part.end} of a payload came in part before", opened.text)
        target = payload[part.start : part.end]
        if inline is not None:
            target[:] = inline
        else:
            stream.read_into(target)
            self._require_sealed(target, opened)
        self._assembly.arrived.append((part.start, part.end))
        return Received(part, payload)

    def _assembly_for(self, part: Part) -> _Assembly:
        try:
            return _Assembly(part.payload_id, self._buffers.find(part.nbytes))
        except NoRoom as error:
            return _Assembly(part.payload_id, None, str(error))

    def _assemble(self, update: Update) -> Received:
        """An update whose payload came in parts."""
        assembly, self._assembly = self._assembly, None
        if assembly is None or assembly.payload_id != update.payload_id:
            raise malformed(f"Version {update.version} names a payload of which no part has come", b"")
        if assembly.whole is None:
            return Received(update, untaken=assembly.untaken)
        if assembly.nbytes != update.nbytes or len(assembly.whole) != update.nbytes:
            there = f"{assembly.nbytes} of {update.nbytes} bytes"
            raise malformed(f"Version {update.version} names a payload of which {there} have come", b"")
        return Received(update, assembly.whole)

    def _require_sealed(self, payload: memoryview, opened: Opened) -> None:
        if self._guard.keyed and digest_of(payload) != opened.digest:
            raise AuthenticationError("A payload is not the one that its sender sealed: it was rejected.")

    def end(self) -> None:
        """The link has ended."""

    def forget(self) -> None:
        """In a forked child: close our copies of descriptors."""


class TrainerArrivals(Arrivals):
    """The trainer's end of a link in a fan-out."""

    def __init__(self, guard: Guard, group: Group | NoGroup, branch: Branch) -> None:
        super().__init__(guard, group)
        self._branch = branch

    def take(self, opened: Opened, stream: Stream, client: Client) -> Iterable[Received]:
        """The message in this text, if there is one."""
        match decode_route(opened.text):
            case None:
                received = self._received(opened, stream, client)
                self._branch.answered(received.message)
                return (received,)
            case ParentAddress() as address:
                self._branch.listens(address)
            case Ask() as ask:
                self._branch.asked(ask)
            case _:
                raise malformed("A worker sent what only a trainer sends", opened.text)
        return ()

    def end(self) -> None:
        """The link has ended: its payloads are released."""
        self._branch.end()

    def forget(self) -> None:
        """In a forked child: the payloads are the parent's."""
        self._branch.forget()


class Owner(Protocol):
    """The threads of a link's end."""

    def post(self, queued: QueuedMessage) -> None:
        """Queue a message to be written."""

    def deliver(self) -> None:
        """Deliver the messages that `take` has returned. Called before a wait."""

    def require_link(self) -> None:
        """Raise TransportError if the link has ended."""

    def own_host(self) -> str:
        """The address at which other workers can reach this one."""


@dataclass(slots=True)
class _AwaitedUpdate:
    """An update whose payload comes from a parent, or from the trainer instead."""

    update: Update
    route: Routed
    #: Where it goes; None until it is fetched.
    buffer: memoryview | None = None
    feed: Feed | None = None


class WorkerArrivals(Arrivals):
    """A worker's end of a link, whose trainer may use a fan-out.

    Args:
        owner: the link's threads.
    """

    def __init__(self, guard: Guard, group: Group | NoGroup, owner: Owner) -> None:
        super().__init__(guard, group)
        self._owner = owner
        self._forwarder: Forwarder | None = None
        self._over = False
        #: The messages in order. All are whole, except perhaps the first and those whose payloads come from a parent.
        self._queue: deque[Received | _AwaitedUpdate] = deque()

    def take(self, opened: Opened, stream: Stream, client: Client) -> Iterator[Received]:
        """The messages that are whole now. Between two of them a payload may be fetched."""
        match decode_route(opened.text):
            case None:
                self._queue.append(self._received(opened, stream, client))
            case Listen():
                self._start_forwarder()
            case Routed() as route:
                self._queue.append(self._receive_routed(route, opened, stream))
            case Supply() as supply:
                self._queue[0] = self._receive_supplied(supply, opened, stream)
            case _:
                raise malformed("The trainer sent what only a worker sends", opened.text)
        return self._take_whole()

    def _take_whole(self) -> Iterator[Received]:
        while self._queue:
            first = self._queue[0]
            if isinstance(first, _AwaitedUpdate):
                fetched = self._fetch_payload(first) if first.buffer is None else None
                if fetched is None:
                    return
                first = fetched
            self._queue.popleft()
            yield first

    def _start_forwarder(self) -> None:
        if self._forwarder is not None:
            return
        try:
            self._forwarder = forwarder = Forwarder(self._owner.own_host())
        except TransportError as error:
            logger.debug("this worker passes no payloads on: %s", error)
            return
        if self._over:
            forwarder.close()
        self._owner.post(QueuedMessage(ParentAddress(own_host(), forwarder.address).encoded(), None))

    def _receive_routed(self, route: Routed, opened: Opened, stream: Stream) -> Received | _AwaitedUpdate:
        if not self._guard.admits:
            raise AuthenticationError("A fan-out was announced by a sender that has not proved its key.")
        message, _, nbytes = decoded(memoryview(route.frame))
        if not isinstance(message, Update) or nbytes <= INLINE_NBYTES:
            raise malformed(f"A payload of {nbytes} bytes has a route", opened.text)
        awaited = _AwaitedUpdate(message, route)
        if route.parent:
            return awaited
        untaken = self._make_room(awaited)
        if untaken is not None:
            stream.skip(nbytes)
            return untaken
        return self._read(awaited, opened, stream)

    def _make_room(self, awaited: _AwaitedUpdate) -> Received | None:
        """Find memory, and offer the payload to our children; the message without it if there is no memory."""
        route = awaited.route
        try:
            awaited.buffer = self._buffers.find(awaited.update.nbytes)
        except NoRoom as error:
            if self._forwarder is not None:
                self._forwarder.decline(route.token, route.children)
            return Received(awaited.update, untaken=str(error))
        if self._forwarder is not None:
            awaited.feed = self._forwarder.offer(route.token, route.children, awaited.buffer)
        else:
            awaited.feed = Feed(awaited.buffer)
        return None

    def _fetch_payload(self, awaited: _AwaitedUpdate) -> Received | None:
        """The message with its payload from the parent; None: it failed, and the trainer was asked for the payload."""
        self._owner.deliver()
        untaken = self._make_room(awaited)
        if untaken is not None:
            return untaken
        assert awaited.buffer is not None
        assert awaited.feed is not None
        try:
            fetch(awaited.route, awaited.buffer, awaited.feed.reach, self._owner.require_link)
        except NotFetched as error:
            self._owner.post(QueuedMessage(Ask(awaited.update.version, error.why).encoded(), None))
            return None
        return Received(awaited.update, awaited.buffer)

    def _receive_supplied(self, supply: Supply, opened: Opened, stream: Stream) -> Received:
        """The first message with its payload, which follows this text."""
        first = self._queue[0] if self._queue else None
        if not isinstance(first, _AwaitedUpdate) or first.buffer is None or first.update.version != supply.version:
            raise malformed(f"A payload of version {supply.version} came that was not asked for", opened.text)
        return self._read(first, opened, stream)

    def _read(self, awaited: _AwaitedUpdate, opened: Opened, stream: Stream) -> Received:
        """Read the payload behind a text, and pass it on while it arrives."""
        buffer, feed = awaited.buffer, awaited.feed
        assert buffer is not None
        assert feed is not None
        for start in range(0, awaited.update.nbytes, _PIECE_NBYTES):
            stream.read_into(buffer[start : start + _PIECE_NBYTES])
            feed.reach(min(start + _PIECE_NBYTES, awaited.update.nbytes))
        self._require_sealed(buffer, opened)
        return Received(awaited.update, buffer)

    def end(self) -> None:
        """The link has ended: our children get no more from us."""
        self._over = True
        if self._forwarder is not None:
            self._forwarder.close()

    def forget(self) -> None:
        """In a forked child: close our copies of descriptors."""
        if self._forwarder is not None:
            self._forwarder.forget()


def make_arrivals(owner: Owner, side: Side, guard: Guard, group: Group | NoGroup, branch: Branch | None) -> Arrivals:
    """What reads the texts of one end of a link.

    Args:
        branch: the trainer's end of a link in a fan-out; None: it is another.
    """
    if branch is not None:
        return TrainerArrivals(guard, group, branch)
    return WorkerArrivals(guard, group, owner) if side.listens else Arrivals(guard, group)
