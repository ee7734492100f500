"""The decoders of data from a peer, each as a function of arbitrary bytes, for fuzzing.

A decoder may raise only typed errors. The functions here suppress these, so any exception that escapes is a finding.
`tests/fuzz.py` calls them with bytes from atheris and Hypothesis, `tests/transports/pipe/test_decoding.py` with bytes
from Hypothesis.
"""

from __future__ import annotations

import array
import contextlib
import socket
import struct
from collections.abc import Callable

import torch
from edits import with_checksum

from weightsync.errors import AuthenticationError, ProtocolError, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol import codec
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, BaseRef, Bye, Hello, NoBase, Part, Refusal, SlotRef, Update
from weightsync.protocol.report import Outcome, OutcomeKind, SyncReport
from weightsync.protocol.report_codec import encode_report
from weightsync.transports.buffers import Segment
from weightsync.transports.calls.server import Parcel
from weightsync.transports.calls.server_link import opened
from weightsync.transports.pipe.framing import PREAMBLE, Frame, Inflow
from weightsync.transports.pipe.link import MappedSegments
from weightsync.transports.sealing import Identity
from weightsync.transports.store.announcing import Announced
from weightsync.transports.store.seals import NoGuard, SenderGuard, WorkerGuard
from weightsync.transports.store.stream import decoded
from weightsync.weights.delta import apply, encode
from weightsync.weights.extra_state import decode_extras, encode_extras
from weightsync.weights.layout import Layout

HEADER = codec.HEADER_NBYTES
KEY, IDENTITY = SharedKey(bytes(32)), Identity("store", "policy", "0", "link")


def sealed(head: bytes, body: bytes) -> bytes:
    """A frame of this head and body, with its size and checksum set right."""
    return with_checksum(head[:20] + struct.pack("!I", len(body)) + head[24:] + body)


def carrying(report: bytes) -> bytes:
    """An encoded ack with these bytes as its nested report."""
    head = codec.encode(Ack(model_id="", incarnation=1, version=1))[:HEADER]
    return sealed(head, codec._ACK.pack(0, len(report), 0.0, 0) + report)


def _frame(data: bytes) -> bytes:
    """A frame. If the first byte is not 0, magic, version and checksum are made valid, so that the rest is decoded."""
    if data[:1] != b"\0" and len(data) > HEADER:
        return sealed(_SEEDS[0][:16] + data[17 : HEADER + 1], data[HEADER + 1 :])
    return data[1:]


def messages(data: bytes) -> None:
    """Decode a message, and check that it survives another round of encoding and decoding."""
    frame = _frame(data)
    with contextlib.suppress(ProtocolError):
        message = codec.decode(frame)
        assert message == codec.decode(codec.encode(message))


def reports(data: bytes) -> None:
    """Decode the report nested in an ack."""
    with contextlib.suppress(ProtocolError):
        codec.decode(carrying(data))


def layouts(data: bytes) -> None:
    """Decode a layout, and check that it encodes to the same bytes."""
    with contextlib.suppress(ProtocolError):
        assert Layout.decode(data).encode() == data


def extra_state(data: bytes) -> None:
    """Decode extra state, and check that its keys survive another round of encoding and decoding."""
    with contextlib.suppress(ProtocolError):
        extras = decode_extras(data)
        assert decode_extras(encode_extras(extras)).keys() == extras.keys()


def framing(data: bytes) -> None:
    """Read a pipe's stream, in two pieces and with descriptors, and look up the segments that its frames name."""
    ours, theirs = socket.socketpair()
    inflow, mapped = Inflow(ours), MappedSegments()
    count, piece = data[0] % 3 if data else 0, (data[1] if len(data) > 1 else 0) or 4096
    stream = _stream(data[2:])
    segments = [Segment(64) for _ in range(count)]
    try:
        passed = array.array("i", [segment.fd for segment in segments])
        theirs.sendmsg([stream[:piece] or b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)] if count else [])
        theirs.sendall(stream[piece:])
        theirs.shutdown(socket.SHUT_WR)
        _read_all(inflow, mapped)
    finally:
        inflow.close()
        mapped.clear()
        ours.close()
        theirs.close()


def _stream(data: bytes) -> bytes:
    if data[:1] == b"\0":
        return data[1 : 1 + 2**16]
    frame = PREAMBLE + _frame(data[: 2**15])
    return struct.pack("!i", len(frame)) + frame + data[2**15 : 2**16]


def _read_all(inflow: Inflow, mapped: MappedSegments) -> None:
    with contextlib.suppress(ProtocolError, EOFError):
        while True:
            inflow.read()
            while (found := inflow.next()) is not None:
                if isinstance(found, Frame):
                    _look_up(found, mapped)


def _look_up(frame: Frame, mapped: MappedSegments) -> None:
    slot = frame.message.slot if isinstance(frame.message, Update) else None
    if slot is not None:
        with contextlib.suppress(TransportError):  # the slot cannot be mapped
            mapped.find(slot, frame.descriptors, frame.untaken)


def store(data: bytes) -> None:
    """Decode what arrives over a store and its connections: announcements, messages with a payload, envelopes."""
    Announced.of(data.decode("ascii", "replace"))
    for guard in (NoGuard("the peer"), SenderGuard(KEY, IDENTITY, "the peer"), WorkerGuard(KEY, IDENTITY)):
        for text in (data, _frame(data)):
            with contextlib.suppress(ProtocolError, AuthenticationError):
                found = guard.open(memoryview(text))
                if found is not None:
                    decoded(found.text)


def calls(data: bytes) -> None:
    """Decode the frame and the payload of a Ray or RPC call."""
    brought = opened(Parcel("link", 0, _frame(data), memoryview(data[-8:])))
    assert isinstance(brought, ProtocolError) or brought.message is not None


def deltas(data: bytes) -> None:
    """Apply a delta. The first two bytes are the size of the payload that it is applied to."""
    payload = bytearray(int.from_bytes(data[:2], "big"))
    with contextlib.suppress(ProtocolError):
        apply(memoryview(data[2:]), memoryview(payload))


_UPDATE = Update(model_id="m", incarnation=1, version=1, layout_digest=b"", nbytes=3)
_REPORT = SyncReport(model_id="m", version=1, incarnation=2, outcomes={0: Outcome(kind=OutcomeKind.APPLIED)})
_BASE = BaseRef(version=1, digest=bytes(16))
_SEEDS = [
    codec.encode(Hello(model_id="m", incarnation=1, version=0, host=b"host", pid=1)),
    codec.encode(_UPDATE) + b"abc",
    codec.encode(Update(model_id="m", incarnation=1, version=2, layout_digest=b"", slot=SlotRef(segment=1)), 1),
    codec.encode(Ack(model_id="m", incarnation=1, version=1, nested=_REPORT)),
    codec.encode(Refusal(model_id="m", incarnation=1, version=1, kind=RefusalKind.REFUSED, reason="no")),
    codec.encode(Bye(model_id="m", incarnation=1, reason="done")),
    codec.encode(NoBase(model_id="m", incarnation=1, version=2)),
    codec.encode(Update(model_id="m", incarnation=1, version=2, layout_digest=b"", base=_BASE)),
    codec.encode(Update(model_id="m", incarnation=1, version=2, layout_digest=b"", nbytes=5, payload_id=b"1" * 16)),
    codec.encode(Part(model_id="m", incarnation=1, payload_id=b"1" * 16, nbytes=5, start=1, end=4)) + b"abc",
    codec.encode(Part(model_id="m", incarnation=1, payload_id=b"1" * 16, nbytes=5, start=1, end=4, segment=1)),
]


def _delta(new: bytes) -> bytes:
    found = encode(memoryview(bytes(len(new))), memoryview(new), 2, 2**20)
    assert found is not None
    return found


_LAYOUT = Layout([("a.weight", "float32", (2, 3)), ("b", "int8", ()), ("ö", "bfloat16", (0, 4))], ["norm"])
_EXTRAS = {"norm": {"t": torch.ones(2), "n": [1, 2.5, None, (True, "x")], 3: b"y"}, "other": 2**70}
_FRAMES = [b"\1" + seed for seed in _SEEDS]

#: Each decoder with valid inputs for it.
DECODERS: dict[str, tuple[Callable[[bytes], None], list[bytes]]] = {
    "messages": (messages, _FRAMES),
    "reports": (reports, [encode_report(_REPORT)]),
    "layouts": (layouts, [_LAYOUT.encode()]),
    "extra_state": (extra_state, [encode_extras(_EXTRAS)]),
    "framing": (framing, [b"\1\xff" + seed for seed in _FRAMES] + [b"\0\7\0\0\0\0\4user"]),
    "store": (store, [*_FRAMES, b"0" * 32 + b" proof"]),
    "calls": (calls, _FRAMES),
    "deltas": (deltas, [len(new).to_bytes(2, "big") + _delta(new) for new in (b"\1" * 9, b"\0\1" * 999)]),
}
