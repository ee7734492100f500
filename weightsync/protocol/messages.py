"""The words of the protocol: frozen values that travel between one sender and one receiver.

Each names its ``model_id`` (several models may share a connection) and the ``incarnation`` of the sender that it
belongs to. ``version`` 0 means "none yet" or, in a refusal, the handshake itself. The fields are those of
``spec/protocol.toml``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.report import Evidence, SyncReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The handshake, in both directions."""

    model_id: str
    incarnation: int
    #: The newest version due to the worker (from a sender), or served by it (from a receiver); 0: none.
    version: int = 0
    #: xxh3-128 of the layout, 16 bytes; empty while the speaker has none yet.
    layout_digest: bytes = b""
    #: The encoded layout, so that the other end can list the differences; empty while there is none.
    layout: bytes = b""
    #: What tells the speaker's machine and pid namespace from others, 16 bytes; empty: not told.
    host: bytes = b""
    #: The speaker's process id there and its start time in clock ticks, to be watched; 0: cannot be watched.
    pid: int = 0
    started: int = 0
    #: The highest incarnation the receiver has made a handshake with; 0 from a sender.
    fence: int = 0
    #: The speaker's own number for this link, by which traces of both ends are joined; 0: not told.
    link: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRef:
    """Where in shared memory a payload lies: the segment's number on this link."""

    segment: int


class WeightsForm(enum.Enum):
    """What the sender's caller gave as weights, so that they are handed out as such."""

    #: A dict of dotted names, as a state dict.
    FLAT = "state_dict"
    #: A dict of dicts.
    NESTED = "dict"
    TENSORDICT = "tensordict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One version on its way to one worker. Its payload follows it, or lies in a slot."""

    model_id: str
    incarnation: int
    version: int
    layout_digest: bytes
    #: The encoded layout if this link has not carried it yet, else empty.
    layout: bytes = b""
    #: xxh3-128 of the tensors as they travel and of the extra state; empty: not verified.
    digest: bytes = b""
    #: Size of the payload in bytes.
    nbytes: int = 0
    #: The modules' extra state, encoded.
    extras: bytes = b""
    #: As what the weights are handed out to a loop that applies them by hand.
    form: WeightsForm = WeightsForm.FLAT
    #: None: the payload follows inline.
    slot: SlotRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """That version is applied, whole."""

    model_id: str
    incarnation: int
    version: int
    #: The digest of what was applied, as the receiver computed it; empty: not verified.
    digest: bytes = b""
    #: Seconds the receiver spent from the update's arrival to the end of its swap.
    seconds: float = 0.0
    #: CALL: a call returned, or somebody acked by hand; nothing more is known.
    evidence: Evidence = Evidence.ANSWER
    #: What became of the version where the receiver handed it on to; None: nowhere.
    nested: SyncReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """That version, or with version 0 the handshake, was not applied."""

    model_id: str
    incarnation: int
    version: int
    kind: RefusalKind
    reason: str = ""
    remote_traceback: str = ""
    #: The highest incarnation the receiver has made a handshake with.
    fence: int = 0
    #: CALL: a call raised; nothing more is known.
    evidence: Evidence = Evidence.ANSWER


class Ending(enum.Enum):
    """How whoever says goodbye has ended."""

    #: In good order.
    CLOSED = "closed"
    #: Something failed, and the reason says what. Only senders say so: a receiver that fails says a `Refusal`.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The end of the link."""

    model_id: str
    incarnation: int
    reason: str = ""
    ending: Ending = Ending.CLOSED


Message = Hello | Update | Ack | Refusal | Bye
