"""The receiver's pure half: what happens to it, which input that is, and what follows.

`step` *names* the input (all guards are in `name`), *looks up* its row, *returns* the next value and the effects.
Versions are compared as keys ``(incarnation, version)``, so a restarted trainer's first version is newer than all
of its former self's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weightsync.errors import ProtocolError
from weightsync.protocol import machine
from weightsync.protocol._tables import RECEIVER_ROWS, ReceiverInput, RefusalKind, State
from weightsync.protocol.machine import method_of, next_state, refusal
from weightsync.protocol.messages import Ack, Refusal
from weightsync.protocol.report import SyncReport

#: (incarnation, version)
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Deferred:
    """An answer that waits until its version has been handed on."""

    ack: Ack


@dataclass(frozen=True, slots=True)
class ReceiverData:
    """All that a receiver remembers beside its state."""

    #: The link of the handshake in force; None: no link.
    link: int | None = None
    #: The highest incarnation a handshake was made with; kept across links.
    fence: int = 0
    #: The newest key applied or refused, and the answer it got; kept across links.
    decided: Key | None = None
    answer: Ack | Refusal | Deferred | None = None
    #: The key that has arrived and is neither applied nor refused.
    pending: Key | None = None
    #: The key that the model serves, whole; None: none yet, or other weights were written by hand.
    served: Key | None = None


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class HelloArrived:
    """A handshake. ``misfit`` says why it cannot be taken (layout, protocol); empty: it can."""

    link: int
    incarnation: int
    misfit: str = ""


@dataclass(frozen=True, slots=True)
class UpdateArrived:
    """A version has arrived, whole."""

    link: int
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class Applied:
    """The pending version is live; ``answer`` tells the sender."""

    answer: Ack


@dataclass(frozen=True, slots=True)
class Defer:
    """The pending version is live, and is handed on before ``answer`` tells the sender."""

    answer: Ack


@dataclass(frozen=True, slots=True)
class SendAck:
    """The deferred answer may leave; ``nested`` tells what became of the version where it was handed on."""

    nested: SyncReport | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The pending version did not fit; ``answer`` tells the sender. Nothing was changed."""

    answer: Refusal


@dataclass(frozen=True, slots=True)
class Broken:
    """The swap failed half way and could not be undone; ``reason`` tells the sender."""

    reason: str = ""
    remote_traceback: str = ""


@dataclass(frozen=True, slots=True)
class Invalidate:
    """Somebody wrote other weights into the model by hand: it serves no version any more."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to the version decided last has left."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """A link is gone. ``failure`` says what failed at our end; empty: the other end closed it, or died."""

    link: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A sender's goodbye over a link, and the incarnation that it names."""

    link: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Close:
    """The user closes the receiver."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The receiver is closed because something failed, such as the block of code that used it."""

    reason: str
    remote_traceback: str = ""


Event = (
    HelloArrived
    | UpdateArrived
    | Applied
    | Defer
    | SendAck
    | Refused
    | Broken
    | Invalidate
    | Answered
    | LinkDown
    | Goodbye
    | Close
    | Fail
)

# ----------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Greet:
    """Answer the handshake with our own Hello."""

    link: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the handshake, with the reason and the fence."""

    link: int
    incarnation: int
    kind: RefusalKind
    reason: str


@dataclass(frozen=True, slots=True)
class Disown:
    """Say that nothing more is taken over the link that was in force: FENCED or FAILED, with the reason."""

    link: int
    incarnation: int
    kind: RefusalKind
    reason: str
    remote_traceback: str = ""


@dataclass(frozen=True, slots=True)
class Tell:
    """Refuse a version without ever having applied it."""

    link: int
    key: Key
    kind: RefusalKind


@dataclass(frozen=True, slots=True)
class Reply:
    """Send the answer to a decided version; `Answered` or `LinkDown` comes of it if we are awaiting_ack."""

    link: int
    answer: Ack | Refusal


@dataclass(frozen=True, slots=True)
class CloseLink:
    """Close the link, without a word."""

    link: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Say goodbye over the link, and close it."""

    link: int


Effect = Greet | Reject | Disown | Tell | Reply | CloseLink | Leave


class Step(machine.Step[ReceiverInput, ReceiverData, Effect]):
    """What follows from an event of the receiver's."""

    __slots__ = ()


# ------------------------------------------------------------------------------------------------- guards


def name(state: State, data: ReceiverData, event: Event) -> ReceiverInput | None:
    """The input that the event is in this state; None for the end of a link that was never ours or is replaced.

    None, too, for the goodbye of another sender than the one in force, and where no answer is deferred any more.

    Raises:
        ProtocolError: an update over a link without a handshake.
    """
    match event:
        case HelloArrived():
            return _name_hello(state, data, event)
        case UpdateArrived():
            return _name_update(state, data, event)
        case LinkDown(link=link):
            ours = data.link in (link, None) and state is not State.CLOSED
            return ReceiverInput.LINK_DOWN if ours else None
        case Goodbye():
            ends = data.link is None or _is_in_force(data, event)
            return ReceiverInput.LINK_DOWN if ends and state is not State.CLOSED else None
        case SendAck():
            deferred = isinstance(data.answer, Deferred) and state is not State.CLOSED
            return ReceiverInput.SEND_ACK if deferred else None
        case Answered() if isinstance(data.answer, Deferred):
            raise refusal(RECEIVER_ROWS, state, ReceiverInput, method_of(ReceiverInput.ANSWERED))
        case _:
            return _OWN[type(event)]


_OWN = {
    Applied: ReceiverInput.APPLIED,
    Defer: ReceiverInput.DEFERRED,
    Refused: ReceiverInput.REFUSED,
    Broken: ReceiverInput.BROKEN,
    Invalidate: ReceiverInput.INVALIDATED,
    Answered: ReceiverInput.ANSWERED,
    Close: ReceiverInput.CLOSE,
    Fail: ReceiverInput.CLOSE,
}


def _is_in_force(data: ReceiverData, event: Goodbye) -> bool:
    return (event.link, event.incarnation) == (data.link, data.fence)


def _name_hello(state: State, data: ReceiverData, event: HelloArrived) -> ReceiverInput:
    if event.incarnation < data.fence or event.misfit:
        return ReceiverInput.REJECTED
    if state is State.UNINITIALIZED:
        return ReceiverInput.CONNECT
    if event.link == data.link and event.incarnation == data.fence:
        return ReceiverInput.DUPLICATE
    return ReceiverInput.TAKEOVER


def _name_update(state: State, data: ReceiverData, event: UpdateArrived) -> ReceiverInput:
    if state in (State.UNINITIALIZED, State.CLOSED):
        return ReceiverInput.UPDATE
    if event.incarnation < data.fence:
        return ReceiverInput.STALE
    if event.link != data.link or event.incarnation > data.fence:
        raise ProtocolError(
            f"version {event.version} of incarnation {event.incarnation} arrived over a link that has made no "
            "handshake for it. The link is taken down; nothing was applied."
        )
    key = (event.incarnation, event.version)
    if key in (data.decided, data.pending):
        return ReceiverInput.DUPLICATE
    if key < max(data.decided or (0, 0), data.pending or (0, 0)):
        return ReceiverInput.STALE
    return ReceiverInput.NEWER if state is State.PENDING_ASYNC else ReceiverInput.UPDATE


# --------------------------------------------------------------------------------------------------- step


def step(state: State, data: ReceiverData, event: Event) -> Step:
    """Name the event's input, look up its row, return the next value and the effects.

    Raises:
        StateError: the table has no row for it; nothing has changed.
        ProtocolError: an update over a link without a handshake; nothing has changed.
    """
    named = name(state, data, event)
    if named is None:
        return Step(None, state, data, _beside(data, event))
    to = next_state(RECEIVER_ROWS, state, named)
    after, effects = _advance(named, data, event)
    return Step(named, to, after, effects)


def _advance(named: ReceiverInput, data: ReceiverData, event: Event) -> tuple[ReceiverData, tuple[Effect, ...]]:
    match event:
        case HelloArrived():
            return _greet(named, data, event)
        case UpdateArrived():
            return _take(named, data, event)
        case Applied() | Defer() | SendAck() | Refused():
            return _decide(data, event)
        case Broken(reason, trace):
            return replace(data, link=None, pending=None, served=None), _fail(data, data.link, reason, trace)
        case LinkDown(link, failure):
            ended = _fail(data, link, failure, "") if failure else (CloseLink(link),)
            return replace(data, link=None, pending=None), ended
        case Goodbye(link):
            return replace(data, link=None, pending=None), (CloseLink(link),)
        case Close():
            return replace(data, link=None, pending=None), () if data.link is None else (Leave(data.link),)
        case Fail(reason, trace):
            return replace(data, link=None, pending=None), _fail(data, data.link, reason, trace)
        case Invalidate():
            return replace(data, served=None), ()
        case Answered():
            return data, ()


def _beside(data: ReceiverData, event: Event) -> tuple[Effect, ...]:
    """A link beside the one in force has ended: it closes, and its sender is told what failed."""
    match event:
        case LinkDown(link, failure) if failure:
            return _fail(data, link, failure, "")
        case LinkDown(link):
            return (CloseLink(link),)
        case Goodbye(link) if link != data.link:
            return (CloseLink(link),)
        case _:
            return ()


def _greet(named: ReceiverInput, data: ReceiverData, event: HelloArrived) -> tuple[ReceiverData, tuple[Effect, ...]]:
    match named:
        case ReceiverInput.REJECTED:
            return data, _reject(data, event)
        case ReceiverInput.DUPLICATE:
            return data, ()
        case _:
            after = replace(data, link=event.link, fence=event.incarnation, pending=None)
            return after, (*_taken_over(data, event), Greet(event.link))


def _reject(data: ReceiverData, event: HelloArrived) -> tuple[Effect, ...]:
    fenced = event.incarnation < data.fence
    kind = RefusalKind.FENCED if fenced else RefusalKind.REFUSED
    reason = _NEWER if fenced else event.misfit
    rejection = Reject(event.link, event.incarnation, kind, reason)
    return (rejection,) if event.link == data.link else (rejection, CloseLink(event.link))


def _take(named: ReceiverInput, data: ReceiverData, event: UpdateArrived) -> tuple[ReceiverData, tuple[Effect, ...]]:
    key = (event.incarnation, event.version)
    match named:
        case ReceiverInput.STALE:
            return data, (Tell(event.link, key, RefusalKind.STALE),)
        case ReceiverInput.DUPLICATE:
            if key == data.decided and isinstance(data.answer, Ack | Refusal):
                return data, (Reply(event.link, data.answer),)
            return data, ()
        case ReceiverInput.NEWER if data.pending is not None:
            return replace(data, pending=key), (Tell(event.link, data.pending, RefusalKind.SUPERSEDED),)
        case _ if isinstance(data.answer, Deferred) and data.answer.ack.incarnation == event.incarnation:
            # Its sender may be waiting for it to catch up, and the newer version would take its place.
            ack = data.answer.ack
            return replace(data, pending=key, answer=ack), (Reply(event.link, ack),)
        case _:
            return replace(data, pending=key), ()


def _decide(data: ReceiverData, event: Applied | Defer | SendAck | Refused) -> tuple[ReceiverData, tuple[Effect, ...]]:
    match event:
        case Applied(answer):
            return _serving(data, answer), _reply(data, answer)
        case Defer(answer):
            return _serving(data, Deferred(answer)), ()
        case SendAck(nested):
            return _send_ack(data, nested)
        case Refused(answer):
            return replace(data, pending=None, decided=data.pending, answer=answer), _reply(data, answer)


def _serving(data: ReceiverData, answer: Ack | Deferred) -> ReceiverData:
    return replace(data, pending=None, decided=data.pending, answer=answer, served=data.pending)


def _send_ack(data: ReceiverData, nested: SyncReport | None) -> tuple[ReceiverData, tuple[Effect, ...]]:
    """The deferred answer leaves over the link in force, though that is a newer one, if it is its sender's."""
    assert isinstance(data.answer, Deferred)
    ack = replace(data.answer.ack, nested=nested)
    return replace(data, answer=ack), _reply(data, ack) if ack.incarnation == data.fence else ()


def _reply(data: ReceiverData, answer: Ack | Refusal) -> tuple[Effect, ...]:
    return () if data.link is None else (Reply(data.link, answer),)


def _taken_over(data: ReceiverData, event: HelloArrived) -> tuple[Effect, ...]:
    """The old link closes. An older sender is told that it is fenced; our own has replaced that link itself.

    If both senders use the same link, it stays: the older one hears the new fence with the answer to what was pending,
    and an answer that was deferred leaves at once.
    """
    if data.link is None:
        return ()
    if data.link == event.link:
        deferred = _reply(data, data.answer.ack) if isinstance(data.answer, Deferred) else ()
        return (*deferred, Tell(data.link, data.pending, RefusalKind.STALE)) if data.pending else deferred
    told = (Disown(data.link, data.fence, RefusalKind.FENCED, _NEWER),) if data.fence < event.incarnation else ()
    return (*told, CloseLink(data.link))


_NEWER = "this worker has met a newer sender"


def _fail(data: ReceiverData, link: int | None, reason: str, trace: str) -> tuple[Effect, ...]:
    """The link ends because something failed: its sender is told what."""
    if link is None:
        return ()
    return Disown(link, data.fence, RefusalKind.FAILED, reason, trace), CloseLink(link)
