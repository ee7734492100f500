"""Shared keys, since a store is open to anyone who reaches its port; and the addresses of a scheme's own store."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import PATIENCE, filled, large, small
from store_fleet import StorePair, reach
from torch import nn

from weightsync import DistributedTransport, DistributedWeightSyncScheme, OutcomeKind, TransportError, WorkerLostError
from weightsync.protocol import codec
from weightsync.protocol.messages import Ack
from weightsync.transports.sealing import EnvelopeKind, Reason, refusal
from weightsync.transports.store import stream
from weightsync.transports.store.mailbox import Outbox
from weightsync.transports.store.stream import EndOfStream, Stream, dial, own_address

KEY = "the fleet's own secret"


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "weightsync")


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSYNC_KEY", KEY)


@pytest.fixture(params=[small, large], ids=["inline", "behind its message"])
def fleet(request: pytest.FixtureRequest, keyed: None, store: Any) -> Iterator[StorePair]:
    """A sender and a receiver with a key, whose weights travel in their message or behind it."""
    made = StorePair(store, model=request.param)
    yield made
    made.close()


def value_of(model: nn.Module) -> float:
    return float(next(iter(model.state_dict().values())).flatten()[0])


def trainer(store: Any, key: str | None, **options: Any) -> DistributedWeightSyncScheme:
    scheme = DistributedWeightSyncScheme(key=key, **options)
    scheme.init_on_sender("policy", store=store, num_workers=1, model=filled(small(), 66.0))
    return scheme


# --------------------------------------------------------------------------------------------- with the key


def test_weights_travel_under_a_key(fleet: StorePair) -> None:
    for version in (1, 2):
        assert fleet.sync().version == version
    assert value_of(fleet.model) == value_of(fleet.source)


def test_workers_that_start_late_or_are_added_again_receive_versions_under_a_key(keyed: None, store: Any) -> None:
    source = filled(large(), 3.0)
    with DistributedWeightSyncScheme() as ours, DistributedWeightSyncScheme() as theirs:
        ours.init_on_sender("policy", store=store, num_workers=1, model=source)
        sender = ours.get_sender()
        sender.send_async()
        theirs.init_on_worker("policy", store=store, rank=1, model=large())
        receiver = theirs.get_receiver()

        assert receiver.receive(timeout=PATIENCE)
        sender.wait_async(timeout=PATIENCE)
        sender.add_worker(0, (store, 1))
        sender.send_async()
        while receiver.version != 2:
            with contextlib.suppress(ConnectionError):  # the old link's goodbye, if it comes before the new link
                receiver.receive(timeout=0.1)
        sender.wait_async(timeout=PATIENCE)


@pytest.mark.parametrize("key", [None, "another"], ids=["no key", "another key"])
def test_g4_a_sender_without_the_workers_key_has_no_effect_and_is_told_why(
    fleet: StorePair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    fleet.sync()
    fence = fleet.receiver.driver.data.fence
    monkeypatch.delenv("WEIGHTSYNC_KEY")

    with trainer(reach(fleet.store.port), key) as stranger, pytest.raises(WorkerLostError) as caught:
        stranger.get_sender().send(timeout=PATIENCE)

    wanted = "worker 0 has a key and this process has none" if key is None else "worker 0 has another key"
    assert wanted in caught.value.lost[0]
    assert "was turned away" in caplog.text
    assert fleet.receiver.receive(timeout=0) is False
    assert fleet.receiver.driver.data.fence == fence
    assert len(fleet.receiver.driver.links()) == 1
    assert fleet.sync().version == 2
    assert value_of(fleet.model) == value_of(fleet.source)


def test_a_sender_with_a_wrong_key_does_not_end_the_wait_for_the_trainer(keyed: None, store: Any) -> None:
    with DistributedWeightSyncScheme() as theirs, trainer(store, "another") as stranger:
        theirs.init_on_worker("policy", store=store, rank=1, model=small())
        with pytest.raises(WorkerLostError, match="another key"):
            stranger.get_sender().send(timeout=PATIENCE)
        assert theirs.get_receiver().receive(timeout=0) is False

        with trainer(store, None) as ours:
            ours.get_sender().send_async()
            assert theirs.get_receiver().receive(timeout=PATIENCE)
            ours.get_sender().wait_async(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("key", "reason"), [(None, "this process has none"), ("another", "worker 0 has another key")], ids=["none", "other"]
)
def test_a_transport_with_a_key_delivers_only_to_one_with_the_same_key(
    store: Any, key: str | None, reason: str
) -> None:
    weights = {"a": torch.full((3,), 5.0)}
    with DistributedTransport(store, 1, key=KEY) as worker:
        assert worker.receive_weights(timeout=0) is None
        with DistributedTransport(store, 1, key=key) as stranger, pytest.raises(WorkerLostError, match=reason):
            stranger.send_weights({"a": torch.full((3,), 66.0)}, timeout=PATIENCE)
        assert worker.receive_weights(timeout=0) is None

        with DistributedTransport(store, 1, key=KEY) as trainer:
            trainer.send_weights_async(weights)
            model_id, received = worker.receive_weights(timeout=PATIENCE)
            worker.send_ack()
            assert trainer.wait_ack(timeout=PATIENCE).ok
    assert (model_id, received["a"].tolist()) == ("policy", [5.0] * 3)


def test_a_worker_without_a_key_refuses_a_trainer_with_one(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    with DistributedWeightSyncScheme() as theirs, trainer(store, KEY) as ours:
        theirs.init_on_worker("policy", store=store, rank=1, model=small())
        with pytest.raises(WorkerLostError, match="has no key, and this process has one"):
            ours.get_sender().send(timeout=PATIENCE)
    assert "it has a key, and this process has none" in caplog.text


@pytest.mark.parametrize("forged", ["a plain ack", "an answer of its own, again", "a refusal of the link"])
def test_a_forged_answer_is_rejected_and_its_worker_is_lost(
    keyed: None, store: Any, monkeypatch: pytest.MonkeyPatch, forged: str
) -> None:
    written = Recorder(monkeypatch).written
    pair = StorePair(store, model=small)
    assert pair.sync().version == 1
    upwards = stream_of(pair.receiver.driver.links()[0])
    ack = Ack(model_id="policy", incarnation=pair.sender._driver.data.incarnation, version=2)
    own = [text for stream, text in written if stream is upwards][-1]
    texts = {"a plain ack": codec.encode(ack), "an answer of its own, again": own}
    upwards.write(texts.get(forged, refusal(Reason.OTHER_KEY)), None, lambda: None)

    with pytest.raises(WorkerLostError) as caught:
        pair.sender.send(filled(small(), 9.0), timeout=PATIENCE)
    assert caught.value.report[0].kind is OutcomeKind.LOST
    assert "rejected" in caught.value.lost[0]
    pair.close()


# ------------------------------------------------------------------------------------- messages in transit


def stream_of(link: Any) -> Stream:
    """The connection of a link."""
    stream: Stream = link._threads._stream
    return stream


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Recorder:
    """Records all that links write to their connections. ``change`` replaces the texts that are written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[tuple[Stream, bytes]] = []
        self.change: Callable[[bytes], bytes] = bytes
        before, begun = Stream.write, Stream.begin

        def begin(stream: Stream, text: bytes) -> bytes:
            self.written.append((stream, text := self.change(text)))
            return begun(stream, text)

        def write(stream: Stream, text: bytes, payload: memoryview | None, go_on: Callable[[], None]) -> None:
            text = self.change(text)
            self.written.append((stream, text))
            before(stream, text, payload, go_on)

        monkeypatch.setattr(Stream, "write", write)
        monkeypatch.setattr(Stream, "begin", begin)


def test_g4_replaying_all_recorded_messages_of_a_link_has_no_effect(
    keyed: None, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    named: dict[str, bytes] = {}
    write = Outbox._write

    def remembering(outbox: Outbox, value: bytes) -> None:
        named.setdefault(f"{outbox._key}/{outbox._number}", value)
        write(outbox, value)

    monkeypatch.setattr(Outbox, "_write", remembering)
    pair = StorePair(store, model=small)
    pair.sync(filled(small(), 5.0))
    link = pair.sender._driver.by_worker()[0]
    name, ours = link._threads._name, stream_of(link)
    introduction = named[f"weightsync/link/{name}/down/0"]
    assert introduction[5] == EnvelopeKind.EARLY
    written = [text for stream, text in recorder.written if stream is ours]
    announced = store.get("weightsync/policy/1/announced/0")
    pair.sync(filled(small(), 6.0))

    # Announce the link again, and replay everything that its sender wrote.
    store.delete_key(f"weightsync/link/{name}/taken")
    store.set(f"weightsync/link/{name}/down/0", introduction)
    store.set("weightsync/policy/1/announced/1", announced)
    _until(lambda: store.check([f"weightsync/link/{name}/up/1"]))
    address = store.get(f"weightsync/link/{name}/up/1").split()[-1].decode()
    again = dial(address, name)
    with contextlib.suppress(TransportError):  # the worker may close the connection before all is written
        for text in written:
            again.write(text, None, lambda: None)
    with pytest.raises((TransportError, EndOfStream)):
        again.read()

    assert pair.receiver.receive(timeout=0) is False
    assert len(pair.receiver.driver.links()) == 1
    assert value_of(pair.model) == 6.0
    again.close()
    pair.close()


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_message_altered_in_transit_is_rejected(
    keyed: None, store: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    recorder = Recorder(monkeypatch)
    pair = StorePair(store, model=small)
    pair.sync()
    before = value_of(pair.model)
    position = 70 if where == "first" else -1

    def change(text: bytes) -> bytes:
        changed = bytearray(text)
        changed[position] ^= 1
        return bytes(changed)

    recorder.change = change
    pair.sender.send_async(filled(small(), 9.0))
    with pytest.raises(ConnectionError, match="rejected"):
        pair.receiver.receive(timeout=PATIENCE)

    assert value_of(pair.model) == before
    pair.close()


def test_a_payload_altered_in_transit_is_rejected(keyed: None, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Stream.read_into
    with DistributedWeightSyncScheme(verify="layout") as ours, DistributedWeightSyncScheme() as theirs:
        ours.init_on_sender("policy", store=store, num_workers=1, model=large())
        theirs.init_on_worker("policy", store=store, rank=1, model=filled(large(), 1.0))
        sender, receiver = ours.get_sender(), theirs.get_receiver()
        sender.send_async(filled(large(), 8.0))
        receiver.receive(timeout=PATIENCE)
        sender.wait_async(timeout=PATIENCE)

        def read_into(stream: Stream, room: memoryview) -> None:
            before(stream, room)
            room[-1] ^= 1

        monkeypatch.setattr(Stream, "read_into", read_into)
        sender.send_async(filled(large(), 9.0))
        with pytest.raises(ConnectionError, match="rejected"):
            receiver.receive(timeout=PATIENCE)
        assert receiver.version == 1
        assert value_of(receiver.model) == 8.0


# -------------------------------------------------------------------------------------------------- addresses


def _listening() -> set[str]:
    """The addresses and ports at which this process listens, in the kernel's notation."""
    own = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def test_scheme_and_worker_listen_only_at_the_announced_address_and_the_worker_only_until_connected() -> None:
    before = _listening()
    with DistributedWeightSyncScheme() as ours, DistributedWeightSyncScheme() as theirs:
        ours.init_on_sender("policy", num_workers=1, model=filled(large(), 1.0))
        info = ours.get_store_info()
        announced = "{:08X}".format(int.from_bytes(socket.inet_aton(info["host"]), "little"))
        theirs.init_on_worker("policy", store_info=info, rank=1, model=large())

        # The worker listens there, too, until its sender has connected, which may already be the case.
        found = _listening() - before
        assert f"{announced}:{info['port']:04X}" in found
        assert {each.partition(":")[0] for each in found} == {announced}

        ours.get_sender().send_async()
        theirs.get_receiver().receive(timeout=PATIENCE)
        ours.get_sender().wait_async(timeout=PATIENCE)
        # Once its sender has connected, a worker accepts no more connections.
        assert _listening() - before == {f"{announced}:{info['port']:04X}"}


@pytest.mark.parametrize(
    ("stays", "towards_store", "wanted"),
    [
        (True, "10.0.0.7", "127.0.0.1"),
        (False, "10.0.0.7", "10.0.0.7"),
        (False, "fe80::1%eth0", "fe80::1%eth0"),
        (False, "127.0.0.1", "10.0.0.8"),
        (False, "::1", "10.0.0.8"),
        (False, None, "10.0.0.8"),
    ],
)
def test_a_worker_listens_at_an_address_that_its_sender_can_reach(
    stays: bool, towards_store: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "host_address", lambda: "10.0.0.8")
    assert own_address(stays, towards_store) == wanted


@pytest.mark.parametrize(("routed", "wanted"), [("10.0.0.9", "10.0.0.9"), (None, "127.0.0.1")])
def test_a_worker_whose_host_name_resolves_to_loopback_listens_at_its_routed_address(
    routed: str | None, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "host_address", lambda: "127.0.1.1")
    monkeypatch.setattr(stream, "_routed_address", lambda: routed)
    assert own_address(False, "127.0.0.1") == wanted


def test_the_routed_address_belongs_to_this_host() -> None:
    routed = stream._routed_address()
    if routed is not None:  # None without a network
        socket.create_server((routed, 0)).close()


def test_gloo_socket_ifname_decides_the_address_at_which_a_worker_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert own_address(False, "10.0.0.7") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(TransportError, match="GLOO_SOCKET_IFNAME names nowhere7"):
        own_address(True, None)
