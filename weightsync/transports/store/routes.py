"""The messages about a fan-out that the ends of a link exchange in addition to the messages of the protocol.

Each text begins with a magic and its kind. On a link with a key it is sealed like any other.

kind       from     fields (big-endian)
LISTEN     trainer  -
ADDRESS    worker   size of the host's identity (1), the identity, the address
ROUTED     trainer  token (16), children (2), sizes of digest and parent (1 each), digest, parent, the update's frame
ASK        worker   version (8), why (1)
SUPPLY     trainer  version (8); the payload follows
"""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass
from typing import Final

from weightsync.protocol.codec import malformed

MAGIC: Final = b"WSYF"
TOKEN_NBYTES: Final = 16

_HEAD: Final = struct.Struct("!4sB")
_ROUTED: Final = struct.Struct("!16sHBB")
_ASK: Final = struct.Struct("!QB")
_SUPPLY: Final = struct.Struct("!Q")
#: An xxh3-128, or with a key a SHA-256. None is sent if the trainer sends the payload itself.
_DIGEST_SIZES: Final = (0, 16, 32)
_ADDRESS: Final = re.compile(r"\S{1,200}:[0-9]{1,5}")


class RouteKind(enum.IntEnum):
    """The kind of a text."""

    LISTEN = 1
    ADDRESS = 2
    ROUTED = 3
    ASK = 4
    SUPPLY = 5


class FetchFailure(enum.IntEnum):
    """Why a worker did not get a payload from its parent."""

    #: No connection could be made.
    UNREACHABLE = 1
    #: The parent has ended the connection.
    ENDED = 2
    #: It sent nothing for a while.
    SILENT = 3
    #: What it sent is not the payload.
    WRONG = 4


@dataclass(frozen=True, slots=True)
class Listen:
    """The trainer may make this worker a parent: it must listen."""

    def encoded(self) -> bytes:
        """The text."""
        return _HEAD.pack(MAGIC, RouteKind.LISTEN)


@dataclass(frozen=True, slots=True)
class ParentAddress:
    """Where a worker awaits its children."""

    host: bytes
    address: str

    def encoded(self) -> bytes:
        """The text."""
        return _HEAD.pack(MAGIC, RouteKind.ADDRESS) + bytes([len(self.host)]) + self.host + self.address.encode()


@dataclass(frozen=True, slots=True)
class Routed:
    """An update whose payload its worker passes on, or gets from a parent, or both."""

    #: Whoever presents it to the worker gets the payload.
    token: bytes
    #: How many will.
    children: int
    #: The payload's digest; empty if the trainer sends it.
    digest: bytes
    #: The parent's address; empty: the trainer sends the payload behind this text.
    parent: str
    #: The update, encoded.
    frame: bytes | memoryview = b""

    def encoded(self) -> bytes:
        """The text."""
        sizes = len(self.digest), len(self.parent)
        fixed = _HEAD.pack(MAGIC, RouteKind.ROUTED) + _ROUTED.pack(self.token, self.children, *sizes)
        return b"".join((fixed, self.digest, self.parent.encode("ascii"), self.frame))


@dataclass(frozen=True, slots=True)
class Ask:
    """A worker asks the trainer for a payload that it did not get from its parent."""

    version: int
    why: FetchFailure

    def encoded(self) -> bytes:
        """The text."""
        return _HEAD.pack(MAGIC, RouteKind.ASK) + _ASK.pack(self.version, self.why)


@dataclass(frozen=True, slots=True)
class Supply:
    """The trainer's answer: the payload follows."""

    version: int

    def encoded(self) -> bytes:
        """The text."""
        return _HEAD.pack(MAGIC, RouteKind.SUPPLY) + _SUPPLY.pack(self.version)


Route = Listen | ParentAddress | Routed | Ask | Supply


def decode_route(text: memoryview) -> Route | None:
    """What a text says about a fan-out; None: it is a message of the protocol.

    Raises ProtocolError: it is malformed.
    """
    if bytes(text[: len(MAGIC)]) != MAGIC:
        return None
    try:
        return _decode_body(RouteKind(text[len(MAGIC)]), text[_HEAD.size :])
    except (struct.error, ValueError, IndexError) as error:
        raise malformed(f"A message about a fan-out is malformed: {error}", text) from None


def _decode_body(kind: RouteKind, rest: memoryview) -> Route:
    match kind:
        case RouteKind.LISTEN:
            return Listen()
        case RouteKind.ADDRESS:
            start = 1 + rest[0]
            return ParentAddress(bytes(rest[1:start]), _address(rest[start:]))
        case RouteKind.ROUTED:
            return _decode_routed(rest)
        case RouteKind.ASK:
            version, why = _ASK.unpack(rest)
            return Ask(version, FetchFailure(why))
        case RouteKind.SUPPLY:
            return Supply(*_SUPPLY.unpack(rest))


def _decode_routed(rest: memoryview) -> Routed:
    token, children, digested, named = _ROUTED.unpack_from(rest)
    start, end = _ROUTED.size + digested, _ROUTED.size + digested + named
    if digested not in _DIGEST_SIZES or bool(digested) != bool(named):
        raise ValueError(f"a parent of {named} bytes with a digest of {digested}")
    parent = _address(rest[start:end]) if named else ""
    return Routed(token, children, bytes(rest[_ROUTED.size : start]), parent, rest[end:])


def _address(text: memoryview) -> str:
    address = bytes(text).decode("ascii")
    if _ADDRESS.fullmatch(address) is None:
        raise ValueError(f"{address!r} is no address")
    return address
