"""Almost valid inputs of a decoder, and Hypothesis strategies for them, for tests and for `tests/fuzz.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash
from hypothesis import strategies as st

#: The kind of edit, the position, and the bytes. A cut removes as many bytes as the first of them says.
Edit = tuple[str, int, bytes]
edits: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(st.sampled_from(["write", "insert", "cut"]), st.integers(0, 2**16), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: list[Edit]) -> bytes:
    """The data after these edits."""
    for how, position, piece in changes:
        at = position % (len(data) + 1)
        behind = {"write": at + len(piece), "insert": at, "cut": at + piece[0]}[how]
        data = data[:at] + (b"" if how == "cut" else piece) + data[behind:]
    return data


def with_checksum(data: bytes) -> bytes:
    """An encoded message with a correct checksum."""
    return data[:8] + struct.pack("!Q", xxhash.xxh3_64_intdigest(data[16:])) + data[16:]


def spliced(one: bytes, other: bytes, at: int) -> bytes:
    """The beginning of one byte string followed by the end of another."""
    return one[: at % (len(one) + 1)] + other[at % (len(other) + 1) :]


def inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Inputs for a decoder to which the seeds are valid: edits and splices of the seeds, and arbitrary bytes."""
    seed = st.sampled_from(seeds)
    near = seed | st.builds(spliced, seed, seed, st.integers(0, 2**16))
    return st.builds(edited, near, edits) | st.binary(max_size=80)
