"""The messages of the protocol: frozen structs that travel between one sender and one receiver.

Each carries its ``model_id`` (several models may share a connection) and the sender's ``incarnation``. ``version`` 0
means "none yet" or, in a refusal, the handshake itself. The fields are those of ``spec/protocol.toml``.
"""

from __future__ import annotations

import enum
from typing import Final

from msgspec import Struct

from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.report import Evidence, SyncReport

#: The most unanswered updates on a link that loses none: one that is being applied, one behind it. It limits the memory
#: that a worker that does not read can occupy.
MAX_UNANSWERED: Final = 2
#: Bytes of a seal, which lies behind a payload in its slot.
SEAL_NBYTES: Final = 16
#: Bytes of a device's identity.
IDENTITY_NBYTES: Final = 16


class Hello(Struct, frozen=True, kw_only=True):
    """The handshake, in both directions."""

    model_id: str
    incarnation: int
    #: From a sender: the newest version addressed to the worker. From a receiver: the version it serves. 0: none.
    version: int = 0
    #: xxh3-128 of the layout, 16 bytes; empty while this end has none yet.
    layout_digest: bytes = b""
    #: The encoded layout, so that the other end can list the differences; empty while there is none.
    layout: bytes = b""
    #: Identifies this end's machine and pid namespace, 16 bytes; empty: not sent.
    host: bytes = b""
    #: This end's process id and its start time in clock ticks, so that the peer can watch it; 0: cannot be watched.
    pid: int = 0
    started: int = 0
    #: The highest incarnation the receiver has completed a handshake with; 0 from a sender.
    fence: int = 0
    #: This end's own number for the link, used to join the traces of both ends; 0: not sent.
    link: int = 0
    #: From a receiver: the identities of the devices whose slots it can open, 16 bytes each; empty: of none.
    devices: bytes = b""


class SlotRef(Struct, frozen=True, kw_only=True):
    """The shared memory that holds a payload, by its number on this link, and what is sealed in it.

    It is a segment of the host's, or memory of a device.
    """

    segment: int
    #: 16 random bytes, drawn each time the memory is filled. They lie in the memory itself, behind the payload.
    seal: bytes = bytes(SEAL_NBYTES)
    #: The identity of the device that it lies on, 16 bytes; empty: the host's memory.
    device: bytes = b""
    #: The size of the largest payload on that device; 0 for the host's memory, which tells its size itself.
    nbytes: int = 0


class BaseRef(Struct, frozen=True, kw_only=True):
    """The version whose payload an update's payload is a delta against, as its worker acked it."""

    #: 0: the payload is whole, and is kept: a delta against it may follow.
    version: int = 0
    #: Its digest, 16 bytes; empty if the payload is whole.
    digest: bytes = b""


class WeightsForm(enum.Enum):
    """The type in which the caller passed the weights, so that workers get them in the same type."""

    #: A dict with dotted names, like a state dict.
    FLAT = "state_dict"
    #: A dict of dicts.
    NESTED = "dict"
    TENSORDICT = "tensordict"


class Update(Struct, frozen=True, kw_only=True):
    """One version sent to one worker. Its payload follows inline, came in `Part`s, or lies in a shared-memory slot."""

    model_id: str
    incarnation: int
    version: int
    layout_digest: bytes
    #: The encoded layout, if it was not sent over this link before; else empty.
    layout: bytes = b""
    #: The digest of the packed tensors and the extra state (`weightsync.weights.tree_digest`); empty: not verified.
    digest: bytes = b""
    #: Size of the payload in bytes, as it travels.
    nbytes: int = 0
    #: The modules' extra state, encoded.
    extras: bytes = b""
    #: The type in which a worker that applies weights itself gets them.
    form: WeightsForm = WeightsForm.FLAT
    #: None: the payload follows inline, or came in parts.
    slot: SlotRef | None = None
    #: The W3C trace context of the send: a ``traceparent``, or that, a newline and a ``tracestate``. Empty: none.
    trace_context: str = ""
    #: What the payload is a delta against. None: it is whole, and no delta follows it.
    base: BaseRef | None = None
    #: Names the payload if it has been sent in parts before. Empty: it has not, or it lies in the slot.
    payload_id: bytes = b""


class Ack(Struct, frozen=True, kw_only=True):
    """The receiver has applied the version completely."""

    model_id: str
    incarnation: int
    version: int
    #: What was applied: the digest of the weights, computed by the receiver. For an update in a slot that carries no
    #: digest, `slot_digest`, with the seal that the receiver has read in its own mapping. Empty: not verified.
    digest: bytes = b""
    #: Seconds from the update's arrival at the receiver to the end of its swap.
    seconds: float = 0.0
    #: CALL: a call returned, or the user acked; nothing more is known.
    evidence: Evidence = Evidence.ANSWER
    #: The report of the workers that the receiver forwarded the version to; None if it forwards to nobody.
    nested: SyncReport | None = None


class Refusal(Struct, frozen=True, kw_only=True):
    """The receiver did not apply the version, or, if version is 0, refused the handshake."""

    model_id: str
    incarnation: int
    version: int
    kind: RefusalKind
    reason: str = ""
    remote_traceback: str = ""
    #: The highest incarnation the receiver has completed a handshake with.
    fence: int = 0
    #: CALL: a call raised; nothing more is known.
    evidence: Evidence = Evidence.ANSWER


class NoBase(Struct, frozen=True, kw_only=True):
    """The receiver does not hold the base of a delta: the sender sends the version whole. It does not answer the
    update."""

    model_id: str
    incarnation: int
    version: int


class Part(Struct, frozen=True, kw_only=True):
    """A range of a payload that is still being packed. The machines never see it.

    Its bytes follow inline, or lie in a shared-memory slot. If the packing fails, no update follows.
    """

    model_id: str
    incarnation: int
    #: 16 random bytes, drawn for each payload: the `payload_id` of its update, or the seal that its slot will have.
    payload_id: bytes
    #: Size of the whole payload in bytes.
    nbytes: int
    #: The range, in bytes: from `start` to before `end`.
    start: int
    end: int
    #: The number of the segment that it lies in; 0: the bytes follow inline.
    segment: int = 0
    #: Whether the update will carry a digest, so that the range can be hashed now.
    hashed: bool = False


class Ending(enum.Enum):
    """Why a link ends."""

    #: It was closed cleanly.
    CLOSED = "closed"
    #: Something failed; the reason says what. A receiver uses this before its handshake, and a `Refusal` afterwards.
    FAILED = "failed"


class Bye(Struct, frozen=True, kw_only=True):
    """The end of the link."""

    model_id: str
    incarnation: int
    reason: str = ""
    ending: Ending = Ending.CLOSED


Message = Hello | Update | Ack | Refusal | Bye | NoBase | Part


def version_of(message: Message) -> int:
    """The version that a message names; 0: none."""
    return 0 if isinstance(message, Bye | Part) else message.version
