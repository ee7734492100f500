"""What lies between two watched ends: what goes in at one is compared with what comes out at the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum

import xxhash

from weightsync.clock import Stopwatch
from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update
from weightsync.testing.rules import Breach, Rule
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer


class End(Enum):
    """An end of a cable."""

    SENDER = "the sender's end"
    RECEIVER = "the receiver's end"

    @property
    def other(self) -> End:
        """The other end."""
        return End.RECEIVER if self is End.SENDER else End.SENDER


def words(message: Message) -> str:
    """A message, for people."""
    match message:
        case Update():
            return f"Update {message.version} of {message.nbytes} bytes"
        case Refusal():
            return f"Refusal {message.version} ({message.kind.name})"
        case Ack():
            return f"Ack {message.version}"
        case Hello() | Bye():
            return type(message).__name__


class Happening(Enum):
    """What a tap saw that its driver takes for an event."""

    #: A message came out.
    CAME = "came"
    #: Writing told that the link is dead.
    FAILED = "failed"
    #: Reading told that the link is dead, or its peer's bytes malformed.
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Seen:
    """One entry of a watch's log."""

    happening: Happening
    recorder: object
    message: Message | None = None


@dataclass
class Watch:
    """What all taps of one scenario share: the steps, the log, the first breach, the call that is in progress."""

    steps: list[str] = field(default_factory=list)
    log: list[Seen] = field(default_factory=list)
    breach: Breach | None = None
    call: str = ""
    since: Stopwatch = field(default_factory=Stopwatch)

    def broke(self, rule: Rule, what: str) -> Breach:
        """Remember a breach: a driver may swallow the exception."""
        breach = Breach(rule, what)
        self.breach = self.breach or breach
        return breach

    def check(self) -> None:
        """Raise the breach that a driver has swallowed."""
        if self.breach is not None:
            raise self.breach

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Say which call of a link is in progress; what it may not raise is a breach."""
        self.since = Stopwatch()
        self.call = call
        try:
            yield
        except (TransportError, ProtocolError, ConfigurationError, Breach):
            raise
        except Exception as error:
            raise self.broke(Rule.OWN_ERRORS, f"{call} raised {error!r}") from error
        finally:
            self.call = ""


@dataclass(slots=True)
class Flying:
    """A message on its way, and the digest of its payload."""

    message: Message
    digest: bytes
    number: int = 0
    #: Whether its end was closed before it had said that this has left: it may come out, or not.
    given_up: bool = False


@dataclass
class LinkPair:
    """What lies between two taps: what was sent at one end and has not come out at the other."""

    watch: Watch
    name: str
    delivery: Delivery
    #: By the end that it goes to.
    flying: dict[End, list[Flying]] = field(default_factory=lambda: {end: [] for end in End})
    arrived: dict[End, list[Flying]] = field(default_factory=lambda: {end: [] for end in End})
    #: Ends that were given up, and whether the connection was cut.
    closed: set[End] = field(default_factory=set)
    cut: bool = False
    met: bool = False  # whether the receiver's end is there
    #: Ends at which reading has told that the link is dead.
    told: set[End] = field(default_factory=set)
    #: Whether a message that comes too early is judged at once, or when it is known what became of the others.
    patient: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _newest: dict[End, int] = field(default_factory=lambda: dict.fromkeys(End, -1))

    def sent(self, end: End, message: Message, payload: Buffer | None) -> Flying:
        """A message goes in at ``end``."""
        nbytes = message.nbytes if isinstance(message, Update) else 0
        digest = xxhash.xxh3_128_digest(payload.view[:nbytes]) if payload is not None and nbytes else b""
        flown = Flying(message, digest, next(self._numbers))
        self.flying[end.other].append(flown)
        return flown

    def unsent(self, end: End, flown: Flying) -> None:
        """It could not be sent after all."""
        self.flying[end.other] = [each for each in self.flying[end.other] if each is not flown]

    def came(self, end: End, received: Received) -> None:
        """A message has come out at ``end``: is that allowed?"""
        message = received.message
        if isinstance(message, Update):
            message = replace(message, slot=None)
        index = self._place(end, message)
        flown = self.flying[end].pop(index)
        self.arrived[end].append(flown)
        self._check_payload(end, flown, received)

    def _place(self, end: End, message: Message) -> int:
        flying = self.flying[end]
        index = next((place for place, each in enumerate(flying) if each.message == message), None)
        if index is None and any(each.message == message for each in self.arrived[end]):
            if not self.delivery.duplicates:
                raise self.broke(Rule.ONCE, end, f"{words(message)} came out again")
            self.flying[end].insert(0, next(each for each in self.arrived[end] if each.message == message))
            return 0
        if index is None:
            raise self.broke(Rule.GENUINE, end, f"{words(message)} came out, and was never sent: {message!r}")
        self._check_order(end, index, message)
        return index

    def _check_order(self, end: End, index: int, message: Message) -> None:
        flying = self.flying[end]
        number, newest = flying[index].number, self._newest[end]
        self._newest[end] = max(newest, number)
        if self.delivery.reorders:
            return
        if number < newest:
            raise self.broke(Rule.ORDER, end, f"{words(message)} came out after what was sent later")
        if index and not self.patient:
            before = ", ".join(words(each.message) for each in flying[:index])
            what = f"{words(message)} came out, and {before}, sent before it, had not"
            raise self.broke(Rule.ORDER, end, f"{what}: overtaken, or lost")

    def _check_payload(self, end: End, flown: Flying, received: Received) -> None:
        if not flown.digest:
            if received.payload is not None and len(received.payload):
                what = f"{words(flown.message)} came with {len(received.payload)} bytes"
                raise self.broke(Rule.PAYLOAD, end, f"{what}, and left with none")
            return
        found = b"" if received.payload is None else xxhash.xxh3_128_digest(received.payload)
        if found != flown.digest:
            size = "no payload" if received.payload is None else f"a payload of {len(received.payload)} bytes"
            what = f"{words(flown.message)} came with {size}, which is not what left"
            raise self.broke(Rule.PAYLOAD, end, f"{what}: torn, or rewritten on its way without being pinned")

    def ended(self, end: End, error: Exception) -> None:
        """Reading at ``end`` raised: may the link be dead, and was all delivered?"""
        self.told.add(end)
        if end in self.closed:
            return
        if not self.closed and not self.cut:
            raise self.broke(Rule.LIVES, end, f"nobody had given it up: {error!r}") from error
        missed = [each.message for each in self.flying[end] if not (isinstance(each.message, Bye) or each.given_up)]
        if missed and not self.cut and not self.delivery.loses:
            said = ", ".join(words(message) for message in missed)
            raise self.broke(Rule.LAST_WORDS, end, f"it told its end ({error}) before {said}") from error

    def broke(self, rule: Rule, end: End, what: str) -> Breach:
        """Remember a breach, seen at ``end``."""
        return self.watch.broke(rule, f"{self.name}, {end.value}: {what}")
