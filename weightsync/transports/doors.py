"""The receiving end of links whose messages are calls: a door that senders knock at, and a link for each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from weightsync import wire
from weightsync.errors import ConfigurationError, ProtocolError
from weightsync.messages import Message
from weightsync.transports.base import Link
from weightsync.transports.door_links import DoorLink, Frames, Parcel, opened

__all__ = ["Door", "DoorLink", "Frames", "Parcel", "decoded"]


class Door:
    """Where the calls for one model arrive in this process. Calls that come before anybody listens wait behind it."""

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self._lock = threading.Lock()
        self._links: dict[str, DoorLink] = {}
        self._unmet: list[DoorLink] = []
        self._accept: Callable[[Link], None] | None = None

    def knock(self, parcel: Parcel) -> Future[Frames]:
        """Take a call in, from whichever thread: see `DoorLink.bring`.

        A link that breaks the protocol while nobody listens is closed: its sender is told, and no receiver meets it.
        """
        brought = opened(parcel)
        with self._lock:
            link = self._links.get(parcel.link)
            accept = None
            if link is None:
                link = self._links[parcel.link] = DoorLink("the sender")
                accept = self._accept
                if accept is None:
                    self._unmet.append(link)
            unfit = isinstance(brought, ProtocolError) and link in self._unmet
            if unfit:
                self._unmet.remove(link)
        if isinstance(brought, ProtocolError) and unfit:
            link.close(f"this link broke the protocol: {brought}")
            raise brought
        try:
            return link.bring(parcel.number, brought)
        finally:
            if accept is not None:
                accept(link)

    def release(self, parcel: Parcel) -> None:
        """Let a call go home without waiting any longer."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            link.release(parcel.number)

    def hang_up(self, parcel: Parcel) -> None:
        """Take a link's last call in: none of its calls waits for an answer any more, whether or not anybody listens.

        Raises:
            ProtocolError, TransportError: as `knock`; its calls go home all the same.
        """
        try:
            self.knock(parcel)
        finally:
            with self._lock:
                link = self._links[parcel.link]
                unheard = link in self._unmet
                if unheard:
                    self._unmet.remove(link)
            link.hang_up()
            if unheard:
                link.close()

    def knows(self, link: str) -> bool:
        """Whether a call of that link has come before."""
        with self._lock:
            return link in self._links

    def awaits_turn(self, parcel: Parcel) -> bool:
        """Whether a call waits for others of its link, begun before it, that have not come yet."""
        with self._lock:
            link = self._links.get(parcel.link)
        return link is not None and link.awaits_turn(parcel.number)

    def skip(self, parcel: Parcel, numbers: Sequence[int]) -> None:
        """Those calls of the parcel's link will never come: see `DoorLink.skip`."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            for number in numbers:
                link.skip(number)

    def drop(self, parcel: Parcel) -> None:
        """Close the link that a parcel came by."""
        with self._lock:
            link = self._links.get(parcel.link)
        if link is not None:
            link.close()

    @property
    def listening(self) -> bool:
        """Whether somebody listens."""
        with self._lock:
            return self._accept is not None

    def open(self, accept: Callable[[Link], None]) -> Callable[[], None]:
        """Have ``accept`` called with each sender's link, those that have come already included.

        Returns:
            What ends it.

        Raises:
            ConfigurationError: somebody listens already.
        """
        with self._lock:
            if self._accept is not None:
                raise ConfigurationError(f"Model {self.model_id!r} has a receiver in this process: close that first.")
            self._accept = accept
            unmet, self._unmet = self._unmet, []
        for link in unmet:
            accept(link)
        return self._shut

    def _shut(self) -> None:
        with self._lock:
            self._accept = None


def decoded(frames: Sequence[bytes]) -> list[Message]:
    """The answers that a call brought home.

    Raises:
        ProtocolError: a frame is malformed.
    """
    if not isinstance(frames, list | tuple):
        raise wire.malformed(f"A call brought home a {type(frames).__name__} where answers belong", b"")
    return [wire.decode(frame) for frame in frames]
