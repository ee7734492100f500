"""Payloads that travel in parts while they are packed, so that packing, sending and hashing overlap.

The sender names each range once it is written; the worker receives it, and hashes it if the update will carry a digest.
The update follows when all is packed, and names the payload; nothing is decided or applied before. If the packing
fails, no update follows, and what has arrived is dropped with the next payload.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from weightsync.engine.driver import Lane
from weightsync.errors import ProtocolError
from weightsync.options import Verify
from weightsync.protocol.messages import Part, Update
from weightsync.transports.base import Received, TakesParts
from weightsync.transports.buffers import Buffer
from weightsync.weights.tree_digest import CHUNK, ChunkHashes

#: The least size of a part in bytes, and the most parts of a payload: a larger payload has larger parts.
LEAST_PART: Final = 4 << 20
MOST_PARTS: Final = 32
#: Payloads smaller than the first size are sent whole; those smaller than the second too, if workers may have to share
#: cores with the trainer, so that hashing and reading would slow down the packing.
LEAST_NBYTES: Final = 4 * LEAST_PART
LEAST_IF_BUSY: Final = 64 << 20


class OutgoingParts:
    """Sends a payload in parts while several threads pack it.

    Args:
        lock: the driver's, under which links are called.
        links: where to, each with whether it gets a digest.
        payload: the buffer that is being filled.
        whole: the payload as a part: all of it.
    """

    def __init__(
        self,
        lock: threading.RLock,
        links: Mapping[TakesParts, bool],
        payload: Buffer,
        whole: Part,
    ) -> None:
        self._lock = lock
        self._links = dict(links)
        self._payload = payload
        self._whole = whole
        self._least = max(LEAST_PART, -(-whole.nbytes // MOST_PARTS // CHUNK) * CHUNK)
        #: Ranges that are written and not sent yet, by their ends; and those that were sent.
        self._open: dict[int, int] = {}
        self._sent: list[tuple[int, int]] = []

    def reach(self, start: int, end: int) -> None:
        """Note that the range from `start` to before `end` is written. Full parts are sent at once.

        A part ends at the end of a chunk of the digest, so that the worker can hash it.
        """
        with self._lock:
            start = self._open.pop(start, start)
            part_end = end if end == self._whole.nbytes else end // CHUNK * CHUNK
            if part_end - start >= self._least:
                self._send(start, part_end)
                start = part_end
            if start < end:
                self._open[end] = start

    def finish(self) -> None:
        """Everything is written: send the remaining parts."""
        with self._lock:
            sent_until = 0
            for start, end in (*sorted(self._sent), (self._whole.nbytes, self._whole.nbytes)):
                if sent_until < start:
                    self._send(sent_until, start)
                sent_until = end

    def _send(self, start: int, end: int) -> None:
        self._sent.append((start, end))
        for link, hashed in tuple(self._links.items()):
            try:
                link.send_part(replace(self._whole, start=start, end=end, hashed=hashed), self._payload)
            except Exception:  # noqa: BLE001 - the update will meet the same failure, and its worker is LOST then
                del self._links[link]


def worth_parts(nbytes: int, links: int = 0) -> bool:
    """Whether a payload of this size is worth sending in parts, over so many links."""
    if nbytes >= LEAST_IF_BUSY:
        return True
    return nbytes >= LEAST_NBYTES and links < len(os.sched_getaffinity(0))


def whole_part(payload_id: bytes, nbytes: int, model_id: str, incarnation: int) -> Part:
    """A payload as one part: all of it."""
    return Part(model_id=model_id, incarnation=incarnation, payload_id=payload_id, nbytes=nbytes, start=0, end=nbytes)


def outgoing_parts(
    lock: threading.RLock, lanes: Iterable[Lane], payload: Buffer, verify: Verify, whole: Part
) -> OutgoingParts | None:
    """The object that sends a payload in parts over idle links; None: no link can carry them, or it does not pay.

    Args:
        lock: the driver's. It is held.
        lanes: the open links to workers that have answered the handshake.
        payload: the buffer that will be filled.
        verify: what the workers compare.
        whole: the payload as one part.
    """
    links: dict[TakesParts, bool] = {}
    for lane in lanes:
        if lane.parts is not None and lane.backlog.empty:
            hashed = verify.compares(lane.shares(payload, whole.nbytes))
            if lane.parts.takes_parts(payload, whole.nbytes, hashed):
                links[lane.parts] = hashed
    if not links or not worth_parts(whole.nbytes, len(links)):
        return None
    return OutgoingParts(lock, links, payload, whole)


class IncomingParts:
    """The hashes of a payload whose update has not arrived yet."""

    def __init__(self) -> None:
        self._payload_id, self._nbytes = b"", 0
        #: The hashes of the payload whose parts came last; None: no update was to carry a digest of one.
        self.hashes: ChunkHashes | None = None

    def arrived(self, part: Part, received: Received) -> None:
        """Hash a range that has arrived, if its update will carry a digest.

        Raises ProtocolError: it belongs to a payload of another size than the ranges before it.
        """
        payload = received.payload
        if payload is None or not part.hashed:
            return
        if self.hashes is None or part.payload_id != self._payload_id:
            self._payload_id, self._nbytes, self.hashes = part.payload_id, part.nbytes, ChunkHashes(payload)
        if part.nbytes != self._nbytes:
            raise ProtocolError(f"A part of a payload of {part.nbytes} bytes came for one of {self._nbytes}.")
        self.hashes.reach(part.start, part.end)

    def forget(self) -> None:
        """Drop the hashes, and with them the payload's memory: no update is expected for it."""
        self.hashes = None

    def hashes_of(self, update: Update) -> ChunkHashes | None:
        """The hashes of what has arrived of an update's payload; None: nothing was hashed. Forgets them."""
        payload_id = update.payload_id if update.slot is None else update.slot.seal
        hashes, self.hashes = self.hashes, None
        return hashes if payload_id and payload_id == self._payload_id else None
