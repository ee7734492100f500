"""The digest of an update.

The flat buffer is cut into chunks of 512 KiB, the last one shorter; an empty buffer has none. With ``h`` for xxh3-128
and its 16 bytes in the canonical order (big-endian), the digest is::

    h(size of the buffer as 8 bytes, little-endian || h(chunk 0) || h(chunk 1) || ... || encoded extra state)

A chunk is hashed right behind the copy that fills it, while it is still in the processor's cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final

import xxhash

from weightsync.weights.threads import in_threads, shares, threads_for

#: Bytes in a chunk. Part of the protocol: another size is another digest.
CHUNK: Final = 512 << 10
_SIZE: Final = struct.Struct("<Q")


def combined(nbytes: int, chunks: Iterable[bytes], extras: bytes) -> bytes:
    """The digest of a buffer of `nbytes` bytes whose chunks have these hashes, and of the encoded extra state."""
    return xxhash.xxh3_128_digest(b"".join((_SIZE.pack(nbytes), *chunks, extras)))


def digest(payload: memoryview, extras: bytes) -> bytes:
    """The digest of a flat buffer and the encoded extra state."""
    if 0 < payload.nbytes <= CHUNK:
        return combined(payload.nbytes, (xxhash.xxh3_128_digest(payload),), extras)
    return ChunkHashes(payload).combined(extras)


class ChunkHashes:
    """The hashes of a buffer's chunks, while several threads fill it."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._nbytes = payload.nbytes
        self._found = [b""] * -(-payload.nbytes // CHUNK)

    def reach(self, start: int, end: int) -> None:
        """Hash the chunks that lie whole in ``start:end``, which is filled."""
        last = len(self._found) if end == self._nbytes else end // CHUNK
        self._hash(range(-(-start // CHUNK), last))

    def in_order(self, start: int) -> InOrder:
        """Hashes chunks from their bytes, which are given in order from ``start`` on."""
        return InOrder(start, self._nbytes, self._found.__setitem__)

    def _hash(self, indices: Iterable[int]) -> None:
        for index in indices:
            self._found[index] = xxhash.xxh3_128_digest(self._payload[index * CHUNK : (index + 1) * CHUNK])

    def combined(self, extras: bytes) -> bytes:
        """The digest, once the whole buffer is filled. Hashes what `reach` has left, such as chunks of two threads."""
        left = [index for index, found in enumerate(self._found) if not found]
        threads = threads_for(len(left) * CHUNK)
        if threads == 1:
            self._hash(left)
        else:
            parts = shares(len(left) * CHUNK, CHUNK, threads)
            in_threads(lambda start, end: self._hash(left[start // CHUNK : end // CHUNK]), parts, threads)
        return combined(self._nbytes, self._found, extras)


class InOrder:
    """Hashes the chunks of a buffer from its bytes, which are given in order, wherever they lie.

    Args:
        start: the offset of the first byte that is given. A chunk that begins before it is not hashed.
        nbytes: the size of the buffer; None: it ends with `end`.
        on_hash: called with the index of each chunk and its hash.
    """

    def __init__(self, start: int, nbytes: int | None, on_hash: Callable[[int, bytes], object]) -> None:
        self._at = start
        self._nbytes = nbytes
        self._hashed = on_hash
        #: The chunk that has begun; None: it began before `start`.
        self._open: xxhash.xxh3_128 | None = None

    def take(self, piece: memoryview | bytes) -> None:
        """Take the next bytes."""
        rest = memoryview(piece)
        while rest.nbytes:
            index, chunk_offset = divmod(self._at, CHUNK)
            part = rest[: CHUNK - chunk_offset]
            self._at, rest = self._at + part.nbytes, rest[part.nbytes :]
            if part.nbytes == CHUNK:
                self._hashed(index, xxhash.xxh3_128_digest(part))
                continue
            if chunk_offset == 0:
                self._open = xxhash.xxh3_128()
            if self._open is not None:
                self._open.update(part)
                if chunk_offset + part.nbytes == CHUNK or self._at == self._nbytes:
                    self.end()

    def end(self) -> None:
        """The chunk that was begun, if one was, is whole, or the last one and shorter."""
        if self._open is not None:
            self._hashed((self._at - 1) // CHUNK, self._open.digest())
            self._open = None


class StreamedDigest(InOrder):
    """The digest of a buffer that is given piece by piece, in order."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        super().__init__(0, None, lambda _, found: self._chunks.append(found))

    def combined(self, extras: bytes) -> bytes:
        """The digest of everything that was taken. Nothing can be taken after this."""
        self.end()
        return combined(self._at, self._chunks, extras)
