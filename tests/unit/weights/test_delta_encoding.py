"""A delta restores its payload bit by bit, and other bytes are refused."""

from __future__ import annotations

import random
import struct

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import ProtocolError
from weightsync.weights.delta import BLOCK, apply, encode, word_of
from weightsync.weights.layout import Layout

NO_LIMIT = 2**30


def applied(base: bytes, payload: bytes, word: int) -> tuple[int, bytes]:
    """The size of the delta between two payloads, and the result of applying it to the first."""
    delta = encode(memoryview(base), memoryview(payload), word, NO_LIMIT)
    assert delta is not None
    made = bytearray(base)
    apply(memoryview(delta), memoryview(made))
    return len(delta), bytes(made)


@given(
    st.sampled_from([2, 4]),
    st.sampled_from([0, 1, 7, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5]),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.0001, 0.01, 0.0625, 0.3, 1.0]),
    st.randoms(use_true_random=False),
)
def test_applying_a_delta_to_its_base_restores_the_payload_bit_for_bit(
    word: int, words: int, rest: int, share: float, chance: random.Random
) -> None:
    rng = numpy.random.default_rng(chance.getrandbits(32))
    base = rng.bytes(words * word + rest)
    changed = numpy.frombuffer(base, numpy.uint8).copy()
    which = rng.random(len(changed)) < share
    changed[which] = rng.integers(0, 256, int(which.sum()), numpy.uint8)
    payload = changed.tobytes()

    assert applied(base, payload, word)[1] == payload


def _bits(values: list[int], dtype: torch.dtype, width: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(width).view(dtype)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.zeros(9), -torch.zeros(9)),
        (
            _bits([0x7FC00000] * 3, torch.float32, torch.int32),
            _bits([0x7FC00001, -1, 0x7F800001], torch.float32, torch.int32),
        ),
        (_bits([0x7FC0] * 5, torch.bfloat16, torch.int16), _bits([0x7FC1, -1, 0, 1, 2], torch.bfloat16, torch.int16)),
        (
            _bits([0x7F] * 7, torch.float8_e4m3fn, torch.int8),
            _bits([-1, 0, 1, 2, 3, 4, 5], torch.float8_e4m3fn, torch.int8),
        ),
        (torch.zeros(5, dtype=torch.bool), torch.tensor([True, False, True, True, False])),
        (torch.zeros(3, dtype=torch.int64), torch.tensor([-1, 2**62, 1])),
        (torch.zeros(3, dtype=torch.complex128), torch.tensor([1 + 2j, 0, -0.0], dtype=torch.complex128)),
    ],
    ids=["negative zero", "NaN payloads", "bfloat16", "float8", "bool", "int64", "complex"],
)
@pytest.mark.parametrize("word", [2, 4])
def test_deltas_preserve_every_bit_of_every_dtype(before: torch.Tensor, after: torch.Tensor, word: int) -> None:
    old, new = (bytes(each.view(torch.uint8).numpy().data) for each in (before, after))

    assert old != new
    assert applied(old, new, word)[1] == new


@pytest.mark.parametrize(
    ("changed", "per_word"),
    [(1, 6.1), (100, 6.1), (BLOCK // 16 - 1, 6.0), (BLOCK // 16, 6.0), (BLOCK // 4, 4.5), (BLOCK, 4.0)],
)
def test_a_changed_word_adds_little_more_than_its_value_to_a_delta(changed: int, per_word: float) -> None:
    old = numpy.zeros(4 * BLOCK, "<u4")
    new = old.copy()
    new[BLOCK : 2 * BLOCK : BLOCK // changed][:changed] = 7

    size, made = applied(old.tobytes(), new.tobytes(), 4)

    assert made == new.tobytes()
    assert size <= 16 + 8 + changed * per_word


def test_the_delta_of_equal_payloads_is_only_its_header() -> None:
    payload = numpy.arange(3 * BLOCK, dtype="<u4").tobytes()

    assert applied(payload, payload, 4) == (16, payload)


def test_no_delta_is_made_above_the_size_limit() -> None:
    old, new = memoryview(bytes(8 * BLOCK)), memoryview(b"\1" * (8 * BLOCK))

    assert encode(old, new, 4, 8 * BLOCK - 1) is None
    assert encode(old, new, 4, 9 * BLOCK) is not None

    few = bytearray(8 * BLOCK)
    few[:: 4 * BLOCK // 100] = b"\1" * len(few[:: 4 * BLOCK // 100])
    size, _ = applied(bytes(old), bytes(few), 4)
    assert encode(old, memoryview(few), 4, size) is not None
    assert encode(old, memoryview(few), 4, size - 1) is None


def test_several_threads_encode_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    old = numpy.zeros(3 * 64 * BLOCK + 17, "<u4")
    new = old.copy()
    new[:: 64 * BLOCK - 1] = 1

    assert applied(old.tobytes(), new.tobytes(), 4)[1] == new.tobytes()


@pytest.mark.parametrize(
    ("weights", "word"),
    [({"a": torch.bfloat16}, 2), ({"a": torch.float32}, 4), ({"a": torch.float32, "b": torch.int8}, 4)],
)
def test_a_word_is_as_wide_as_most_of_the_elements(weights: dict[str, torch.dtype], word: int) -> None:
    layout = Layout([(name, str(dtype).removeprefix("torch."), (3,)) for name, dtype in weights.items()])

    assert word_of(layout) == word


def _delta(records: list[tuple[int, int]], rest: bytes, nbytes: int = 4 * BLOCK + 8, word: int = 4) -> bytes:
    head = struct.pack("<QIHH", nbytes, len(records), word, 0)
    return head + b"".join(struct.pack("<II", *each) for each in records) + rest


@pytest.mark.parametrize(
    "delta",
    [
        b"",
        _delta([], b"", nbytes=4 * BLOCK + 4),
        _delta([], b"", word=3),
        _delta([], b"x"),
        _delta([(0, 1)], b"1234"),
        _delta([(0, 0)], b""),
        _delta([(2, 1)], b"1234\0\0"),
        _delta([(1, 3)], b"1234" * 3),
        _delta([(1, 1), (0, 1)], b"1234" * 2 + b"\0\0" * 2),
        _delta([(0, 1), (0, 1)], b"1234" * 2 + b"\0\0" * 2),
        _delta([(1, 1)], b"1234" + b"\3"),
        struct.pack("<QIHH", 4 * BLOCK + 8, 2**32 - 1, 4, 0),
        struct.pack("<QIHH", 4 * BLOCK + 8, 0, 4, 1),
    ],
    ids=[
        *("empty", "another size", "no word", "too long", "no positions", "nothing in a block", "a block too far"),
        *(
            "more than a block has",
            "blocks in another order",
            "a block twice",
            "another number of bits",
            "no room",
            "not zero",
        ),
    ],
)
def test_a_malformed_delta_is_refused(delta: bytes) -> None:
    with pytest.raises(ProtocolError):
        apply(memoryview(delta), memoryview(bytearray(4 * BLOCK + 8)))


def test_a_position_outside_of_its_block_is_refused() -> None:
    words = 100
    delta = _delta([(0, 1)], b"1234" + struct.pack("<H", words), nbytes=4 * words)

    with pytest.raises(ProtocolError, match="does not have"):
        apply(memoryview(delta), memoryview(bytearray(4 * words)))
