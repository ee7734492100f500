"""Calls under a shared key are kept until their sender has proved that it is alive, and each is accepted once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fleet import filled, large, small
from torch import nn

from weightsync import (
    AuthenticationError,
    OutcomeKind,
    RPCWeightSyncScheme,
    SenderClosed,
    WeightSender,
    WorkerLostError,
)
from weightsync.keys import SharedKey
from weightsync.protocol import codec
from weightsync.protocol.messages import Bye, Hello
from weightsync.transports import rpc as module
from weightsync.transports.base import Link
from weightsync.transports.calls import server as module_of_servers
from weightsync.transports.calls.gates import CallAuthenticator
from weightsync.transports.calls.server import CallRefused, CallServer, Parcel
from weightsync.transports.sealing import Challenged, EnvelopeKind, Identity, KeyedSeal, NoSeal

PATIENCE = 30.0
KEY = SharedKey("a secret of both")


class Worker:
    """The fake RPC worker of all calls, which is this process."""

    name = "worker"


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "weightsync")


# -------------------------------------------------------------------------------- end to end, over fake RPC calls


class Calls:
    """A fake of RPC within this process. A test can change a call in transit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        #: The link and the frame of each call.
        self.made: list[tuple[str, bytes]] = []
        self.change: Callable[[tuple[Any, ...]], tuple[Any, ...]] = lambda arguments: arguments
        monkeypatch.setattr(module.rpc, "rpc_async", self._call)
        monkeypatch.setattr(module, "require_rpc", lambda peer: None)
        monkeypatch.setattr(module, "is_initialised", lambda: True)
        monkeypatch.setattr(module, "_own_name", lambda: Worker.name)
        monkeypatch.setattr(module, "_call_servers", module._CallServers())
        monkeypatch.setattr(module.torch_rpc.api, "_get_current_rpc_agent", lambda: None)

        #: While this is a list, the returns of calls are held back here.
        self.held: list[Callable[[], None]] | None = None

    def _call(self, worker: Any, function: Any, *, args: tuple[Any, ...], timeout: float) -> Any:
        del worker, timeout
        self.made.append((args[1], args[3]))
        found = function(*self.change(args))
        over: torch.futures.Future[Any] = torch.futures.Future()
        if isinstance(found, torch.futures.Future):
            found.add_done_callback(lambda inner: self._return(over, inner.value()))
        else:
            self._return(over, found)
        return over

    def _return(self, over: torch.futures.Future[Any], found: Any) -> None:
        if self.held is None:
            over.set_result(found)
        else:
            self.held.append(lambda: over.set_result(found))

    def let_go(self) -> None:
        """Return the results that were held back."""
        held, self.held = self.held or [], None
        for each in held:
            each()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr("weightsync.schemes.peers.collectors.worker_named", lambda worker, peer: Worker)
    return Calls(monkeypatch)


@contextlib.contextmanager
def trainer(key: str | None, model: nn.Module) -> Iterator[WeightSender]:
    with RPCWeightSyncScheme(key=key) as scheme:
        sender = scheme.create_sender()
        sender.set_context(None, "policy")
        sender.add_worker(0, "worker")
        sender.connect()
        yield sender
        sender.close()
        del model


@contextlib.contextmanager
def worker(key: str | None, model: nn.Module) -> Iterator[Any]:
    with RPCWeightSyncScheme(key=key) as scheme:
        scheme.init_on_worker("policy", model=model)
        yield scheme.get_receiver()


def sync(sender: WeightSender, receiver: Any, weights: nn.Module) -> Any:
    sender.send_async(weights)
    receiver.receive(timeout=PATIENCE)
    return sender.wait_async(timeout=PATIENCE)


@pytest.mark.parametrize("model", [small, large])
def test_weights_sent_over_calls_with_a_key_are_sealed_and_applied(calls: Calls, model: Any) -> None:
    destination = model()
    with worker("k", destination) as receiver, trainer("k", destination) as sender:
        for fill in (1.0, 2.0):
            assert sync(sender, receiver, filled(model(), fill))[0].kind.name == "APPLIED"
            assert float(next(iter(destination.state_dict().values())).flatten()[0]) == fill
        carried = [frame for _, frame in calls.made]
        assert carried[0][4] == EnvelopeKind.EARLY
        assert carried[-1][4] == EnvelopeKind.PROVEN
        assert {frame[:4] for frame in carried} == {b"WSYK"}


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(("make", "kind"), [(small, OutcomeKind.APPLIED), (large, OutcomeKind.REFUSED)])
def test_one_receive_answers_on_the_newest_link_even_if_a_replaced_link_called_first(
    calls: Calls, key: str | None, make: Any, kind: OutcomeKind
) -> None:
    del calls
    with worker(key, make()) as receiver, trainer(key, small(1.0)) as sender:
        sender.send_async(small(1.0))
        sender.abandon()
        sender.add_worker(0, "worker")
        sender.send_async(small(1.0))

        assert receiver.receive(timeout=PATIENCE) is (make is small)
        assert sender.wait_async(timeout=PATIENCE, on_failure="report")[0].kind is kind


@pytest.mark.parametrize("key", [None, "k"])
def test_a_link_replaced_before_its_proof_leaves_no_link_at_the_worker(calls: Calls, key: str | None) -> None:
    """The replaced link's goodbye comes without a handshake, and must not leave the worker waiting for that link."""
    with worker(key, small()) as receiver:
        with trainer(key, small()) as sender:
            calls.held = []
            for _ in range(2):
                sender.add_worker(0, "worker")
            calls.let_go()
            assert sync(sender, receiver, filled(small(), 1.0)).ok
        with pytest.raises(SenderClosed):
            receiver.receive(timeout=PATIENCE)
        assert receiver.links() == []


def test_a_transport_has_the_key_of_the_scheme_that_made_it(calls: Calls) -> None:
    trains, another = RPCWeightSyncScheme(key="k"), RPCWeightSyncScheme(key="another")
    with worker("k", small()) as receiver:
        transport = trains.create_transport("worker")
        transport.send_weights_async("policy", filled(small(), 2.0))
        assert receiver.receive(timeout=PATIENCE)
        assert transport.wait_ack(timeout=PATIENCE).version == 1
        transport.close()
        with pytest.raises(WorkerLostError, match="has another key"):
            another.create_transport("worker").send_weights("policy", filled(small(), 66.0), timeout=PATIENCE)
    takes = trains.create_transport()
    takes_in = takes.receive_weights(timeout=0)  # from now on the transport listens
    stranger = another.create_transport("worker")
    with pytest.raises(WorkerLostError, match="has another key"):
        stranger.send_weights("policy", filled(small(), 66.0), timeout=PATIENCE)
    assert (takes_in, takes.receive_weights(timeout=0)) == (None, None)
    takes.close()


def test_an_update_sent_before_the_receiver_listens_is_applied_under_a_key(calls: Calls) -> None:
    with trainer("k", small()) as sender:
        sender.send_async(filled(small(), 3.0))
        with worker("k", small()) as receiver:
            receiver.receive(timeout=PATIENCE)
            assert sender.wait_async(timeout=PATIENCE).version == 1


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ("another", "k", "has another key"),
        (None, "k", "has a key and this process has none"),
        ("k", None, "has no key, and this process has one"),
    ],
)
def test_g4_a_caller_with_another_key_has_no_effect_and_is_told_the_reason(
    calls: Calls, caplog: pytest.LogCaptureFixture, ours: str | None, theirs: str | None, reason: str
) -> None:
    with worker(theirs, small()) as receiver, trainer(theirs, small()) as sender:
        sync(sender, receiver, filled(small(), 1.0))
        fence = receiver.driver.data.fence
        with trainer(ours, small()) as stranger, pytest.raises(WorkerLostError, match=reason):
            stranger.send(filled(small(), 66.0), timeout=PATIENCE)

        assert "was turned away" in caplog.text
        assert receiver.receive(timeout=0) is False
        assert receiver.driver.data.fence == fence
        assert sync(sender, receiver, filled(small(), 2.0)).version == 2


def test_a_payload_changed_in_transit_is_not_applied(calls: Calls) -> None:
    def change(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        *rest, payload = arguments
        return (*rest, None if not isinstance(payload, torch.Tensor) else payload + 1)

    with worker("k", small()) as receiver, trainer("k", small()) as sender:
        sync(sender, receiver, filled(small(), 1.0))
        calls.change = change
        with pytest.raises(WorkerLostError):
            sender.send(filled(small(), 9.0), timeout=PATIENCE)
        assert receiver.receive(timeout=0) is False
        assert receiver.version == 1


def test_an_unauthenticated_hang_up_does_not_end_the_calls_of_a_link(calls: Calls) -> None:
    with worker("k", small()) as receiver, trainer("k", small()) as sender:
        sync(sender, receiver, filled(small(), 1.0))
        link, _ = calls.made[0]
        for frame in (b"", b"WSYK", b"WSYN" + bytes(80)):
            module._hang_up("policy", link, 0, frame)

        assert sync(sender, receiver, filled(small(), 2.0)).version == 2


# ---------------------------------------------------------------------------------------------------- single calls

LINK = Identity("calls", "policy", "", "a" * 32)


def hello() -> Hello:
    return Hello(model_id="policy", incarnation=1)


@pytest.fixture
def call_server() -> Iterator[tuple[CallServer, list[Any]]]:
    made, links = CallServer("policy"), []
    stop = made.open(links.append, KEY)
    yield made, links
    stop()
    for link in links:
        link.close()


def test_a_call_is_held_until_its_sender_has_answered_the_challenge(call_server: tuple[CallServer, list[Any]]) -> None:
    opened, links = call_server
    seal = KeyedSeal(KEY, LINK, "the worker")
    challenge = opened.submit(Parcel(LINK.name, 0, seal.frame(0, hello(), None))).result(timeout=0)
    assert links == []
    assert opened.knows(LINK.name)

    with pytest.raises(Challenged):
        seal.brought(challenge)
    answer = opened.submit(Parcel(LINK.name, 0, seal.again(0)))
    [link] = links
    [received] = link.receive()
    link.send(hello())

    assert received.message == hello()
    assert seal.brought(answer.result(timeout=0)) == [hello()]
    with pytest.raises(AuthenticationError, match="was repeated"):
        seal.brought(answer.result(timeout=0))


@pytest.mark.parametrize("how", [CallServer.submit, CallServer.hang_up])
def test_a_goodbye_that_proves_its_sender_delivers_the_held_calls_before_it(
    call_server: tuple[CallServer, list[Any]], caplog: pytest.LogCaptureFixture, how: Callable[..., Any]
) -> None:
    """The sender repeats no call once its link is closed, or its goodbye overtakes the repeated call."""
    opened, links = call_server
    seal = KeyedSeal(KEY, LINK, "the worker")
    with pytest.raises(Challenged):
        seal.brought(opened.submit(Parcel(LINK.name, 0, seal.frame(0, hello(), None))).result(timeout=0))
    goodbye = Bye(model_id="policy", incarnation=1)
    how(opened, Parcel(LINK.name, 1, seal.frame(1, goodbye, None)))

    [link] = links
    assert [received.message for received in link.receive()] == [hello(), goodbye]
    opened.submit(Parcel(LINK.name, 0, seal.again(0)))
    assert link.receive() == []
    assert "turned away" not in caplog.text


def test_a_hang_up_call_is_not_lost_when_the_proof_arrives_concurrently(
    call_server: tuple[CallServer, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, links = call_server
    seal, forget = KeyedSeal(KEY, LINK, "the worker"), CallAuthenticator.forget
    challenge = opened.submit(Parcel(LINK.name, 0, seal.frame(0, hello(), None))).result(timeout=0)
    goodbye = Bye(model_id="policy", incarnation=1)
    last = Parcel(LINK.name, 1, seal.frame(1, goodbye, None))
    with pytest.raises(Challenged):
        seal.brought(challenge)

    def forget_late(gate: CallAuthenticator, link: str) -> Any:
        monkeypatch.setattr(CallAuthenticator, "forget", forget)
        opened.submit(Parcel(LINK.name, 0, seal.again(0)))
        return forget(gate, link)

    monkeypatch.setattr(CallAuthenticator, "forget", forget_late)
    opened.hang_up(last)

    [link] = links
    assert [received.message for received in link.receive()] == [hello(), goodbye]


def test_replayed_calls_deliver_nothing(call_server: tuple[CallServer, list[Any]]) -> None:
    opened, links = call_server
    seal = KeyedSeal(KEY, LINK, "the worker")
    early = Parcel(LINK.name, 0, seal.frame(0, hello(), None))
    with pytest.raises(Challenged):
        seal.brought(opened.submit(early).result(timeout=0))
    proof = Parcel(LINK.name, 0, seal.again(0))
    opened.submit(proof)
    [link] = links
    assert len(link.receive()) == 1

    for _ in range(2):
        opened.submit(early)
        opened.submit(proof)
    assert link.receive() == []

    anew = CallServer("policy")  # the worker after a restart
    found: list[Any] = []
    stop = anew.open(found.append, KEY)
    for parcel in (early, proof, Parcel("b" * 32, 0, early.frame), Parcel(LINK.name, 1, early.frame)):
        anew.submit(parcel)
    assert found == []
    stop()


def test_a_sender_without_a_key_is_told_that_the_worker_has_one(call_server: tuple[CallServer, list[Any]]) -> None:
    opened, links = call_server
    seal = NoSeal("the worker")

    with pytest.raises(AuthenticationError, match="has a key"):
        seal.brought(opened.submit(Parcel("c", 0, seal.frame(0, hello(), None))).result(timeout=0))
    assert links == []


def test_waiting_calls_without_a_key_are_refused_once_a_receiver_with_a_key_listens() -> None:
    made, links = CallServer("policy"), []
    answer = made.submit(Parcel("c", 0, NoSeal("the worker").frame(0, hello(), None)))

    made.open(links.append, KEY)()

    assert links == []
    assert "another key" in str(answer.exception(timeout=0))


def test_a_call_admitted_while_a_receiver_with_a_key_starts_to_listen_is_checked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call_server, given, opened = CallServer("policy", "calls", str), list[Link](), module_of_servers.opened
    kept = []

    def open_meanwhile(parcel: Parcel) -> Any:
        monkeypatch.setattr(module_of_servers, "opened", opened)
        kept.append(call_server.open(given.append, KEY))
        return opened(parcel)

    monkeypatch.setattr(module_of_servers, "opened", open_meanwhile)
    hello = Parcel("stranger", 0, codec.encode(Hello(model_id="policy", incarnation=7)))

    assert isinstance(call_server.submit(hello), CallRefused)
    assert not given


def test_the_number_of_a_call_is_sealed(call_server: tuple[CallServer, list[Any]]) -> None:
    """Else whoever is between both could change the order of a live sender's messages."""
    opened, links = call_server
    seal = KeyedSeal(KEY, LINK, "the worker")
    with pytest.raises(Challenged):
        seal.brought(opened.submit(Parcel(LINK.name, 0, seal.frame(0, hello(), None))).result(timeout=0))
    opened.submit(Parcel(LINK.name, 0, seal.again(0)))

    last = seal.frame(1, Bye(model_id="policy", incarnation=1), None)
    assert isinstance(opened.submit(Parcel(LINK.name, 2, last)), CallRefused)
    opened.submit(Parcel(LINK.name, 1, last))
    assert len(links[0].receive()) == 2


def test_a_replayed_hang_up_delivers_none_of_the_replayed_calls(call_server: tuple[CallServer, list[Any]]) -> None:
    opened, links = call_server
    seal = KeyedSeal(KEY, LINK, "the worker")
    opened.submit(Parcel(LINK.name, 0, seal.frame(0, hello(), None)))
    opened.hang_up(Parcel(LINK.name, 1, seal.frame(1, Bye(model_id="policy", incarnation=1), None)))

    assert links == []


def test_a_hang_up_ends_the_calls_that_wait_for_a_receivers_key() -> None:
    made, links, seal = CallServer("policy"), [], KeyedSeal(KEY, LINK, "the worker")
    gone = made.submit(Parcel(LINK.name, 0, seal.frame(0, hello(), None)))
    other = made.submit(Parcel("other", 0, seal.frame(0, hello(), None)))
    assert not made.idle
    made.hang_up(Parcel(LINK.name, 1, seal.frame(1, Bye(model_id="policy", incarnation=1), None)))
    assert (gone.result(timeout=0), other.done(), made.idle) == ([], False, False)

    made.open(links.append, KEY)()
    assert not made.knows(LINK.name)
    assert other.done()
