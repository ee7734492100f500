"""The bytes on the wire change only together with the protocol's version."""

from __future__ import annotations

import json
from pathlib import Path

import golden
import pytest
import xxhash

from weightsync.protocol import codec
from weightsync.protocol._tables import PROTOCOL_VERSION, RefusalKind
from weightsync.protocol.codec import decode

NAMES = list(golden.frames())


def test_encoded_frames_equal_those_pinned_for_the_protocol_version() -> None:
    version, _ = golden.committed()

    if version == PROTOCOL_VERSION:
        assert golden.changed() == [], (
            f"peers of protocol {version} would misread these: raise [protocol] version in spec/protocol.toml, then "
            "`make protocol` pins them"
        )
    assert version == PROTOCOL_VERSION, "the version was raised: `make protocol` pins the bytes of the new one"


@pytest.mark.parametrize("name", NAMES)
def test_the_pinned_frames_decode_to_their_messages(name: str) -> None:
    _, frames = golden.committed()

    assert decode(bytes.fromhex(frames[name])) == dict(golden.messages())[name]


def test_the_slot_digest_in_an_ack_hashes_the_slots_fields_as_on_the_wire() -> None:
    """Both ends compute this digest, perhaps with different releases."""
    named = [b"s" * 16, bytes(3), b"\x10", bytes(11), b"\x07", bytes(7), b"\x03", b"d" * 16, b"extras"]
    which = codec.slot_digest(b"s" * 16, 2**100 + 7, 3, b"d" * 16, b"extras")

    assert which == xxhash.xxh3_128_digest(b"".join(named))


def test_swapping_two_refusal_kinds_changes_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = {RefusalKind.STALE: RefusalKind.FENCED, RefusalKind.FENCED: RefusalKind.STALE}
    monkeypatch.setattr(codec, "_REFUSALS", tuple(swapped.get(kind, kind) for kind in RefusalKind))

    assert set(golden.changed()) >= {"Refusal STALE", "Refusal FENCED"}


def test_changed_frames_are_not_pinned_under_the_same_protocol_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = tmp_path / "golden.json"
    other = {**golden.frames(), "Bye CLOSED": "00"}
    monkeypatch.setattr(golden, "GOLDEN", pins)
    pins.write_text(json.dumps({"protocol": PROTOCOL_VERSION, "frames": other}), encoding="utf-8")

    assert golden.main([]) == 1
    assert "Bye CLOSED: not the bytes of protocol" in capsys.readouterr().out
    pins.write_text(json.dumps({"protocol": PROTOCOL_VERSION - 1, "frames": other}), encoding="utf-8")
    assert golden.main([]) == 0
    assert golden.changed() == []
