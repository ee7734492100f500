"""Shared keys: messages of peers without the key, and messages sealed for another place, are rejected."""

from __future__ import annotations

import logging
import os
import pickle

import pytest

from weightsync import AuthenticationError, ConfigurationError, DistributedWeightSyncScheme
from weightsync.keys import SharedKey
from weightsync.protocol.messages import Part, Update
from weightsync.transports import sealing
from weightsync.transports.buffers import Buffer
from weightsync.transports.sealing import (
    EnvelopeKind,
    Identity,
    Reason,
    SenderSeal,
    WorkerSeal,
    announcement,
    new_name,
    refusal,
)

KEY = SharedKey("a secret of both")
LINK = Identity("store", "policy", "1", new_name())


def ends(key: SharedKey = KEY, link: Identity = LINK) -> tuple[SenderSeal, WorkerSeal]:
    """Both ends of a link before their handshake."""
    return SenderSeal(key, link, "worker 0"), WorkerSeal(key, link)


def proven_ends(key: SharedKey = KEY, link: Identity = LINK) -> tuple[SenderSeal, WorkerSeal]:
    """Both ends of a link whose worker has verified its sender."""
    sender, worker = ends(key, link)
    sender.open(worker.challenge)
    worker.open(sender.seal(0, b""))
    return sender, worker


def test_an_early_envelope_is_readable_but_does_not_prove_its_sender() -> None:
    sender, worker = ends()

    early = worker.open(sender.seal(0, b"hello"))
    assert (early.kind, bytes(early.content), worker.proven) == (EnvelopeKind.EARLY, b"hello", False)

    sender.open(worker.challenge)
    proof = worker.open(sender.seal(1, b""))
    assert (proof.kind, worker.proven) == (EnvelopeKind.PROVEN, True)
    assert bytes(sender.open(worker.seal(0, b"ack")).content) == b"ack"


def test_replayed_envelopes_never_prove_their_sender() -> None:
    sender, before = ends()
    recorded = [sender.seal(0, b"hello"), sender.seal(1, b"weights")]
    sender.open(before.challenge)
    recorded.append(sender.seal(2, b""))

    worker = WorkerSeal(KEY, LINK)  # the same link, announced again

    for text in recorded[:2]:
        worker.open(text)
    with pytest.raises(AuthenticationError):
        worker.open(recorded[2])
    assert not worker.proven


def test_an_early_envelope_overtaken_by_the_proof_is_still_accepted() -> None:
    sender, worker = ends()
    early = sender.seal(1, b"hello")
    sender.open(worker.challenge)
    worker.open(sender.seal(0, b""))

    assert (worker.open(early).number, worker.proven) == (1, True)


OTHER_ENDS: dict[str, tuple[SharedKey, Identity]] = {
    "another key": (SharedKey("another secret"), LINK),
    "another link": (KEY, LINK._replace(name=new_name())),
    "another worker": (KEY, LINK._replace(worker="2")),
    "another model": (KEY, LINK._replace(model_id="critic")),
    "another transport": (KEY, LINK._replace(way="rpc")),
}


@pytest.mark.parametrize("other", OTHER_ENDS)
def test_envelopes_of_another_link_or_key_are_refused(other: str) -> None:
    key, link = OTHER_ENDS[other]
    sender, worker = ends(key, link)
    theirs, ours = proven_ends()

    with pytest.raises(AuthenticationError):
        worker.open(SenderSeal(KEY, LINK, "worker 0").seal(0, b"hello"))
    with pytest.raises(AuthenticationError):
        sender.open(ours.challenge)
    for text, end in ((theirs.seal(1, b"weights"), worker), (ours.seal(1, b"ack"), sender)):
        with pytest.raises(AuthenticationError):
            end.open(text)
    assert announcement(key, link) != announcement(KEY, LINK)


def test_an_envelope_reflected_to_its_author_is_refused() -> None:
    sender, worker = proven_ends()

    with pytest.raises(AuthenticationError):
        sender.open(sender.seal(1, b"weights"))
    with pytest.raises(AuthenticationError):
        worker.open(worker.seal(1, b"ack"))
    with pytest.raises(AuthenticationError):
        worker.open(worker.challenge)


def test_a_second_worker_cannot_answer_on_a_link() -> None:
    sender, _ = proven_ends()

    with pytest.raises(AuthenticationError, match="Two workers"):
        sender.open(WorkerSeal(KEY, LINK).challenge)


def test_a_changed_or_truncated_envelope_is_refused() -> None:
    sender, worker = proven_ends()
    text = sender.seal(1, b"weights", bytes(32))

    for position in range(len(text)):
        changed = bytearray(text)
        changed[position] ^= 1
        with pytest.raises(AuthenticationError):
            worker.open(changed)
    for end in range(len(text)):
        with pytest.raises(AuthenticationError):
            worker.open(text[:end])
    assert worker.open(text).number == 1


@pytest.mark.parametrize("reason", Reason)
def test_a_refusal_gives_its_reason_only_before_the_workers_challenge(reason: Reason) -> None:
    sender, worker = ends()
    with pytest.raises(AuthenticationError, match="WEIGHTSYNC_KEY"):
        sender.open(refusal(reason))

    sender.open(worker.challenge)
    with pytest.raises(AuthenticationError, match="no worker sends here"):
        sender.open(refusal(reason))


def test_malformed_envelopes_raise_authentication_error() -> None:
    for text in (b"", b"WSYK", b"WSYN" + bytes(80), b"WSYK" + bytes(80), refusal(Reason.OTHER_KEY)[:-1] + b"\xff"):
        sender, _ = ends()
        with pytest.raises(AuthenticationError):
            sender.open(text)


# ------------------------------------------------------------------------------------------------------ the key


def _texts_of_scheme_error_and_log(key: str, caplog: pytest.LogCaptureFixture) -> str:
    caplog.set_level(logging.DEBUG, "weightsync")
    scheme = DistributedWeightSyncScheme(key=key)
    sender, worker = ends(SharedKey(key))
    with pytest.raises(AuthenticationError) as caught:
        worker.open(SenderSeal(KEY, LINK, "worker 0").seal(0, b""))
    return "".join((repr(scheme), repr(vars(scheme)), repr(vars(sender)), repr(caught.value), caplog.text))


def test_the_key_appears_in_no_repr_error_or_log(caplog: pytest.LogCaptureFixture) -> None:
    assert "tell nobody" not in _texts_of_scheme_error_and_log("tell nobody", caplog)


def test_a_pickled_scheme_keeps_its_key() -> None:
    scheme = DistributedWeightSyncScheme(key=b"secret")

    assert pickle.loads(pickle.dumps(scheme))._key == SharedKey("secret")


@pytest.mark.parametrize("key", ["", b"", 7, "\ud800"])
def test_invalid_keys_are_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="key"):
        DistributedWeightSyncScheme(key=key)


def test_the_key_defaults_to_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SharedKey.given(None) is None
    monkeypatch.setenv("WEIGHTSYNC_KEY", "of the environment")
    assert SharedKey.given(None) == SharedKey("of the environment")
    assert SharedKey.given("given") == SharedKey(b"given")
    for text in ("", os.fsdecode(b"\xff random bytes")):
        monkeypatch.setenv("WEIGHTSYNC_KEY", text)
        with pytest.raises(ConfigurationError, match="WEIGHTSYNC_KEY"):
            SharedKey.given(None)


def test_secrets_of_different_purposes_and_parts_differ() -> None:
    found = {KEY.derived("a", "bc"), KEY.derived("ab", "c"), KEY.derived("a", "b", "c"), KEY.derived("a", b"bc", b"")}
    assert len(found) == 4


def test_a_payload_is_digested_once_for_all_links_and_anew_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[bytes] = []
    monkeypatch.setattr(sealing, "digest_of", lambda payload: digested.append(bytes(payload)) or b"%d" % len(digested))
    first, second = Buffer(4), Buffer(4)
    first.view[:] = second.view[:] = b"abcd"

    def digest(buffer: Buffer, version: int = 1, incarnation: int = 1) -> bytes:
        update = Update(model_id="m", incarnation=incarnation, version=version, layout_digest=b"", nbytes=3)
        return sealing.sent_digest(update, buffer)

    assert [digest(first), digest(first), digest(first, 2), digest(first)] == [b"1", b"1", b"2", b"3"]
    assert [digest(second) for _ in range(2)] == [b"4", b"4"]
    assert digest(second, incarnation=2) == b"5"
    assert digested == [b"abc"] * 5


def test_each_part_of_a_payload_is_digested_once_for_all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[bytes] = []
    monkeypatch.setattr(sealing, "digest_of", lambda payload: digested.append(bytes(payload)) or b"%d" % len(digested))
    buffer = Buffer(4)
    buffer.view[:] = b"abcd"

    def digest(start: int, end: int, payload_id: bytes = b"1" * 16) -> bytes:
        ends = {"nbytes": 4, "start": start, "end": end}
        return sealing.sent_part_digest(Part(model_id="m", incarnation=1, payload_id=payload_id, **ends), buffer)

    assert [digest(0, 2), digest(2, 4), digest(0, 2), digest(2, 4)] == [b"1", b"2", b"1", b"2"]
    assert digest(0, 2, b"2" * 16) == b"3"
    assert digested == [b"ab", b"cd", b"ab"]
