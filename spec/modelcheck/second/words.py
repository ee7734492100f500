"""The values of AckProtocol.tla's variables in Python. One `Node` is one state of the model.

Functions over senders or workers are tuples. The numbers start from 1: `Node.sender(1)` is the first sender.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

#: (incarnation, version, serial). The serial identifies the weights.
Payload: TypeAlias = tuple[int, int, int]

NO_PAYLOAD: Payload = (0, 0, 0)
NO_LINK = (0, 0)


class Entry(NamedTuple):
    """One worker in a sender's membership."""

    link: int
    link_state: str
    served: int
    due: int
    catching: int
    fence: int


class Out(NamedTuple):
    """The update outstanding, or the last report."""

    version: int
    owed: tuple[int, ...]
    outcomes: tuple[str, ...]
    did: frozenset[int]


class Sender(NamedTuple):
    """A sender's data."""

    incarnation: int
    version: int
    serial: int
    dueAll: int
    members: tuple[Entry, ...]
    out: Out


class Receiver(NamedTuple):
    """A receiver's data, including fields that only the properties use."""

    link: tuple[int, int]
    fence: int
    met: int
    decided: Payload
    answer: str
    pending: Payload
    served: Payload
    live: tuple[Payload, Payload]


class Message(NamedTuple):
    """A message in flight to a worker. Version 0 stands for a Hello."""

    s: int
    w: int
    k: int
    v: int
    p: int


class Word(NamedTuple):
    """A message in flight to a sender."""

    s: int
    w: int
    k: int
    inc: int
    v: int
    p: int
    kind: str
    fence: int


RECORDS: tuple[type[Entry | Out | Sender | Receiver | Message | Word], ...] = (
    Entry,
    Out,
    Sender,
    Receiver,
    Message,
    Word,
)


class Node(NamedTuple):
    """One state of the model. The fields are its variables, in their order."""

    sstate: tuple[str, ...]
    sdata: tuple[Sender, ...]
    slife: tuple[str, ...]
    blocked: tuple[bool, ...]
    rstate: tuple[str, ...]
    rdata: tuple[Receiver, ...]
    messages: frozenset[Message]
    answers: frozenset[Word]
    gone: tuple[tuple[bool, ...], ...]

    def sender(self, s: int) -> Sender:
        """The data of sender ``s``."""
        return self.sdata[s - 1]

    def receiver(self, w: int) -> Receiver:
        """The data of receiver ``w``."""
        return self.rdata[w - 1]

    def entry(self, s: int, w: int) -> Entry:
        """The record of worker ``w`` at sender ``s``."""
        return self.sdata[s - 1].members[w - 1]

    def outcome(self, s: int, w: int) -> str:
        """The outcome of ``w`` in the outstanding update or the last report of ``s``."""
        return self.sdata[s - 1].out.outcomes[w - 1]

    def owed(self, s: int, w: int) -> int:
        """The link over which ``w`` owes sender ``s`` an answer, or 0."""
        return self.sdata[s - 1].out.owed[w - 1]

    def owing(self, s: int) -> int:
        """The number of workers that owe sender ``s`` an answer."""
        return sum(1 for link in self.sdata[s - 1].out.owed if link)

    def is_gone(self, s: int, w: int) -> bool:
        """Whether the worker's end of the sender's open link is closed."""
        return self.gone[s - 1][w - 1]

    def is_open(self, s: int, w: int, k: int) -> bool:
        """Whether the sender's end of this link is open."""
        entry = self.entry(s, w)
        return (
            entry.link == k
            and entry.link_state in ("EXPECTED", "UP")
            and self.slife[s - 1] == "alive"
            and self.sstate[s - 1] != "closed"
            and self.sdata[s - 1].incarnation != 0
        )


def new_sender(workers: int) -> Sender:
    """The data of a new, copied or unpickled sender."""
    nobody = Out(0, (0,) * workers, ("NONE",) * workers, frozenset())
    return Sender(0, 0, 0, 0, (Entry(0, "NONE", 0, 0, 0, 0),) * workers, nobody)


NEW_RECEIVER = Receiver(NO_LINK, 0, 0, NO_PAYLOAD, "NONE", NO_PAYLOAD, NO_PAYLOAD, (NO_PAYLOAD, NO_PAYLOAD))
