"""Messages under a shared key: each in an envelope, with the challenges of both ends.

Both ends challenge each other, and neither waits. The sender's challenge is its link's name, which it has just drawn at
random. What it sends before it has an answer is *early*: sealed for that name. The worker draws a challenge of its own
and trusts nothing yet. From then on both ends seal for both challenges. The first such envelope proves to the worker
that the sender is alive and not a recording, and only then do the early messages count. Direction, link and number are
under every MAC, so nothing can be replayed, sent back to its author or moved to another link.

offset  size  envelope (big-endian)
     0     4  magic, ``b"WSYK"``
     4     1  kind
     5     1  size of the payload's digest: 0 or 32
     6     8  number of the message
    14    32  HMAC-SHA256 of everything else
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
from weakref import WeakKeyDictionary

from weightsync.errors import AuthenticationError
from weightsync.keys import VARIABLE, SharedKey
from weightsync.protocol import codec
from weightsync.protocol.messages import Hello, Message, Part, Update
from weightsync.transports.buffers import Buffer
from weightsync.transports.exposure import warn_exposed
from weightsync.transports.process import PerProcess, own_host

MAGIC: Final = b"WSYK"
_HEAD: Final = struct.Struct("!4sBBQ32s")
_COVERED: Final = struct.Struct("!BBQ")
_DIGEST_SIZES: Final = (0, 32)
_NONCE_NBYTES: Final = 32

Readable = bytes | bytearray | memoryview


class EnvelopeKind(enum.IntEnum):
    """The content of an envelope."""

    #: A sender's message, sealed before it knew the worker's challenge.
    EARLY = 1
    #: A sender's message, sealed for both challenges. Without content it only proves the sender.
    PROVEN = 2
    #: The worker's challenge.
    CHALLENGE = 3
    #: A worker's message.
    ANSWER = 4
    #: Why the link is refused, in one byte. It is not sealed, since there is no common key.
    REFUSED = 5


class Reason(enum.IntEnum):
    """Why a link is refused."""

    OTHER_KEY = 1
    SENDER_HAS_NONE = 2
    WORKER_HAS_NONE = 3


_SAME_KEY: Final = f"Give both ends the same key= or {VARIABLE}"
#: For the sender, about the worker.
_MESSAGES: Final = {
    Reason.OTHER_KEY: f"{{}} has another key and accepted nothing from this process. {_SAME_KEY}.",
    Reason.SENDER_HAS_NONE: f"{{}} has a key and this process has none: it accepted nothing. {_SAME_KEY}.",
    Reason.WORKER_HAS_NONE: f"{{}} has no key, and this process has one: it accepted nothing. {_SAME_KEY}.",
}
#: For the worker, about a sender.
TURNED_AWAY: Final = {
    Reason.OTHER_KEY: f"it has another key. {_SAME_KEY}, if it is yours",
    Reason.SENDER_HAS_NONE: f"it has no key, and this process has one. {_SAME_KEY}, if it is yours",
    Reason.WORKER_HAS_NONE: f"it has a key, and this process has none. {_SAME_KEY}, if it is yours",
}


class Identity(NamedTuple):
    """A link, as both ends know it without exchanging it."""

    #: The transport: links of different transports never mix.
    way: str
    model_id: str
    worker: str
    #: The sender's challenge: drawn at random, and never used again.
    name: str


class _BufferDigests:
    """The digests of what one buffer held last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: The payload's key, or its id if it is sent in parts; and the digests of its ranges.
        self.held: tuple[int, int] | bytes = b""
        self.digests: dict[tuple[int, int], bytes] = {}


class _DigestCache(PerProcess):
    """The digests of what the buffers of this process held last."""

    def _begin(self) -> None:
        self._computed: WeakKeyDictionary[Buffer, _BufferDigests] = WeakKeyDictionary()

    def of(self, payload: Buffer) -> _BufferDigests:
        """The digests of what one buffer held last."""
        with self._lock:
            return self._computed.setdefault(payload, _BufferDigests())


_digest_cache: Final = _DigestCache()


def digest_of(payload: memoryview) -> bytes:
    """The SHA-256 of a payload."""
    return hashlib.sha256(payload).digest()


def sent_digest(update: Update, payload: Buffer) -> bytes:
    """The SHA-256 of an update's payload, while its buffer is pinned. Later callers wait for the first."""
    return _sent_range_digest((update.incarnation, update.version), payload, 0, update.nbytes)


def sent_part_digest(part: Part, payload: Buffer) -> bytes:
    """The SHA-256 of a part of a payload: see `sent_digest`."""
    return _sent_range_digest(part.payload_id, payload, part.start, part.end)


def _sent_range_digest(held: tuple[int, int] | bytes, payload: Buffer, start: int, end: int) -> bytes:
    cache = _digest_cache.of(payload)
    with cache.lock:
        if cache.held != held:
            cache.held, cache.digests = held, {}
        range_digest = cache.digests.get((start, end))
        if range_digest is None:
            range_digest = cache.digests[start, end] = digest_of(payload.view[start:end])
        return range_digest


def new_name() -> str:
    """A name for a link: 128 random bits."""
    return secrets.token_hex(16)


class Envelope(NamedTuple):
    """An opened envelope that is not verified yet."""

    kind: EnvelopeKind
    number: int
    mac: bytes
    #: The digest of the payload that is sent beside it; empty if there is none.
    digest: bytes
    content: memoryview

    @classmethod
    def of(cls, text: Readable) -> Self:
        """Read an envelope. Raises AuthenticationError: it is not an envelope."""
        try:
            magic, kind, digested, number, mac = _HEAD.unpack_from(text)
            if magic != MAGIC or digested not in _DIGEST_SIZES or len(text) < _HEAD.size + digested:
                raise ValueError(magic)
            start = _HEAD.size + digested
            return cls(EnvelopeKind(kind), number, mac, bytes(text[_HEAD.size : start]), memoryview(text)[start:])
        except (struct.error, ValueError, TypeError):  # a call may carry anything, not only bytes
            raise AuthenticationError("A message did not come in an envelope of weightsync: it was rejected.") from None

    def verify(self, secret: bytes) -> None:
        """Raise AuthenticationError unless the envelope was sealed with that secret."""
        if not hmac.compare_digest(self.mac, _mac(secret, self.kind, self.number, self.digest, self.content)):
            raise AuthenticationError("A message is under another key or was changed in transit: it was rejected.")


def _mac(secret: bytes, kind: EnvelopeKind, number: int, digest: bytes, content: Readable) -> bytes:
    mac = hmac.new(secret, _COVERED.pack(kind, len(digest), number) + digest, hashlib.sha256)
    mac.update(content)
    return mac.digest()


def _sealed(secret: bytes, kind: EnvelopeKind, number: int, content: Readable, digest: bytes = b"") -> bytes:
    head = _HEAD.pack(MAGIC, kind, len(digest), number, _mac(secret, kind, number, digest, content))
    return b"".join((head, digest, content))


def is_envelope(text: object) -> bool:
    """Whether a text is an envelope. The content of a call, in either direction, may be of any type."""
    return isinstance(text, bytes | bytearray | memoryview) and bytes(text[: len(MAGIC)]) == MAGIC


def refusal(reason: Reason) -> bytes:
    """The envelope that refuses a link."""
    return _HEAD.pack(MAGIC, EnvelopeKind.REFUSED, 0, 0, bytes(32)) + bytes([reason])


def refused(envelope: Envelope, peer: str) -> AuthenticationError:
    """The sender's error for such an envelope."""
    reason = bytes(envelope.content[:1])
    known = reason and reason[0] in list(Reason)
    return AuthenticationError(_MESSAGES[Reason(reason[0]) if known else Reason.OTHER_KEY].format(peer))


def without_key(text: Readable, peer: str) -> AuthenticationError:
    """The error of an end without a key that receives an envelope."""
    envelope = Envelope.of(text)
    if envelope.kind is EnvelopeKind.REFUSED:
        return refused(envelope, peer)
    return AuthenticationError(f"{peer} has a key and this process has none. {_SAME_KEY}.")


class _Session(NamedTuple):
    """The secrets of one link, one for each direction, once both ends are challenged."""

    down: bytes
    up: bytes

    @classmethod
    def of(cls, key: SharedKey, identity: Identity, nonce: bytes) -> Self:
        return cls(key.derived("down", *identity, nonce), key.derived("up", *identity, nonce))


class SenderSeal:
    """The sender's end of one link: it seals what it sends, and opens what the worker sends.

    The caller numbers the messages, and compares the numbers of those that arrive.
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
        """Proves, with the link's name, that the sender of the announcement has the key."""
        return announcement(self._key, self._identity)

    @property
    def challenged(self) -> bool:
        """Whether the worker's challenge has arrived, so that every later message proves this sender."""
        return self._session is not None

    def seal(self, number: int, content: Readable, digest: bytes = b"") -> bytes:
        """Seal a message."""
        session = self._session
        if session is None:
            return _sealed(self._early, EnvelopeKind.EARLY, number, content, digest)
        return _sealed(session.down, EnvelopeKind.PROVEN, number, content, digest)

    def open(self, text: Readable) -> Envelope:
        """Open a worker's message: an answer, or its challenge, which is processed here.

        Raises AuthenticationError: it is not from the worker, or the worker refuses us, as the error says.
        """
        envelope = Envelope.of(text)
        if envelope.kind is EnvelopeKind.REFUSED and self._session is None:
            raise refused(envelope, self._peer)
        if envelope.kind is EnvelopeKind.CHALLENGE:
            self._accept_challenge(envelope)
        elif envelope.kind is EnvelopeKind.ANSWER and self._session is not None:
            envelope.verify(self._session.up)
        else:
            raise AuthenticationError(f"{self._peer} sent a message that no worker sends here: it was rejected.")
        return envelope

    def _accept_challenge(self, envelope: Envelope) -> None:
        envelope.verify(self._key.derived("challenge", *self._identity))
        nonce = bytes(envelope.content)
        if self._session is not None and nonce != self._nonce:
            raise AuthenticationError(f"Two workers answered as {self._peer}: only one of them can be genuine.")
        self._nonce = nonce
        self._session = _Session.of(self._key, self._identity, nonce)


class WorkerSeal:
    """The worker's end of one link."""

    def __init__(self, key: SharedKey, identity: Identity) -> None:
        self._early = key.derived("early", *identity)
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        self._session = _Session.of(key, identity, nonce)
        #: To be sent before anything else.
        self.challenge = _sealed(key.derived("challenge", *identity), EnvelopeKind.CHALLENGE, 0, nonce)
        #: Whether the sender has proved that it is alive. Until then its messages must be held back.
        self.proven = False

    def seal(self, number: int, content: Readable) -> bytes:
        """Seal an answer."""
        return _sealed(self._session.up, EnvelopeKind.ANSWER, number, content)

    def open(self, text: Readable) -> Envelope:
        """Open a sender's message. Raises AuthenticationError: it is not from the sender."""
        envelope = Envelope.of(text)
        if envelope.kind is EnvelopeKind.PROVEN:
            envelope.verify(self._session.down)
            self.proven = True
        elif envelope.kind is EnvelopeKind.EARLY:
            # Also after a proof, which may have overtaken it: it is from that sender, whichever peer delivers it.
            envelope.verify(self._early)
        else:
            raise AuthenticationError("The sender sent a message that no sender sends here: it was rejected.")
        return envelope


def announcement(key: SharedKey, identity: Identity) -> str:
    """Proves that the sender that announces a link has the key."""
    return key.derived("announcement", *identity).hex()


class Challenged(AuthenticationError):
    """A call was answered with the worker's challenge. It must be repeated with `CallSeal.again`."""


class CallSeal(Protocol):
    """How a call client seals its calls. Calls of one link may end in any order and in any thread."""

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:
        """The content of a call. Raises ConfigurationError: the message does not fit the wire format."""

    def again(self, number: int) -> bytes:
        """The content of a repeated call, after a challenge. The worker has kept the first content."""

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers of a call.

        Raises:
            Challenged: the answer is the worker's challenge.
            AuthenticationError: the worker has another key, or the answer is not the worker's.
            ProtocolError: an answer is malformed.
        """


class NoSeal:
    """For links without a key: messages are sent unchanged."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def frame(self, number: int, message: Message, payload: Buffer | None) -> bytes:  # noqa: ARG002 - nothing is sealed
        """The message."""
        return codec.encode(message)

    def again(self, number: int) -> bytes:
        """Raise: there are no challenges without a key."""
        raise AuthenticationError(f"{self._peer} challenged call {number}, which was sent without a key.")

    def brought(self, frames: Sequence[bytes]) -> list[Message]:
        """The answers, unless the worker has a key."""
        messages = decoded(frames, self._peer)
        if any(isinstance(each, Hello) and each.host not in {b"", own_host()} for each in messages):
            warn_exposed(f"The link to {self._peer} goes to another host")
        return messages


class KeyedSeal:
    """For links with a key."""

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
        """The answers. A repeated answer is rejected."""
        messages = []
        for frame in _require_frames(frames):
            envelope = self._seal.open(frame)
            if envelope.kind is EnvelopeKind.CHALLENGE:
                raise Challenged(f"{self._peer} challenged a call that answered its challenge.")
            with self._lock:
                if envelope.number in self._heard:
                    raise AuthenticationError(f"An answer of {self._peer} was repeated: it was rejected.")
                self._heard.add(envelope.number)
            messages.append(codec.decode(envelope.content))
        return messages


def seal_of(key: SharedKey | None, identity: Identity, peer: str) -> CallSeal:
    """The seal for the sender's end of a link."""
    return NoSeal(peer) if key is None else KeyedSeal(key, identity, peer)


def decoded(frames: Sequence[bytes], peer: str = "the worker") -> list[Message]:
    """The answers of a call, without a key.

    Raises:
        AuthenticationError: the worker has a key.
        ProtocolError: a frame is malformed.
    """
    for frame in _require_frames(frames):
        if is_envelope(frame):
            raise without_key(frame, peer)
    return [codec.decode(frame) for frame in frames]


def _require_frames(frames: Sequence[bytes]) -> Sequence[bytes]:
    """The frames of a call's result, which may be of any type."""
    if not isinstance(frames, list | tuple):
        raise codec.malformed(f"A call returned a {type(frames).__name__} instead of answers", b"")
    return frames
