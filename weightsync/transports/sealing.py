"""What travels under a shared key: each message in an envelope, and the challenges of both ends.

Both ends challenge each other, and nobody waits for it. The sender's challenge is its link's name, which it has just
drawn. What it says before it has an answer is *early*: sealed for that name. The worker draws a challenge of its own
and believes nothing yet. From then on both seal for both challenges: the first such envelope proves to the worker that
the sender is alive and no recording, and only then does what came early count. Direction, link and number are under
every MAC, so nothing can be replayed, sent back to its author or moved to another link.

offset  size  envelope (big-endian)
     0     4  magic, ``b"WSYK"``
     4     1  kind
     5     1  size of the payload's digest: 0 or 32
     6     8  number of the message
    14    32  HMAC-SHA256 of all else
    46     -  SHA-256 of the payload, where that travels beside the envelope
     -     -  content"""

from __future__ import annotations

import enum
import hashlib
import hmac
import secrets
import struct
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, Self

from weightsync.errors import AuthenticationError
from weightsync.keys import VARIABLE, SharedKey
from weightsync.protocol import codec
from weightsync.protocol.messages import Hello, Message, Update
from weightsync.transports.buffers import Buffer, sent_digest
from weightsync.transports.exposure import tell
from weightsync.transports.process import own_host

MAGIC: Final = b"WSYK"
_HEAD: Final = struct.Struct("!4sBBQ32s")
_COVERED: Final = struct.Struct("!BBQ")
_DIGEST_SIZES: Final = (0, 32)
_NONCE_NBYTES: Final = 32

Readable = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """What an envelope holds."""

    #: A sender's message, sealed before it knew the worker's challenge.
    EARLY = 1
    #: A sender's message, sealed for both challenges; without content it only proves the sender.
    PROVEN = 2
    #: The worker's challenge.
    CHALLENGE = 3
    #: A worker's message.
    ANSWER = 4
    #: Why the link is refused, in one byte; sealed by nobody, since there is no key in common.
    REFUSED = 5


class Reason(enum.IntEnum):
    """Why a link is refused."""

    OTHER_KEY = 1
    SENDER_HAS_NONE = 2
    WORKER_HAS_NONE = 3


_SAME: Final = f"Give both ends the same key= or {VARIABLE}"
#: Said to the sender, of the worker.
_TOLD: Final = {
    Reason.OTHER_KEY: f"{{}} has another key, and took nothing from us. {_SAME}.",
    Reason.SENDER_HAS_NONE: f"{{}} has a key and this process has none: it took nothing from us. {_SAME}.",
    Reason.WORKER_HAS_NONE: f"{{}} has no key, and this process has one: it took nothing from us. {_SAME}.",
}
#: Said by the worker, of a sender.
TURNED_AWAY: Final = {
    Reason.OTHER_KEY: f"it has another key. {_SAME}, if it is yours",
    Reason.SENDER_HAS_NONE: f"it has no key, and this process has one. {_SAME}, if it is yours",
    Reason.WORKER_HAS_NONE: f"it has a key, and this process has none. {_SAME}, if it is yours",
}


class Identity(NamedTuple):
    """A link, as both ends know it without telling each other."""

    #: The way it goes: links of different transports never mix.
    way: str
    model_id: str
    worker: str
    #: Drawn by the sender, at random, and never used again: its challenge.
    name: str


def new_name() -> str:
    """A name for a link: 128 random bits."""
    return secrets.token_hex(16)


class Envelope(NamedTuple):
    """An envelope, opened but not yet believed."""

    kind: Kind
    number: int
    mac: bytes
    #: Of the payload that travels beside it; empty: none does.
    digest: bytes
    content: memoryview

    @classmethod
    def of(cls, text: Readable) -> Self:
        """Read an envelope.

        Raises:
            AuthenticationError: it is none.
        """
        try:
            magic, kind, digested, number, mac = _HEAD.unpack_from(text)
            if magic != MAGIC or digested not in _DIGEST_SIZES or len(text) < _HEAD.size + digested:
                raise ValueError(magic)
            start = _HEAD.size + digested
            return cls(Kind(kind), number, mac, bytes(text[_HEAD.size : start]), memoryview(text)[start:])
        except (struct.error, ValueError, TypeError):  # a call may bring anything, not only bytes
            raise AuthenticationError("What came is in no envelope of ours, and was not believed.") from None

    def verify(self, secret: bytes) -> None:
        """Raise AuthenticationError unless whoever sealed it holds that secret."""
        if not hmac.compare_digest(self.mac, _mac(secret, self.kind, self.number, self.digest, self.content)):
            raise AuthenticationError("A message is under another key, or was changed on its way: it was not believed.")


def _mac(secret: bytes, kind: Kind, number: int, digest: bytes, content: Readable) -> bytes:
    mac = hmac.new(secret, _COVERED.pack(kind, len(digest), number) + digest, hashlib.sha256)
    mac.update(content)
    return mac.digest()


def _sealed(secret: bytes, kind: Kind, number: int, content: Readable, digest: bytes = b"") -> bytes:
    head = _HEAD.pack(MAGIC, kind, len(digest), number, _mac(secret, kind, number, digest, content))
    return b"".join((head, digest, content))


def is_envelope(text: object) -> bool:
    """Whether a text is under some key. What a call brought, either way, may be of any type."""
    return isinstance(text, bytes | bytearray | memoryview) and bytes(text[: len(MAGIC)]) == MAGIC


def refusal(reason: Reason) -> bytes:
    """The envelope that refuses a link."""
    return _HEAD.pack(MAGIC, Kind.REFUSED, 0, 0, bytes(32)) + bytes([reason])


def refused(envelope: Envelope, peer: str) -> AuthenticationError:
    """What such an envelope says to a sender."""
    reason = bytes(envelope.content[:1])
    known = reason and reason[0] in list(Reason)
    return AuthenticationError(_TOLD[Reason(reason[0]) if known else Reason.OTHER_KEY].format(peer))


def without_key(text: Readable, peer: str) -> AuthenticationError:
    """What an end without a key makes of an envelope."""
    envelope = Envelope.of(text)
    if envelope.kind is Kind.REFUSED:
        return refused(envelope, peer)
    return AuthenticationError(f"{peer} has a key and this process has none. {_SAME}.")


class _Session(NamedTuple):
    """The secrets of one link, once both ends are challenged: one for each direction."""

    down: bytes
    up: bytes

    @classmethod
    def of(cls, key: SharedKey, identity: Identity, nonce: bytes) -> Self:
        return cls(key.derived("down", *identity, nonce), key.derived("up", *identity, nonce))


class SenderSeal:
    """The sender's end of one link: it seals what goes down, and opens what comes up.

    Numbers are the caller's: it gives each message its own, and compares those that come.
    """

    def __init__(self, key: SharedKey, identity: Identity, peer: str) -> None:
        self._key = key
        self._identity = identity
        self._peer = peer
        self._early = key.derived("early", *identity)
        self._nonce = b""
        self._session: _Session | None = None

    @property
    def announcement(self) -> str:
        """What proves, with the link's name, that whoever announces it has the key."""
        return announcement(self._key, self._identity)

    @property
    def challenged(self) -> bool:
        """Whether the worker's challenge has come: what is sealed from now on proves us."""
        return self._session is not None

    def seal(self, number: int, content: Readable, digest: bytes = b"") -> bytes:
        """Seal a message."""
        session = self._session
        if session is None:
            return _sealed(self._early, Kind.EARLY, number, content, digest)
        return _sealed(session.down, Kind.PROVEN, number, content, digest)

    def open(self, text: Readable) -> Envelope:
        """Open what a worker says: an answer, or its challenge, which has been taken in then.

        Raises:
            AuthenticationError: it is not the worker's; or the worker refuses us, which the error says.
        """
        envelope = Envelope.of(text)
        if envelope.kind is Kind.REFUSED and self._session is None:
            raise refused(envelope, self._peer)
        if envelope.kind is Kind.CHALLENGE:
            self._take(envelope)
        elif envelope.kind is Kind.ANSWER and self._session is not None:
            envelope.verify(self._session.up)
        else:
            raise AuthenticationError(f"{self._peer} said what no worker says here: it was not believed.")
        return envelope

    def _take(self, envelope: Envelope) -> None:
        envelope.verify(self._key.derived("challenge", *self._identity))
        nonce = bytes(envelope.content)
        if self._session is not None and nonce != self._nonce:
            raise AuthenticationError(f"Two workers answered as {self._peer}: only one of them can be it.")
        self._nonce = nonce
        self._session = _Session.of(self._key, self._identity, nonce)


class WorkerSeal:
    """The worker's end of one link."""

    def __init__(self, key: SharedKey, identity: Identity) -> None:
        self._early = key.derived("early", *identity)
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._session = _Session.of(key, identity, nonce)
        #: To be sent before all else.
        self.challenge = _sealed(key.derived("challenge", *identity), Kind.CHALLENGE, 0, nonce)
        #: Whether the sender has proved that it lives: until then what it says is to be held back.
        self.proven = False

    def seal(self, number: int, content: Readable) -> bytes:
        """Seal an answer."""
        return _sealed(self._session.up, Kind.ANSWER, number, content)

    def open(self, text: Readable) -> Envelope:
        """Open what a sender says.

        Raises:
            AuthenticationError: it is not the sender's.
        """
        envelope = Envelope.of(text)
        if envelope.kind is Kind.PROVEN:
            envelope.verify(self._session.down)
            self.proven = True
        elif envelope.kind is Kind.EARLY:
            # Also behind a proof, which may have overtaken it: it is that sender's, whoever delivers it.
            envelope.verify(self._early)
        else:
            raise AuthenticationError("The sender said what no sender says here: it was not believed.")
        return envelope


def announcement(key: SharedKey, identity: Identity) -> str:
    """What proves that whoever announces a link has the key."""
    return key.derived("announcement", *identity).hex()


class Challenged(AuthenticationError):
    """A call came home with the worker's challenge: it is to be made once more, under `CallSeal.again`."""


class CallSeal(Protocol):
    """What a courier seals by. Calls of one link may come home in any order, and in any thread."""

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:
        """What a call carries.

        Raises:
            ConfigurationError: the message does not fit the wire.
        """

    def again(self, number: int) -> bytes:
        """What carries a call that was challenged: the worker has kept what it brought."""

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers that a call brought home.

        Raises:
            Challenged: it brought the worker's challenge.
            AuthenticationError: the worker has another key, or it is not the worker that answered.
            ProtocolError: an answer is malformed.
        """


class NoSeal:
    """Without a key: messages travel as they are.

    Args:
        peer: who is at the other end, for messages to people.
    """

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:  # noqa: ARG002 - sealed by nobody
        """The message."""
        return codec.encode(message)

    def again(self, number: int) -> bytes:
        """Nobody is challenged without a key."""
        raise AuthenticationError(f"{self._peer} challenged call {number}, which was under no key.")

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers, unless the worker has a key."""
        messages = decoded(frames, self._peer)
        if any(isinstance(each, Hello) and each.host not in {b"", own_host()} for each in messages):
            tell(f"The link to {self._peer} goes to another host")
        return messages


class KeyedSeal:
    """With a key.

    Args:
        key: shared with the worker.
        identity: of the link.
        peer: who is at the other end, for messages to people.
    """

    def __init__(self, key: SharedKey, identity: Identity, peer: str) -> None:
        self._seal = SenderSeal(key, identity, peer)
        self._peer = peer
        self._lock = threading.Lock()
        self._heard: set[int] = set()

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:
        """The message in an envelope, with the digest of its payload."""
        carries = isinstance(message, Update) and message.nbytes and payload is not None
        digest = sent_digest(message, payload) if carries else b""  # type: ignore[arg-type] # what `carries` says
        return self._seal.seal(number, codec.encode(message), digest)

    def again(self, number: int) -> bytes:
        """An envelope without content."""
        return self._seal.seal(number, b"")

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers, each of which is believed once."""
        messages = []
        for frame in _listed(frames):
            envelope = self._seal.open(frame)
            if envelope.kind is Kind.CHALLENGE:
                raise Challenged(f"{self._peer} challenged a call that answered its challenge.")
            with self._lock:
                if envelope.number in self._heard:
                    raise AuthenticationError(f"An answer of {self._peer} came again: it was not believed.")
                self._heard.add(envelope.number)
            messages.append(codec.decode(envelope.content))
        return messages


def seal_of(key: SharedKey | None, identity: Identity, peer: str) -> CallSeal:
    """What the sender's end of a link seals by."""
    return NoSeal(peer) if key is None else KeyedSeal(key, identity, peer)


def decoded(frames: Sequence[bytes], peer: str = "the worker") -> list[Message]:
    """The answers that a call brought home, under no key.

    Raises:
        AuthenticationError: the worker has a key.
        ProtocolError: a frame is malformed.
    """
    for frame in _listed(frames):
        if is_envelope(frame):
            raise without_key(frame, peer)
    return [codec.decode(frame) for frame in frames]


def _listed(frames: Sequence[bytes]) -> Sequence[bytes]:
    """The frames, of which a call may bring home anything else instead."""
    if not isinstance(frames, list | tuple):
        raise codec.malformed(f"A call brought home a {type(frames).__name__} where answers belong", b"")
    return frames
