"""Bytes that are almost what a decoder understands: Hypothesis's edits of them, for tests and for `tests/fuzz.py`."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

#: How, where, and with which bytes.
Edit = tuple[str, int, bytes]
edits: st.SearchStrategy[list[Edit]] = st.lists(
    st.tuples(st.sampled_from(["write", "insert", "cut"]), st.integers(0, 2**16), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: list[Edit]) -> bytes:
    """The data after some edits."""
    for how, position, piece in changes:
        at = position % (len(data) + 1)
        behind = {"write": at + len(piece), "insert": at, "cut": at + piece[0]}[how]
        data = data[:at] + (b"" if how == "cut" else piece) + data[behind:]
    return data


def spliced(one: bytes, other: bytes, at: int) -> bytes:
    """The beginning of one and the end of another."""
    return one[: at % (len(one) + 1)] + other[at % (len(other) + 1) :]


def inputs(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """What to give a decoder that understands the seeds: edits of them, splices of them, and any bytes."""
    seed = st.sampled_from(seeds)
    near = seed | st.builds(spliced, seed, seed, st.integers(0, 2**16))
    return st.builds(edited, near, edits) | st.binary(max_size=80)
