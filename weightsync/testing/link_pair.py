"""The two recorded ends of one connection: what is sent at one end is compared with what arrives at the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import xxhash
from msgspec.structs import replace

from weightsync.clock import Stopwatch
from weightsync.errors import ConfigurationError, ProtocolError, TransportError
from weightsync.protocol._tables import Delivery
from weightsync.protocol.messages import Ack, Bye, Hello, Message, NoBase, Part, Refusal, Update
from weightsync.testing.rules import Rule, RuleViolation
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer


class End(Enum):
    """An end of a connection."""

    SENDER = "the sender's end"
    RECEIVER = "the receiver's end"

    @property
    def other(self) -> End:
        """The other end."""
        return End.RECEIVER if self is End.SENDER else End.SENDER


def words(message: Message) -> str:
    """A message, in words."""
    match message:
        case Update():
            return f"Update {message.version} of {message.nbytes} bytes"
        case Refusal():
            return f"Refusal {message.version} ({message.kind.name})"
        case Ack():
            return f"Ack {message.version}"
        case Hello() | Bye() | NoBase() | Part():
            return type(message).__name__


class EventKind(Enum):
    """What a recorder saw and its driver treats as an event."""

    #: A message arrived.
    CAME = "came"
    #: Writing reported that the link is dead.
    FAILED = "failed"
    #: Reading reported that the link is dead, or that its peer's bytes are malformed.
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of a watch's log."""

    kind: EventKind
    recorder: object
    message: Message | None = None


@dataclass
class Watch:
    """What all recorders of one scenario share: the steps, the log, the first broken rule, and the call in progress."""

    steps: list[str] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)
    breach: RuleViolation | None = None
    call: str = ""
    since: Stopwatch = field(default_factory=Stopwatch)

    def broke(self, rule: Rule, what: str) -> RuleViolation:
        """Remember a broken rule, since a driver may swallow the exception."""
        breach = RuleViolation(rule, what)
        self.breach = self.breach or breach
        return breach

    def check(self) -> None:
        """Raise the exception that a driver has swallowed."""
        if self.breach is not None:
            raise self.breach

    @contextlib.contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """Note which call of a link is in progress. An exception that the contract does not allow breaks a rule."""
        self.since = Stopwatch()
        self.call = call
        try:
            yield
        except (TransportError, ProtocolError, ConfigurationError, RuleViolation):
            raise
        except Exception as error:
            raise self.broke(Rule.OWN_ERRORS, f"{call} raised {error!r}") from error
        finally:
            self.call = ""


@dataclass(slots=True)
class MessageInFlight:
    """A message in flight, with the digest of its payload."""

    message: Message
    digest: bytes
    number: int = 0
    #: Whether its end was closed before it had reported the message as written: it may arrive, or not.
    given_up: bool = False


@dataclass
class LinkPair:
    """A connection between two recorders: the messages sent at one end that have not arrived at the other."""

    watch: Watch
    name: str
    delivery: Delivery
    #: Messages in flight, by the end that they go to.
    in_flight: dict[End, list[MessageInFlight]] = field(default_factory=lambda: {end: [] for end in End})
    arrived: dict[End, list[MessageInFlight]] = field(default_factory=lambda: {end: [] for end in End})
    #: The ends that were closed, and whether the connection was cut.
    closed: set[End] = field(default_factory=set)
    cut: bool = False
    met: bool = False  # whether the receiver's end exists
    #: The ends at which reading has reported that the link is dead.
    dead: set[End] = field(default_factory=set)
    #: Whether a message that arrives too early is judged at once, or only when it is known what became of the earlier
    #: ones.
    patient: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _newest: dict[End, int] = field(default_factory=lambda: dict.fromkeys(End, -1))

    def sent(self, end: End, message: Message, payload: Buffer | None) -> MessageInFlight:
        """Record that a message is sent at ``end``."""
        nbytes = message.nbytes if isinstance(message, Update) else 0
        digest = xxhash.xxh3_128_digest(payload.view[:nbytes]) if payload is not None and nbytes else b""
        entry = MessageInFlight(message, digest, next(self._numbers))
        self.in_flight[end.other].append(entry)
        return entry

    def unsent(self, end: End, entry: MessageInFlight) -> None:
        """Record that a message could not be sent after all."""
        self.in_flight[end.other] = [each for each in self.in_flight[end.other] if each is not entry]

    def came(self, end: End, received: Received) -> None:
        """Record that a message has arrived at ``end``, and check that it was allowed to."""
        message = received.message
        if isinstance(message, Update):
            message = replace(message, slot=None)
        index = self._find_in_flight(end, message)
        entry = self.in_flight[end].pop(index)
        self.arrived[end].append(entry)
        self._check_payload(end, entry, received)

    def _find_in_flight(self, end: End, message: Message) -> int:
        in_flight = self.in_flight[end]
        index = next((place for place, each in enumerate(in_flight) if each.message == message), None)
        if index is None and any(each.message == message for each in self.arrived[end]):
            if not self.delivery.duplicates:
                raise self.broke(Rule.ONCE, end, f"{words(message)} arrived again")
            self.in_flight[end].insert(0, next(each for each in self.arrived[end] if each.message == message))
            return 0
        if index is None:
            raise self.broke(Rule.GENUINE, end, f"{words(message)} arrived, but was never sent: {message!r}")
        self._check_order(end, index, message)
        return index

    def _check_order(self, end: End, index: int, message: Message) -> None:
        in_flight = self.in_flight[end]
        number, newest = in_flight[index].number, self._newest[end]
        self._newest[end] = max(newest, number)
        if self.delivery.reorders:
            return
        if number < newest:
            raise self.broke(Rule.ORDER, end, f"{words(message)} arrived after a message that was sent later")
        if index and not self.patient:
            before = ", ".join(words(each.message) for each in in_flight[:index])
            what = f"{words(message)} arrived, but {before}, sent before it, had not"
            raise self.broke(Rule.ORDER, end, f"{what}: overtaken, or lost")

    def _check_payload(self, end: End, entry: MessageInFlight, received: Received) -> None:
        if not entry.digest:
            if received.payload is not None and len(received.payload):
                what = f"{words(entry.message)} arrived with {len(received.payload)} bytes"
                raise self.broke(Rule.PAYLOAD, end, f"{what}, but was sent with none")
            return
        found = b"" if received.payload is None else xxhash.xxh3_128_digest(received.payload)
        if found != entry.digest:
            size = "no payload" if received.payload is None else f"a payload of {len(received.payload)} bytes"
            what = f"{words(entry.message)} arrived with {size}, which is not what was sent"
            raise self.broke(Rule.PAYLOAD, end, f"{what}: torn, or overwritten since it was not pinned")

    def ended(self, end: End, error: Exception) -> None:
        """Reading at ``end`` raised: check that the link may be dead and that everything was delivered."""
        self.dead.add(end)
        if end in self.closed:
            return
        if not self.closed and not self.cut:
            raise self.broke(Rule.LIVES, end, f"the link died though neither end was closed: {error!r}") from error
        missed = [each.message for each in self.in_flight[end] if not (isinstance(each.message, Bye) or each.given_up)]
        if missed and not self.cut and not self.delivery.loses:
            names = ", ".join(words(message) for message in missed)
            raise self.broke(Rule.LAST_WORDS, end, f"it reported its end ({error}) before {names}") from error

    def broke(self, rule: Rule, end: End, what: str) -> RuleViolation:
        """Remember a broken rule, seen at ``end``."""
        return self.watch.broke(rule, f"{self.name}, {end.value}: {what}")
