"""Both ranks of a link's process group connect, or neither, since gloo's wait for the other cannot be interrupted."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from weightsync import DistributedWeightSyncScheme, OutcomeKind, TransportError
from weightsync.clock import Deadline
from weightsync.transports.store import group, heartbeat
from weightsync.transports.store.announcing import RECEIVERS, SENDERS, Models
from weightsync.transports.store.group import RendezvousStore
from weightsync.transports.store.heartbeat import process_name
from weightsync.transports.store.listener import _Listener, _OtherProcess
from weightsync.transports.store.store import Client

#: Seconds. Only a failing test waits this long.
PATIENCE = 30.0


class Rank:
    """One end of a rendezvous, which waits in another thread."""

    def __init__(self, store: TCPStore, name: str) -> None:
        self.client = Client(store)
        self.over = threading.Event()
        self.rendezvous = RendezvousStore(self.client, "a link/", self.over)
        self.name = name

    def comes(self) -> None:
        self.rendezvous.set(self.name, b"an address")

    def waits_for(self, other: str) -> Future[None]:
        ended: Future[None] = Future()

        def wait() -> None:
            try:
                ended.set_result(self.rendezvous.wait([other]))
            except TransportError as error:
                ended.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        return ended


@pytest.fixture
def ranks() -> Any:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    both = Rank(store, "sender"), Rank(store, "receiver")
    yield both
    for rank in both:
        rank.client.close()


def assert_gives_up(ended: Future[None]) -> None:
    with pytest.raises(TransportError, match="was closed while it was being made"):
        ended.result(PATIENCE)


def test_both_ranks_connect_once_both_have_arrived(ranks: Any) -> None:
    sender, receiver = ranks
    sender.comes()
    waiting = sender.waits_for("receiver")
    receiver.comes()

    assert waiting.result(PATIENCE) is None
    assert receiver.waits_for("sender").result(PATIENCE) is None


@pytest.mark.parametrize("end", [lambda rank: rank.over.set(), lambda rank: rank.rendezvous.give_up()])
def test_a_rank_stops_waiting_for_a_peer_that_gave_up_before_it_arrived(
    ranks: Any, end: Callable[[Rank], None]
) -> None:
    sender, receiver = ranks
    sender.comes()
    waiting = sender.waits_for("receiver")
    end(receiver)

    if receiver.over.is_set():
        assert_gives_up(receiver.waits_for("somebody who never comes"))
    assert_gives_up(waiting)


def test_neither_rank_connects_if_one_gave_up_before_the_other_arrived(ranks: Any) -> None:
    sender, receiver = ranks
    receiver.comes()
    receiver.over.set()
    assert_gives_up(receiver.waits_for("sender"))
    sender.comes()

    assert_gives_up(sender.waits_for("receiver"))


def test_a_rank_that_is_closed_after_its_peer_began_to_connect_connects_too(ranks: Any) -> None:
    sender, receiver = ranks
    sender.comes()
    receiver.comes()
    sender.waits_for("receiver").result(PATIENCE)
    receiver.over.set()

    assert receiver.waits_for("sender").result(PATIENCE) is None


def test_a_closed_rank_stops_waiting_for_a_peer_that_died_after_both_agreed_to_connect(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_LAST_SECONDS", 0.05)
    sender, receiver = ranks
    sender.comes()
    receiver.waits_for("sender").result(PATIENCE)
    waiting = receiver.waits_for("what the sender would write next")
    assert not waiting.done()
    receiver.over.set()

    assert_gives_up(waiting)


def test_a_rank_that_has_read_only_its_own_address_can_still_give_up(ranks: Any) -> None:
    sender, _ = ranks
    sender.comes()
    sender.rendezvous.wait(["sender"])
    waiting = sender.waits_for("receiver")
    sender.over.set()

    assert_gives_up(waiting)


def test_a_rank_whose_link_no_process_takes_is_named_with_what_to_check(store: Any) -> None:
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", store=store, num_workers=1, model=nn.Linear(2, 2))
        sender = scheme.get_sender()
        sender.send_async()
        await_remark(sender, "no process has taken the link")
        report = sender.wait_async(timeout=0, on_failure="report")
    assert "no process has taken the link at rank 1 of this store: is its process running" in report[0].reason
    assert "init_on_worker(..., rank=1)" in report[0].reason


def test_no_model_is_logged_as_missing_while_a_worker_initialises_one_after_another(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("WARNING", "weightsync")
    monkeypatch.setattr(heartbeat, "REMARK_BEATS", 100)
    models = "actor", "critic"
    with contextlib.ExitStack() as stack:
        ours, theirs = ([stack.enter_context(DistributedWeightSyncScheme()) for _ in models] for _ in range(2))
        for model, scheme in zip(models, ours, strict=True):
            scheme.init_on_sender(model, store=store, num_workers=1, model=nn.Linear(2, 2))
        sender = ours[1].get_sender()
        sender.send_async()
        theirs[0].init_on_worker("actor", store=store, rank=1, model=nn.Linear(2, 2))
        await_remark(sender, "none of 'critic' so far")
        theirs[1].init_on_worker("critic", store=store, rank=1, model=nn.Linear(2, 2))
        assert theirs[1].get_receiver().receive(timeout=PATIENCE)
        sender.wait_async(timeout=PATIENCE)

    assert "so far" not in caplog.text


def await_remark(sender: Any, text: str) -> None:
    """Wait until the sender's remark on worker 0 has this text."""
    waited = Deadline(PATIENCE)
    while text not in sender._driver.remark(0) and not waited.passed:
        time.sleep(0.05)
    assert text in sender._driver.remark(0)


def await_beats(client: Client, count: int) -> None:
    """Wait until this process's heartbeat has beaten ``count`` times."""
    beats: set[bytes | None] = set()
    waited = Deadline(PATIENCE)
    while len(beats) < count and not waited.passed:
        beats.add(client.peek(f"weightsync/heartbeat/{process_name()}"))
        time.sleep(0.05)
    assert not waited.passed


def test_a_sender_and_a_receiver_of_different_models_are_told_both_names(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("WARNING", "weightsync")
    monkeypatch.setattr(heartbeat, "REMARK_BEATS", 2)
    with DistributedWeightSyncScheme() as ours, DistributedWeightSyncScheme() as theirs:
        ours.init_on_sender("policy", store=store, num_workers=1, model=nn.Linear(2, 2))
        theirs.init_on_worker("critic", store=store, rank=1, model=nn.Linear(2, 2))
        sender = ours.get_sender()
        sender.send_async()
        while "model 'critic': a sender of 'policy' waits" not in caplog.text or "critic" not in sender._driver.remark(
            0
        ):
            sender.poll()
        report = sender.wait_async(timeout=0, on_failure="report")

        assert report[0].kind is OutcomeKind.TIMED_OUT
        assert "rank 1 has a receiver of 'critic' in this store, and none of 'policy' so far" in report[0].reason
        late = DistributedWeightSyncScheme()
        with late:
            late.init_on_worker("policy", store=store, rank=1, model=nn.Linear(2, 2))
            assert late.get_receiver().receive(timeout=PATIENCE)
            assert not sender._driver.remark(0)


def test_models_written_outside_the_stores_prefix_are_not_named(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat's connection ignores the store's prefix, and must not find the models of another group."""
    monkeypatch.setattr(heartbeat, "REMARK_BEATS", 1)
    caplog.set_level("WARNING", "weightsync")
    mine = PrefixStore("mine", store)
    with contextlib.closing(Client(store)) as client:
        for whose in (RECEIVERS, SENDERS):
            Models(1, whose).add(client, "another's")
        with DistributedWeightSyncScheme() as ours, DistributedWeightSyncScheme() as theirs:
            ours.init_on_sender("policy", store=mine, num_workers=1, model=nn.Linear(2, 2))
            theirs.init_on_worker("critic", store=mine, rank=1, model=nn.Linear(2, 2))
            sender = ours.get_sender()
            sender.send_async()
            await_beats(client, 4)
            report = sender.wait_async(timeout=0, on_failure="report")

    assert "another's" not in report[0].reason
    assert "another's" not in caplog.text


def test_a_sender_is_not_listed_as_waiting_once_its_link_is_taken_or_it_has_closed(store: Any) -> None:
    waiting = Models(1, SENDERS)
    with contextlib.closing(Client(store)) as client, DistributedWeightSyncScheme() as theirs:
        for model_id in ("policy", "critic"):
            with DistributedWeightSyncScheme() as ours:
                ours.init_on_sender(model_id, store=store, num_workers=1, model=nn.Linear(2, 2))
                ours.get_sender().send_async()
                if model_id == "policy":
                    theirs.init_on_worker(model_id, store=store, rank=1, model=nn.Linear(2, 2))
                    assert theirs.get_receiver().receive(timeout=PATIENCE)
                    assert not waiting.without(client, "value")
                else:
                    while waiting.without(client, "value") != "'critic'":
                        time.sleep(0.01)
        while waiting.without(client, "value"):
            time.sleep(0.01)


def test_a_model_that_does_not_fit_into_the_list_is_not_reported_missing(store: Any) -> None:
    models = Models(1, RECEIVERS)
    with contextlib.closing(Client(store)) as client:
        for number in range(32):
            assert models.without(client, "policy") == ", ".join(repr(f"model {each}") for each in range(number))
            models.add(client, f"model {number}")
        models.add(client, "policy")

        assert not models.without(client, "policy")


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_process_that_receives_for_the_same_rank_logs_a_warning(
    store: Any, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    caplog.set_level("WARNING", "weightsync")
    place, other = "weightsync/policy/1/receiver", "f" * 32
    with contextlib.closing(Client(store)) as client, DistributedWeightSyncScheme() as scheme:
        client.set(place, other.encode())
        scheme.init_on_worker("policy", store=store, rank=1, model=nn.Linear(2, 2))
        for _ in range(times - 1):
            while client.value(place) == other.encode():
                time.sleep(0.01)
            scheme.get_receiver().register_worker_transport((store, 1))
        for beat in itertools.count():
            client.set(f"weightsync/heartbeat/{other}", str(beat).encode())
            if "model 'policy': another process receives for rank 1 of this store too" in caplog.text:
                break
            time.sleep(0.05)
        assert client.value(place) == process_name().encode()
        scheme.close()
        while client.value(place):
            time.sleep(0.01)


def test_a_receiver_that_registers_again_keeps_its_rank(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former listener must not delete the rank's key, by which a second process for the rank is noticed."""
    find, wake, listens = _OtherProcess.find, _Listener._wake, threading.Event()

    def found(other: _OtherProcess, client: Client) -> None:
        find(other, client)
        listens.set()

    def late(listener: _Listener) -> None:
        assert listens.wait(PATIENCE)
        wake(listener)

    with contextlib.closing(Client(store)) as client, DistributedWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", store=store, rank=1, model=nn.Linear(2, 2))
        while not client.value("weightsync/policy/1/receiver"):
            time.sleep(0.01)
        receiver = scheme.get_receiver()
        [former] = receiver._listening._listeners
        monkeypatch.setattr(_OtherProcess, "find", found)
        monkeypatch.setattr(_Listener, "_wake", late)
        receiver.register_worker_transport((store, 1))
        while not former.ended:  # type: ignore[attr-defined]
            time.sleep(0.01)

        assert client.value("weightsync/policy/1/receiver") == process_name().encode()


def test_a_dead_process_of_the_same_rank_does_not_count_as_alive(store: Any) -> None:
    looks: list[bool] = []
    with contextlib.closing(Client(store)) as client:
        client.set("weightsync/policy/1/receiver", b"f" * 32)
        client.set(f"weightsync/heartbeat/{'f' * 32}", b"7")
        other = _OtherProcess("weightsync/policy/1")
        other.find(client)
        looks += [other.is_alive(client) for _ in range(3)]
        client.delete(f"weightsync/heartbeat/{'f' * 32}")
        looks += [other.is_alive(client) for _ in range(3)]
    assert not any(looks)
