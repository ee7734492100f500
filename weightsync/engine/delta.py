"""Deltas: a version may be sent as its difference from the previous one, to workers that hold that one.

`tla/Delta.tla` has the rules. The sender's driver keeps each version that is due to a worker, so it has the base of all
that have acked the version before. A worker keeps the packed bytes of the version that it applied last.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from weightsync.protocol.messages import BaseRef, Update
from weightsync.transports.buffers import Buffer
from weightsync.weights.delta import apply, encode, word_of
from weightsync.weights.layout import Layout

#: A delta larger than this share of the payload is not sent: it saves few bytes, and costs the worker more work.
MAX_SHARE: Final = 0.75
_NO_BASE: Final = BaseRef()


class VersionPayloads:
    """The payloads of one version: a delta for the workers that hold its base, the whole payload for all others.

    Args:
        base: what the delta is against; `BaseRef()`: there is no delta.
        delta: the delta, if there is one.
    """

    def __init__(self, base: BaseRef = _NO_BASE, delta: Buffer | None = None) -> None:
        self._base = base
        self._delta = delta
        #: Worker id to the bytes that were sent to it: payload, and the extra state, which travels whole each time.
        self.sent: dict[int, int] = {}
        #: The sender's numbers of the links over which the delta was sent, and not refused.
        self._links: set[int] = set()
        #: The last messages, by base: (the whole update, the message made of it). All workers get the same object, so
        #: that a link can reuse its encoding.
        self._messages: dict[BaseRef, tuple[Update, Update]] = {}

    def to(self, worker: int, link: int, served: int, update: Update, whole: Buffer) -> tuple[Update, Buffer]:
        """The message and the payload for a worker.

        Args:
            served: the version that it acked last over this link; 0: none.
            update: the message that carries the whole payload.
            whole: the whole payload.
        """
        payload, base = whole, _NO_BASE
        if self._delta is not None and served == self._base.version:
            payload, base = self._delta, self._base
            self._links.add(link)
        cached = self._messages.get(base)
        if cached is None or cached[0] is not update:
            nbytes = update.nbytes if payload is whole else payload.nbytes
            cached = self._messages[base] = update, replace(update, nbytes=nbytes, base=base)
        self.sent[worker] = self.sent.get(worker, 0) + cached[1].nbytes + len(update.extras)
        return cached[1], payload

    def again(self, worker: int, link: int, whole: Buffer) -> tuple[Update, Buffer] | None:
        """The message and the whole payload for a worker that lacks the base; None: it was sent no delta of this."""
        if link not in self._links:
            return None
        self._links.discard(link)
        return self.to(worker, link, 0, self._messages[self._base][0], whole)


def version_payloads(layout: Layout, payload: memoryview, base: BaseRef, base_payload: memoryview) -> VersionPayloads:
    """Encode a version once for all its workers.

    Args:
        layout: the layout of the version and of its base.
        payload: its packed bytes.
        base: the version before.
        base_payload: its packed bytes.
    """
    delta = encode(
        base_payload[: layout.nbytes], payload[: layout.nbytes], word_of(layout), int(MAX_SHARE * layout.nbytes)
    )
    if delta is None:
        return VersionPayloads()
    buffer = Buffer(len(delta))
    buffer.view[:] = delta
    return VersionPayloads(base, buffer)


class HeldBase:
    """A worker's base: the packed bytes of the version that it applied last, if its sender may send deltas."""

    def __init__(self) -> None:
        self._update: Update | None = None
        self._payload = memoryview(b"")

    def holds(self, update: Update) -> bool:
        """Whether what is held is the base of an update's delta."""
        held, base = self._update, update.base
        if held is None or base is None:
            return False
        return (held.incarnation, held.version, held.digest) == (update.incarnation, base.version, base.digest)

    def whole(self, update: Update, layout: Layout, payload: memoryview) -> memoryview:
        """The whole payload of an update. A delta is applied in place, in the base's memory: that base is then gone.

        Raises:
            ProtocolError: the delta is malformed.
        """
        assert update.base is not None
        if not update.base.version:
            return payload
        made = self._payload
        self.drop()
        apply(payload, made[: layout.nbytes])
        return made

    def keep(self, update: Update, payload: memoryview) -> None:
        """A version was applied: it is the base of the next."""
        self._update = update
        self._payload = memoryview(bytearray(payload)) if payload.readonly else payload

    def drop(self) -> None:
        """Hold nothing."""
        self._update, self._payload = None, memoryview(b"")
