"""Rare interleavings of two threads: one thread is delayed at a point where the other may run in between."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fleet import PATIENCE, Crew, Worker, WorkerSetup, large
from store_fleet import StorePair, lead, meet, until
from torch import nn

from weightsync import DistributedWeightSyncScheme, OutcomeKind, TransportError, WeightReceiver
from weightsync.transports.store import heartbeat, listener
from weightsync.transports.store.announcing import announced_key, base_key
from weightsync.transports.store.link import StoreLink
from weightsync.transports.store.link_threads import LinkThreads
from weightsync.transports.store.listener import _Listener
from weightsync.transports.store.store import Client

KEY = "a key of sixteen characters or more"


@contextlib.contextmanager
def serving(*receivers: WeightReceiver) -> Iterator[list[BaseException | None]]:
    """Receive in the block, in one thread for each receiver. Yields each one's error, or None."""
    raised: list[BaseException | None] = [None] * len(receivers)
    over = threading.Event()

    def serve(number: int) -> None:
        try:
            while not over.is_set():
                receivers[number].receive(timeout=0.05)
        except Exception as error:  # noqa: BLE001 - checked by the test
            raised[number] = error

    threads = [threading.Thread(target=serve, args=(number,), daemon=True) for number in range(len(receivers))]
    for thread in threads:
        thread.start()
    try:
        yield raised
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()


def listener_of(pair: StorePair) -> _Listener:
    found: _Listener = pair.receiver._listening._listeners[0].listener
    return found


def add_again(pair: StorePair) -> None:
    """Add the worker again over a new link, and check that the next send is applied."""
    with serving(pair.receiver) as raised:
        pair.sender.add_worker(0, (pair.store, 1))
        report = pair.sender.send(timeout=PATIENCE, on_failure="report")
    assert raised == [None]
    assert report.ok


def delay_the_senders_proof(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Give both ends a key. The trainer reads no challenge until the returned event is set."""
    monkeypatch.setenv("WEIGHTSYNC_KEY", KEY)
    asked, next_text = threading.Event(), LinkThreads._next_text

    def reads_late(threads: LinkThreads, inbox: Any) -> Any:
        if not threads._side.listens:
            assert asked.wait(PATIENCE)
        return next_text(threads, inbox)

    monkeypatch.setattr(LinkThreads, "_next_text", reads_late)
    return asked


# --------------------------------------------------------------- goodbyes after the announcement of another link


def test_the_goodbye_of_a_replaced_link_raises_no_error_while_its_replacement_is_accepted(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_KEY", KEY)
    next_key: Callable[[_Listener], str] = vars(_Listener)["_next_key"].fget
    claim, let_in = Client.claim, _Listener._admit
    asking, taken = threading.Event(), threading.Event()

    def asks_slowly(listening: _Listener) -> str:
        if threading.current_thread().name == "weightsync-link-reader":
            asking.set()
            assert taken.wait(PATIENCE)
        return next_key(listening)

    def takes_then(client: Client, key: str, *rest: Any) -> str:
        if key.endswith("/taken"):
            assert asking.wait(PATIENCE)
        return claim(client, key, *rest)

    def lets_in_late(listening: _Listener, link: StoreLink) -> None:
        until(lambda: listening._next == 2)
        taken.set()
        time.sleep(0.3)  # so that a goodbye that does not wait overtakes the link
        let_in(listening, link)

    with contextlib.closing(StorePair(store)) as pair:
        assert pair.sync().ok
        monkeypatch.setattr(_Listener, "_next_key", property(asks_slowly))
        monkeypatch.setattr(Client, "claim", takes_then)
        monkeypatch.setattr(_Listener, "_admit", lets_in_late)
        add_again(pair)


def test_a_receiver_may_register_again_while_its_former_listener_accepts_a_link(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take, before_end, taking = _Listener._accept_link, LinkThreads._before_end, threading.Event()

    def takes_late(listening: _Listener, *link: Any) -> None:
        taking.set()
        time.sleep(0.3)  # so that a goodbye that does not wait overtakes the link
        take(listening, *link)

    with contextlib.closing(StorePair(store)) as pair:
        assert pair.sync().ok
        goodbyes: list[LinkThreads] = []

        def listens_again(threads: LinkThreads, client: Client) -> None:
            goodbyes.append(threads)
            if len(goodbyes) == 1:
                assert taking.wait(PATIENCE)
                pair.receiver.register_worker_transport((store, 1))
            before_end(threads, client)

        monkeypatch.setattr(_Listener, "_accept_link", takes_late)
        monkeypatch.setattr(LinkThreads, "_before_end", listens_again)
        add_again(pair)


def test_a_receiver_may_register_again_before_a_sender_has_proved_its_key(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = delay_the_senders_proof(monkeypatch)
    with contextlib.closing(StorePair(store)) as pair:
        until(lambda: bool(listener_of(pair)._place.unproven))
        pair.receiver.register_worker_transport((store, 1))
        again.set()
        with serving(pair.receiver) as raised:
            report = pair.sender.send(timeout=PATIENCE, on_failure="report")
        assert raised == [None]
        assert report.ok


def test_closing_a_receiver_ends_the_links_of_senders_that_have_not_proved_their_key(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = delay_the_senders_proof(monkeypatch)
    with contextlib.closing(StorePair(store)) as pair:
        place = listener_of(pair)._place
        until(lambda: bool(place.unproven))
        pair.receiver.register_worker_transport((store, 1))
        (link,) = place.unproven
        pair.receiver.close()
        assert link._closed
        closed.set()


def test_a_refused_sender_that_closes_early_does_not_keep_the_receiver_from_the_next_sender(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another sender's link has been announced by then, so that the receiver has a sender to wait for."""
    await_successor, process = _Listener._await_successor, _Listener._process

    def asks_late(listening: _Listener, link: StoreLink, why: str) -> None:
        link._threads._read_all.wait(0.3)
        await_successor(listening, link, why)

    def takes_the_second_late(listening: _Listener, *announced: Any) -> None:
        time.sleep(0.6 * listening._next)
        process(listening, *announced)

    monkeypatch.setattr(_Listener, "_await_successor", asks_late)
    monkeypatch.setattr(_Listener, "_process", takes_the_second_late)
    with contextlib.ExitStack() as ends:
        misfit, fit, theirs = [ends.enter_context(DistributedWeightSyncScheme()) for _ in range(3)]
        for number, (scheme, model) in enumerate(((misfit, nn.Linear(3, 3)), (fit, large(1.0)))):
            scheme.init_on_sender("policy", store=store, num_workers=1, model=model)
            until(lambda: store.check([announced_key(base_key("policy", 1), number)]))  # noqa: B023 - called at once
        theirs.init_on_worker("policy", store=store, rank=1, model=large())
        receiver, refused = theirs.get_receiver(), misfit.get_sender()
        with serving(receiver) as raised:
            until(lambda: bool(receiver._driver.handshake_refusal))
            for _ in range(20):  # the sender learns of the refusal, and closes its end
                refused.poll()
                time.sleep(0.02)
            report = fit.get_sender().send(timeout=PATIENCE, on_failure="report")
        assert raised == [None]
        assert report.ok


# ------------------------------------------------------------------------------ heartbeats, and peers that watch them


def lead_and_die_while_announcing(setup: WorkerSetup, port: int) -> None:
    """Start a trainer of one worker in this process, which dies once the link is announced."""
    claim = Client.claim

    def claims_and_dies(client: Client, key: str, *rest: Any) -> str:
        found = claim(client, key, *rest)
        if "/announced/" in key:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Client.claim = claims_and_dies  # type: ignore[assignment,method-assign]
    lead(setup, port, 1)
    time.sleep(PATIENCE)


def test_a_trainer_that_dies_while_announcing_a_link_is_lost(crew: Crew, store: Any) -> None:
    trainer: Worker = crew.start(None)[0]
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", store=store, rank=1, model=large())
        trainer.tell(lead_and_die_while_announcing, store.port)
        trainer.process.join(PATIENCE)
        with pytest.raises(TransportError, match="the sender is lost: no heartbeat"):
            scheme.get_receiver().receive(timeout=PATIENCE)


def join_and_die_while_accepting(setup: WorkerSetup, port: int) -> None:
    """Join as a worker in this process, which dies once it has taken its link."""
    listener.worker_link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[attr-defined,assignment]
    meet(setup, port, 1)
    time.sleep(PATIENCE)


def test_a_worker_that_dies_while_accepting_a_link_is_lost(crew: Crew, store: Any) -> None:
    worker: Worker = crew.start(None)[0]
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", store=store, num_workers=1, model=large(1.0))
        worker.tell(join_and_die_while_accepting, store.port)
        worker.process.join(PATIENCE)
        report = scheme.get_sender().send(timeout=PATIENCE, on_failure="report")
        assert report[0].kind is OutcomeKind.LOST
        assert "no heartbeat" in report[0].reason


def test_a_link_is_announced_only_once_the_heartbeat_is_connected(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer counts missed beats from the announcement on, and connecting the heartbeat may take seconds."""
    connected = threading.Event()

    def connects_late(at: Any) -> Client:
        assert connected.wait(PATIENCE)
        return Client(at)

    monkeypatch.setattr(heartbeat, "Client", connects_late)
    with contextlib.closing(StorePair(store)) as pair:
        time.sleep(0.3)
        announced = store.check([announced_key(base_key("policy", 1), 0)])
        connected.set()
        assert not announced
        assert pair.sync().ok


def test_a_store_lost_before_the_listener_has_connected_is_reported_by_receive(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = threading.Event()

    def connects_late(at: Any) -> Client:
        assert lost.wait(PATIENCE)
        return Client(at)

    monkeypatch.setattr(listener, "Client", connects_late)
    with DistributedWeightSyncScheme() as scheme:
        scheme.init_on_worker("policy", store=store, rank=1, model=large())
        receiver = scheme.get_receiver()
        (handle,) = receiver._listening._listeners
        handle.listener._heartbeat_member.heartbeat._report_store_lost("no descriptor was left")  # type: ignore[attr-defined]
        lost.set()
        with pytest.raises(TransportError, match=r"The store is lost: no descriptor was left\."):
            receiver.receive(timeout=PATIENCE)
