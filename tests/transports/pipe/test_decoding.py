"""Every decoder returns a valid value or raises a ProtocolError for any bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import decoders
import fuzz
import pytest
import wire_strategies as strategies
from decoders import DECODERS, carrying, sealed
from edits import edited, edits, inputs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from weightsync.errors import AuthenticationError, ConfigurationError, ProtocolError
from weightsync.keys import SharedKey
from weightsync.protocol import codec, report_codec
from weightsync.protocol.messages import Ack, Hello, Message, Update
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.protocol.report_codec import MAX_DEPTH
from weightsync.transports.base import Received
from weightsync.transports.calls.server import Parcel, decoded
from weightsync.transports.calls.server_link import opened
from weightsync.transports.sealing import Identity, KeyedSeal
from weightsync.weights.layout import Layout

#: JSON values that a report does not contain.
WORDS = ["NaN", "-Infinity", "Infinity", "-1", "1e999", "1.5", "9" * 400, "9" * 5000, "null", "[]", "{}", "true", '"x"']


def check_is_decoded_or_refused(data: bytes) -> None:
    try:
        message = codec.decode(data)
    except ProtocolError:
        return
    assert message == codec.decode(codec.encode(message))


@given(strategies.messages, edits)
def test_an_edited_frame_with_a_valid_checksum_is_decoded_or_refused(message: Message, changes: Any) -> None:
    data = codec.encode(message)
    body = edited(data[codec.HEADER_NBYTES :], changes)

    check_is_decoded_or_refused(sealed(data[: codec.HEADER_NBYTES], body))
    check_is_decoded_or_refused(edited(data, changes))


TRACED = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    "junk",
    [
        b"\n",
        b"00-",
        TRACED.encode() + b"\n",
        TRACED.encode() + b"\nnon-ascii=\xff",
        TRACED.encode() + b"\n" + b"x" * 513,
        TRACED.encode().upper(),
        b"ff" + TRACED.encode()[2:],
        bytes(2**20),
    ],
    ids=["empty", "cut", "no state", "no ascii", "too long", "upper case", "version ff", "a megabyte"],
)
def test_an_update_with_an_invalid_trace_context_is_refused(junk: bytes) -> None:
    update = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", extras=b"x")
    data = codec.encode(update)
    head, body = data[: codec.HEADER_NBYTES], data[codec.HEADER_NBYTES :]

    assert codec.decode(sealed(head, body + TRACED.encode())) == replace(update, trace_context=TRACED)
    with pytest.raises(ProtocolError):
        codec.decode(sealed(head, body + junk))


@pytest.mark.parametrize("junk", ["x", TRACED[:-1], f"{TRACED}\n{'x' * 513}"])
def test_encoding_an_invalid_trace_context_raises_configuration_error(junk: str) -> None:
    update = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", trace_context=junk)
    with pytest.raises(ConfigurationError, match="no trace context"):
        codec.encode(update)


@given(strategies.messages, st.integers(16, 71), st.integers(0, 255))
def test_an_edited_header_with_a_valid_checksum_is_decoded_or_refused(
    message: Message, position: int, value: int
) -> None:
    data = codec.encode(message)
    head = data[:position] + bytes([value]) + data[position + 1 : codec.HEADER_NBYTES]

    check_is_decoded_or_refused(sealed(head, data[codec.HEADER_NBYTES :]))


# ---------------------------------------------------------------------------------------- reports in an ack


@given(strategies.reports, edits)
def test_an_edited_report_is_decoded_or_refused(report: SyncReport, changes: Any) -> None:
    check_is_decoded_or_refused(carrying(edited(report_codec.encode_report(report), changes)))


@given(strategies.reports, st.integers(0, 2**16), st.sampled_from(WORDS))
def test_a_report_with_one_value_replaced_is_decoded_or_refused(report: SyncReport, which: int, word: str) -> None:
    text = report_codec.encode_report(report).decode()
    spots = [at for at in range(len(text)) if text[at - 2 : at] in (": ", ", ")]
    at = spots[which % len(spots)]
    end = min(position for sign in ",}]" if (position := text.find(sign, at)) >= 0)

    check_is_decoded_or_refused(carrying(f"{text[:at]}{word}{text[end:]}".encode()))


REPORT = SyncReport(
    model_id="m", version=1, incarnation=2, outcomes={0: Outcome(kind=OutcomeKind.APPLIED)}, superseded={0: (1,)}
)


def nested(depth: int, field: str) -> SyncReport:
    """Reports nested in each other by this field, ``depth`` of them."""
    report = REPORT
    for _ in range(depth - 1):
        report = replace(REPORT, **{field: {0: Outcome(kind=OutcomeKind.APPLIED, nested=report)}})
    return report


def with_field(path: str, word: str) -> bytes:
    record = json.loads(report_codec.encode_report(REPORT))
    *parents, last = path.split(".")
    inner = record
    for name in parents:
        inner = inner[name]
    inner[last] = "@"
    return json.dumps(record).replace('"@"', word).encode()


NUMBERS = ["version", "incarnation", "nbytes", "pack_s", "outcomes.0.fence", "outcomes.0.seconds"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize(
    "word", ["NaN", "Infinity", "-Infinity", "-1", "1e999", "9" * 400, "9" * 5000, "true", '"1"', "[]"]
)
def test_a_report_with_an_invalid_number_is_refused(field: str, word: str) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(carrying(with_field(field, word)))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        "{}".encode("utf-16"),
        b"0",
        b"null",
        b"{}",
        with_field("outcomes", '{"-1": {}}'),
        with_field("superseded", '{"0": 1}'),
        with_field("model_id", "[]"),
        with_field("outcomes.0.kind", "{}"),
        with_field("outcomes.0.reason", "null"),
    ],
    ids=range(12),
)
def test_a_malformed_report_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(carrying(data))


@pytest.mark.parametrize("field", ["outcomes", "not_caught_up"])
def test_reports_nested_deeper_than_the_limit_are_refused_at_both_ends(field: str) -> None:
    deepest = Ack(model_id="m", incarnation=1, version=1, nested=nested(MAX_DEPTH, field))
    assert codec.decode(codec.encode(deepest)) == deepest
    with pytest.raises(ConfigurationError, match="nested more than 32 deep"):
        codec.encode(replace(deepest, nested=nested(MAX_DEPTH + 1, field)))
    for depth in (MAX_DEPTH + 1, 230):
        with mock.patch("weightsync.protocol.report_codec.MAX_DEPTH", 300):
            data = report_codec.encode_report(nested(depth, field))
        with pytest.raises(ProtocolError, match="nested more than 32 deep"):
            codec.decode(carrying(data))
    with pytest.raises(ProtocolError, match="nested too deep"):
        codec.decode(carrying(b"[" * 200_000))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_the_seconds_of_an_ack_are_finite_and_not_negative(seconds: float) -> None:
    good = codec.encode(Ack(model_id="m", incarnation=1, version=1, seconds=0.25))
    bad = good.replace(struct.pack("!d", 0.25), struct.pack("!d", seconds))
    with pytest.raises(ProtocolError, match="duration"):
        codec.decode(sealed(bad[: codec.HEADER_NBYTES], bad[codec.HEADER_NBYTES :]))
    with pytest.raises(ConfigurationError, match="duration"):
        codec.encode(Ack(model_id="m", incarnation=1, version=1, seconds=seconds))


@pytest.mark.parametrize(
    "message",
    [Ack(model_id="m", incarnation=1, version=9), Update(model_id="m", incarnation=1, version=9, layout_digest=b"")],
    ids=["Ack", "Update"],
)
def test_version_0_in_an_update_or_ack_is_refused_at_both_ends(message: Any) -> None:
    head, body = bytearray(codec.encode(message))[: codec.HEADER_NBYTES], codec.encode(message)[codec.HEADER_NBYTES :]
    head[48:56] = bytes(8)
    with pytest.raises(ProtocolError, match="version 0 is below 1"):
        codec.decode(sealed(bytes(head), body))
    with pytest.raises(ConfigurationError, match="version 0"):
        codec.encode(replace(message, version=0))


# ---------------------------------------------------------------------------------- the decoders of `make fuzz`


@pytest.mark.parametrize(("decode", "seeds"), DECODERS.values(), ids=DECODERS)
@settings(max_examples=60)  # `make fuzz`, which CI also runs for every change, tries thousands
@given(data=st.data())
def test_only_typed_errors_escape_a_decoder(decode: Callable[[bytes], None], seeds: list[bytes], data: Any) -> None:
    decode(data.draw(inputs(seeds)))
    decode(data.draw(inputs(seeds)))


def test_the_fuzzer_runs_at_least_its_minimum_and_saves_the_simplest_failing_bytes(tmp_path: Path) -> None:
    def fails(data: bytes) -> None:
        if b"e" in data:
            raise OverflowError(data)

    assert fuzz.look(DECODERS["layouts"][0], DECODERS["layouts"][1], 0.0, tmp_path / "none") >= fuzz.EXAMPLES
    with pytest.raises(OverflowError):
        fuzz.look(fails, [b"seed"], 60.0, tmp_path / "crash")

    assert b"e" in (tmp_path / "crash").read_bytes()
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("decode", "seeds"), DECODERS.values(), ids=DECODERS)
def test_an_unexpected_error_of_a_decoder_escapes_to_the_fuzzer(
    decode: Callable[[bytes], None], seeds: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise OverflowError

    for home, name in [(codec, "decode_with"), (Layout, "decode"), (decoders, "decode_extras"), (decoders, "apply")]:
        monkeypatch.setattr(home, name, fails)
    with pytest.raises(OverflowError):
        decode(seeds[0])


# ------------------------------------------------------------------------------------------ calls (Ray, RPC)

anything = (
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=90) | st.lists(st.integers(), max_size=2)
)


@given(anything, st.none() | st.binary(max_size=40).map(memoryview))
def test_a_call_with_an_arbitrary_frame_is_refused(frame: Any, payload: memoryview | None) -> None:
    brought = opened(Parcel("link", 0, frame, payload))

    assert isinstance(brought, ProtocolError)


@given(strategies.hellos | strategies.updates, edits, st.none() | st.binary(max_size=40).map(memoryview))
def test_an_edited_call_is_decoded_or_refused(message: Message, changes: Any, payload: memoryview | None) -> None:
    data = codec.encode(message)
    brought = opened(Parcel("link", 0, sealed(data[:72], edited(data[72:], changes)), payload))

    assert isinstance(brought, ProtocolError) or isinstance(brought.message, Hello | Update)


@given(anything | st.lists(anything, max_size=2))
@example([0])
@example(["text"])
@example([None])
@example([b"WSYK"])  # the beginning of an envelope: the worker has a key
def test_an_arbitrary_result_of_a_call_has_no_messages_or_is_refused(frames: Any) -> None:
    try:
        assert decoded(frames) == []
    except (AuthenticationError, ProtocolError):
        return


@given(anything | st.lists(anything, max_size=2))
@example([0])
@example(["text"])
@example([None])
def test_an_arbitrary_result_of_a_call_with_a_key_has_no_messages_or_is_refused(frames: Any) -> None:
    seal = KeyedSeal(SharedKey(bytes(32)), Identity("ray", "policy", "0", "link"), "the worker")
    try:
        assert seal.brought(frames) == []
    except (AuthenticationError, ProtocolError):
        return


def test_a_calls_payload_is_cut_to_its_updates_size_and_refused_if_shorter() -> None:
    update = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=3)

    assert opened(Parcel("link", 0, codec.encode(update), memoryview(b"1234"))) == Received(update, memoryview(b"123"))
    assert isinstance(opened(Parcel("link", 0, codec.encode(update), memoryview(b"12"))), ProtocolError)
