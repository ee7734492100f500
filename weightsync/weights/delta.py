"""Deltas between two packed payloads of one layout: the words that differ, with their new values, bit for bit.

A payload is compared as words of 2 or 4 bytes, in blocks of 65,536 words, on as many threads as torch may use. All
numbers are little-endian. A delta is

    size of the payload (8 bytes), number of blocks that differ (4), bytes of a word (2), zero (2)
    for each of these blocks: its number (4), how many of its words differ (4)
    the new values of all these words, in order
    for each of these blocks: which words differ
    the last bytes of the payload, if they make no whole word

Which words of a block differ is said by the shorter of a list of 2-byte positions and a map of one bit for each word;
if all of them do, by nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy

from weightsync.protocol.codec import malformed
from weightsync.weights.layout import Layout
from weightsync.weights.tensors import DTYPES
from weightsync.weights.threads import in_threads, shares, threads_for

_HEAD: Final = struct.Struct("<QIHH")
_WORDS: Final[dict[int, Any]] = {2: numpy.dtype("<u2"), 4: numpy.dtype("<u4")}
_RECORD: Final = numpy.dtype([("block", "<u4"), ("count", "<u4")])
#: Words of a block: a position in it takes 2 bytes.
BLOCK: Final = 1 << 16
#: Blocks that are compared in one go.
_STRIDE: Final = 64
#: The largest payload: the numbers of its blocks take 4 bytes.
_LARGEST: Final = BLOCK * 2 * 2**32

#: A block that differs: its number, how many words do, their values, and which they are.
_Block = tuple[int, int, bytes, bytes]


def word_of(layout: Layout) -> int:
    """The bytes of a word for payloads of a layout: 2 if most of its bytes are in types of 1 or 2 bytes, else 4."""
    narrow = sum(group.nbytes for group in layout.groups if DTYPES[group.dtype].itemsize <= 2)
    return 2 if 2 * narrow > layout.nbytes else 4


def encode(base: memoryview, payload: memoryview, word_size: int, max_nbytes: int) -> bytes | None:
    """Encode the differences of a payload from its base, which has the same size.

    Args:
        word_size: 2 or 4.
        max_nbytes: the largest delta that is wanted, in bytes.

    Returns:
        The delta; None if it would be larger.
    """
    if payload.nbytes > _LARGEST:
        return None
    words_nbytes = payload.nbytes // word_size * word_size
    old = numpy.frombuffer(base[:words_nbytes], _WORDS[word_size])
    new = numpy.frombuffer(payload[:words_nbytes], _WORDS[word_size])
    threads = threads_for(words_nbytes)
    parts = shares(words_nbytes, _STRIDE * BLOCK * word_size, threads)
    blocks_of_part: dict[int, list[_Block]] = {start: [] for start, _ in parts}
    sizes = dict.fromkeys(blocks_of_part, _HEAD.size)

    def compare(start: int, end: int) -> None:
        for first in range(start // word_size, end // word_size, _STRIDE * BLOCK):
            if sum(sizes.values()) > max_nbytes:
                return
            last = min(first + _STRIDE * BLOCK, end // word_size)
            for block in _differing_blocks(old[first:last], new[first:last], first // BLOCK):
                blocks_of_part[start].append(block)
                sizes[start] += _RECORD.itemsize + len(block[2]) + len(block[3])

    in_threads(compare, parts, threads)
    if sum(sizes.values()) > max_nbytes:
        return None
    blocks = [block for start in sorted(blocks_of_part) for block in blocks_of_part[start]]
    records = numpy.array([block[:2] for block in blocks], dtype=_RECORD) if blocks else numpy.empty(0, _RECORD)
    head = _HEAD.pack(payload.nbytes, len(blocks), word_size, 0)
    values, positions = (block[2] for block in blocks), (block[3] for block in blocks)
    return b"".join((head, records.tobytes(), *values, *positions, payload[words_nbytes:]))


def _differing_blocks(old: Any, new: Any, first_block: int) -> Iterator[_Block]:
    """The blocks that differ, among words that start at the beginning of a block."""
    differs = old != new
    if not differs.any():
        return
    for start in range(0, len(new), BLOCK):
        mask = differs[start : start + BLOCK]
        count = int(numpy.count_nonzero(mask))
        if count:
            words = new[start : start + BLOCK]
            yield first_block + start // BLOCK, count, words[mask].tobytes(), _positions(mask, count)


def _positions(mask: Any, count: int) -> bytes:
    if count == len(mask):
        return b""
    if 2 * count < -(-len(mask) // 8):
        return numpy.flatnonzero(mask).astype("<u2").tobytes()
    return numpy.packbits(mask, bitorder="little").tobytes()


def apply(delta: memoryview, payload: memoryview) -> None:
    """Apply a delta to its base, in place.

    Args:
        payload: the base, writable.

    Raises:
        ProtocolError: the delta is malformed, or is for a payload of another size. The payload is then undefined.
    """
    word_size, records = _read_head(delta, payload.nbytes)
    words_nbytes = payload.nbytes // word_size * word_size
    counts = records["count"].astype(numpy.int64)
    lengths = numpy.minimum(words_nbytes // word_size - records["block"].astype(numpy.int64) * BLOCK, BLOCK)
    if (numpy.diff(records["block"].astype(numpy.int64)) <= 0).any() or (counts < 1).any() or (counts > lengths).any():
        raise malformed("A delta names blocks that its payload does not have", delta[: _HEAD.size])
    sizes = numpy.where(counts == lengths, 0, numpy.minimum(2 * counts, -(-lengths // 8)))
    start = _HEAD.size + records.nbytes
    end = start + int(counts.sum()) * word_size
    tail = end + int(sizes.sum())
    if tail + payload.nbytes - words_nbytes != delta.nbytes:
        raise malformed("A delta is shorter or longer than it says", delta[: _HEAD.size])
    values = numpy.frombuffer(delta[start:end], _WORDS[word_size])
    words = numpy.frombuffer(payload[:words_nbytes], _WORDS[word_size])
    value_index, position_offset = 0, end
    for block, count, size, length in zip(
        records["block"].tolist(), counts.tolist(), sizes.tolist(), lengths.tolist(), strict=True
    ):
        changed = _decode_positions(delta[position_offset : position_offset + size], count, length)
        words[block * BLOCK : block * BLOCK + length][changed] = values[value_index : value_index + count]
        value_index, position_offset = value_index + count, position_offset + size
    payload[words_nbytes:] = delta[tail:]


def _read_head(delta: memoryview, nbytes: int) -> tuple[int, Any]:
    if delta.nbytes < _HEAD.size:
        raise malformed("A delta ends within its head", delta)
    base_nbytes, blocks, word_size, zero = _HEAD.unpack_from(delta)
    end = _HEAD.size + blocks * _RECORD.itemsize
    if base_nbytes != nbytes or word_size not in _WORDS or zero or end > delta.nbytes:
        raise malformed(f"A delta for {base_nbytes} bytes came for a payload of {nbytes}", delta[: _HEAD.size])
    return word_size, numpy.frombuffer(delta[_HEAD.size : end], _RECORD)


def _decode_positions(encoded: memoryview, count: int, length: int) -> Any:
    """Which words of a block differ, as an index of them."""
    if count == length:
        return slice(None)
    if 2 * count < -(-length // 8):
        positions = numpy.frombuffer(encoded, "<u2")
        if int(positions.max()) < length:
            return positions
    else:
        positions = numpy.unpackbits(numpy.frombuffer(encoded, numpy.uint8), count=length, bitorder="little").view(bool)
        if int(numpy.count_nonzero(positions)) == count:
            return positions
    raise malformed("A delta names words that its block does not have", b"")
