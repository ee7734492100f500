"""The words of the sender's pure half: what it remembers, what happens to it, what it asks for."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from weightsync.messages import Ack, Bye, Hello, Refusal
from weightsync.report import Outcome


class Standing(enum.Enum):
    """How a worker's link stands on the roll."""

    #: Nobody has answered over it yet.
    EXPECTED = "expected"
    #: Its worker has answered.
    UP = "up"
    #: It is closed; what its worker serves is unknown.
    LOST = "lost"
    #: It is closed: its worker refused the handshake.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Entry:
    """One worker on the roll."""

    #: The number of its newest link; never used twice by one sender.
    link: int
    standing: Standing = Standing.EXPECTED
    #: Why the link is lost or was refused.
    reason: str = ""
    #: The worker's own traceback, where it said that it failed and raised.
    remote_traceback: str = ""
    #: The fence the worker reported, if it was lost to a newer sender.
    fence: int = 0
    #: The version it last acked over this link; 0: none.
    served: int = 0
    #: The newest version that was dispatched to all or naming it; 0: none.
    due: int = 0
    #: The version that went behind the Hello of this link and is not answered yet; 0: none.
    catching: int = 0

    @property
    def open(self) -> bool:
        """Whether its link is neither lost nor refused."""
        return self.standing in (Standing.EXPECTED, Standing.UP)


@dataclass(frozen=True, slots=True)
class Outstanding:
    """A version on its way: who still owes an answer, over which link, and what the others became."""

    version: int
    owed: Mapping[int, int]
    outcomes: Mapping[int, Outcome]


@dataclass(frozen=True, slots=True)
class SenderData:
    """All that a sender remembers beside its state."""

    #: 0 until CONNECT.
    incarnation: int = 0
    #: The newest version ever dispatched; never used twice.
    version: int = 0
    #: The newest version dispatched to all.
    due_all: int = 0
    roll: Mapping[int, Entry] = field(default_factory=dict)
    outstanding: Outstanding | None = None
    #: Joiners that did not catch up, to be told in the next report.
    not_caught_up: Mapping[int, Outcome] = field(default_factory=dict)
    #: Workers that said goodbye and why, to be told in the next report.
    left: Mapping[int, str] = field(default_factory=dict)
    #: Answers that nobody was owed.
    stale: int = 0
    #: The driver's own results that were no longer current.
    late: int = 0


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Connect:
    """The user laid the links, under this incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Send:
    """The user sends to ``targets`` (None: to all) and blocks."""

    targets: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class SendAsync:
    """The user sends to ``targets`` (None: to all) and goes on."""

    targets: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Wait:
    """The user waits for what is outstanding."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The wait for ``version`` ran out of time."""

    version: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The wait for ``version`` was left by an exception."""

    version: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """The user gives up what is outstanding."""


@dataclass(frozen=True, slots=True)
class Join:
    """A worker joins on a new link. One still up or expected is lost first: see `joining`."""

    worker: int
    link: int


@dataclass(frozen=True, slots=True)
class Remove:
    """A worker leaves the roll. Its link is lost first: see `removal`."""

    worker: int


@dataclass(frozen=True, slots=True)
class Close:
    """The user closes the sender."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A message from ``worker`` over ``link``."""

    worker: int
    link: int
    message: Hello | Ack | Refusal | Bye


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link died or was given up."""

    worker: int
    link: int
    reason: str


Event = Connect | Send | SendAsync | Wait | Deadline | Interrupted | Abandon | Join | Remove | Close | Answer | LinkLost

# ----------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Greet:
    """Send a Hello over the link, and behind it version ``due`` if that is not 0."""

    worker: int
    link: int
    due: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send that version over the link."""

    worker: int
    link: int
    version: int


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link."""

    worker: int
    link: int


@dataclass(frozen=True, slots=True)
class Farewell:
    """A worker said goodbye and has left the roll: its user is told why."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """Nothing is outstanding any more: this is what became of it, for whoever asks or waits."""

    outstanding: Outstanding
    not_caught_up: Mapping[int, Outcome]
    left: Mapping[int, str]


Effect = Greet | Dispatch | CloseLink | Farewell | Conclude
