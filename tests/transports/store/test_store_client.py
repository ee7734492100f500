"""Endpoints over a store, the library's own connections to stores, and TorchRL's keys."""

from __future__ import annotations

import gc
import os
import pickle
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import numpy
import pytest
import torch.distributed as dist
from fleet import descriptors
from torch import nn

from weightsync import ConfigurationError, DistributedWeightSyncScheme, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol.messages import Ack, Hello, Update
from weightsync.transports import process
from weightsync.transports.store import store as stores
from weightsync.transports.store.store import Client, Hints, StoreEndpoint, base_of, connect_to_store, open_store


@pytest.fixture
def client(store: Any) -> Iterator[Client]:
    made = Client(dist.PrefixStore("ours", store))
    yield made
    made.close()


# ------------------------------------------------------------------------------------------- TorchRL's keys


def test_updates_and_acks_have_hints_unless_they_are_withheld() -> None:
    update = Update(model_id="policy", incarnation=1, version=1, layout_digest=b"", nbytes=0)
    ack, hello = Ack(model_id="policy", incarnation=1, version=1), Hello(model_id="policy", incarnation=1)
    hints = Hints()
    both = [("NODE_3_in", "update_weights"), ("NODE_3_out", "updated")]
    assert [hints.of(message, 3) for message in (update, ack, hello)] == [*both, None]

    with hints.withheld():
        assert [hints.of(message, 3) for message in (update, ack, update)] == [None] * 3
    assert [hints.of(message, 3) for message in (update, ack)] == both

    hints.withhold_next()
    assert [hints.of(message, 3) for message in (hello, ack, ack)] == [None, None, both[1]]
    hints.withhold_next()
    hints.write_all()
    assert hints.of(ack, 3) == both[1]


# ----------------------------------------------------------------------------------------------- endpoints


def test_an_endpoint_is_a_tcp_store_and_a_workers_rank(store: Any) -> None:
    end = StoreEndpoint(dist.PrefixStore("outer", dist.PrefixStore("inner", store)), 1)
    assert (end.rank, end.backend, end.in_flight, end.key) == (1, "gloo", 1, None)
    assert base_of(end.store).port == store.port
    for rank in (0, -1, True, "1", 1.0):
        with pytest.raises(ConfigurationError) as caught:
            StoreEndpoint(store, rank)  # type: ignore[arg-type]
        assert str(caught.value) == f"rank is {rank!r}: the trainer is rank 0, worker i is rank i + 1."
    assert type(StoreEndpoint(store, numpy.int64(2)).rank) is int
    for other in (dist.HashStore(), dist.PrefixStore("ours", dist.HashStore())):
        with pytest.raises(ConfigurationError, match=r"^a HashStore is not a store that trainer and workers can share"):
            StoreEndpoint(other, 1)


def test_a_pickled_endpoint_keeps_all_its_arguments_and_one_with_a_prefix_is_refused(store: Any) -> None:
    end = StoreEndpoint(store, 3, "nccl", 2, SharedKey("secret"))
    there = pickle.loads(pickle.dumps(end))

    assert (there.rank, there.backend, there.in_flight) == (3, "nccl", 2)
    assert there.key._secret == b"secret"
    there.store.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConfigurationError, match=r"^A PrefixStore cannot be sent to another process"):
        pickle.dumps(StoreEndpoint(dist.PrefixStore("ours", store), 3))


@pytest.mark.parametrize(("exposed", "key"), [(True, None), (True, SharedKey("secret")), (False, None)])
def test_a_store_reachable_from_other_hosts_is_warned_about_unless_there_is_a_key(
    store: Any, exposed: bool, key: SharedKey | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(stores, "is_exposed", lambda *where: asked.append(where) or exposed)
    monkeypatch.setattr(stores, "warn_exposed", asked.append)
    StoreEndpoint(dist.PrefixStore("ours", store), 1, key=key).warn_if_exposed()

    where = store.host, store.port
    warning = f"The store at {store.host}:{store.port} can be reached from other hosts"
    assert asked == ([] if key else [where, warning] if exposed else [where])


def test_a_store_of_our_own_listens_only_at_the_given_address() -> None:
    made = open_store("127.0.0.1", 0, timedelta(seconds=7))
    assert (made.host, made.timeout) == ("127.0.0.1", timedelta(seconds=7))
    made.set("key", "value")
    assert made.get("key") == b"value"
    with socket.create_connection(("127.0.0.1", made.port), 5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", made.port), 5)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", made.port, timedelta(seconds=7))


def test_no_store_is_opened_if_torch_would_abort_for_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shipped, made, tried = os.eventfd, [], []

    def eventfd(*given: int) -> int:
        if len(made) == 10:
            raise OSError(24, "Too many open files")
        made.append(shipped(*given))
        return made[-1]

    monkeypatch.setattr(os, "eventfd", eventfd)
    monkeypatch.setattr(stores, "TCPStore", lambda *given, **named: tried.append(given))
    with pytest.raises(TransportError, match=r"^no store could be opened on 127\.0\.0\.1: .*Too many open files"):
        DistributedWeightSyncScheme().init_on_sender("policy", num_workers=1, model=nn.Linear(2, 2))

    assert tried == []


def test_a_failed_attempt_to_open_a_store_closes_no_foreign_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[socket.socket] = []

    def torchs(*_given: Any, master_listen_fd: int, **_named: Any) -> None:
        os.close(master_listen_fd)  # as torch does before it raises
        taken.append(socket.socket())
        raise RuntimeError(f"no server at {master_listen_fd}")

    monkeypatch.setattr(stores, "TCPStore", torchs)
    with pytest.raises(RuntimeError, match="no server at"):
        open_store("127.0.0.1", 0, timedelta(seconds=7))

    with taken[0] as others:
        assert others.family is socket.AF_INET  # still open, though it had the listener's number
        others.bind(("127.0.0.1", 0))


def test_a_worker_without_descriptors_raises_instead_of_waiting_for_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def eventfd(*_given: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "eventfd", eventfd)
    info = {"host": "127.0.0.1", "port": 1}
    with pytest.raises(TransportError, match=r"^the store at 127\.0\.0\.1:1 cannot be reached: .*Too many open files"):
        DistributedWeightSyncScheme().init_on_worker("policy", store_info=info, rank=1, model=nn.Linear(2, 2))


def test_connections_to_a_store_have_a_timeout_and_do_not_wait_for_workers(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Recorded(dist.TCPStore):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            made.append((given, named))
            super().__init__(*given, **named)

    monkeypatch.setattr(stores, "TCPStore", Recorded)
    base = Recorded("127.0.0.1", store.port, None, False, timedelta(seconds=5), wait_for_workers=False)
    Client(base).close()
    stores._arrived("127.0.0.1", store.port, 2)
    open_store("127.0.0.1", 0, timedelta(seconds=7))
    connect_to_store(store.host, store.port, timedelta(seconds=9))

    dialled = ((store.host, store.port, None, False, timedelta(seconds=15)), {"wait_for_workers": False})
    assert made[1:3] == [dialled, dialled]
    (_, port, *given), named = made[3]
    assert (given, named["wait_for_workers"]) == ([None, True, timedelta(seconds=7)], False)
    assert port > 0
    assert named["master_listen_fd"] > 2
    assert made[4] == ((store.host, store.port, None, False, timedelta(seconds=9)), {"wait_for_workers": False})


# -------------------------------------------------------------------------------------------------- keys and values


def test_values_are_written_and_read_under_the_stores_prefix(client: Client, store: Any) -> None:
    assert (client.present("key"), client.value("key"), client.peek("key")) == (False, None, None)
    client.set("key", b"\xff\0")
    assert client.present("key")
    assert client.await_value("key") == client.value("key") == client.peek("key") == b"\xff\0"
    assert store.get("ours/key") == b"\xff\0"
    client.delete("key")
    assert (client.present("key"), client.peek("key"), store.check(["ours/key"])) == (False, None, False)
    assert (client.add("count", 2), client.add("count", 3)) == (2, 5)


def test_a_key_is_claimed_once_and_foreign_values_are_overwritten(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    assert (client.claim("key", "one"), client.claim("key", "two")) == ("one", "one")
    assert caplog.messages == []
    client.set("key", b"\xffjunk")
    assert client.claim("key", "two", lambda value: value.isascii()) == "two"
    assert caplog.messages == ["the store's key key held a value that is not ours: it was overwritten"]
    assert client.claim("key", "three", lambda value: value.isascii()) == "two"
    client.set("key", b"\xff")
    assert client.claim("key", "three") == "\ufffd"


@pytest.mark.parametrize(
    ("written", "meant"),
    [("10.0.0.5", "10.0.0.5"), ("::ffff:10.0.0.5", "10.0.0.5"), ("fe80::1%eth0", "fe80::1%eth0"), ("::1", "::1")],
)
def test_ipv4_addresses_mapped_into_ipv6_are_read_as_ipv4(written: str, meant: str) -> None:
    assert stores._as_ipv4(written) == meant


def test_a_connection_waits_for_a_key_without_a_limit_until_it_is_cut(client: Client, store: Any) -> None:
    assert client._store is not None
    assert client._store.timeout == timedelta(days=365)  # type: ignore[attr-defined]
    assert client.own_address == "127.0.0.1"  # torch may use an IPv6 socket, with the address ::ffff:127.0.0.1
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            client.await_value("never")
        except TransportError as error:
            failed.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    client.cut()
    waiting.join(20)
    (error,) = failed
    assert str(error).startswith(f"the store at 127.0.0.1:{store.port} failed: ")
    assert "\n" not in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    with pytest.raises(TransportError, match="the store at "):
        client.set("key", b"")


def test_a_closed_connection_raises_and_has_no_address(client: Client, store: Any) -> None:
    client.close()
    for ask in (client.present, client.peek, client.delete, client.await_value):
        with pytest.raises(TransportError) as caught:
            ask("key")
        assert str(caught.value) == f"The connection to the store at 127.0.0.1:{store.port} was closed."
    assert client.own_address is None
    client.cut()
    client.close()


# ----------------------------------------------------------------------------------------- sockets, descriptors


class FakeSocket:
    """A fake socket of a new connection."""

    def __init__(self, peer: int, copied: Any = None) -> None:
        self.peer, self.copied = peer, copied

    def copy(self) -> Any:
        return self.copied


def fake_new_sockets(monkeypatch: pytest.MonkeyPatch, *fresh: FakeSocket) -> None:
    """Make the next connection find these new sockets, beside an old one."""
    looks = iter([{"old": fresh[0]}, {"old": fresh[0], **dict(enumerate(fresh))}])
    monkeypatch.setattr(stores, "_descriptor", lambda _: None)
    monkeypatch.setattr(stores, "connected_sockets", lambda _=None: next(looks))


def test_a_connection_cuts_a_socket_only_if_that_is_certainly_its_own(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    for sockets in ([FakeSocket(store.port), FakeSocket(store.port)], [FakeSocket(1)]):
        fake_new_sockets(monkeypatch, *sockets)
        client = Client(store)
        assert (client._socket_copy, client.own_address) == (None, None)
        client.cut()
        client.set("key", b"")
        client.close()
    fake_new_sockets(monkeypatch, FakeSocket(1), FakeSocket(store.port, ours))
    client = Client(store)
    assert client._socket_copy is ours
    client.cut()
    assert theirs.recv(1) == b""
    client.close()
    assert ours.fileno() == -1
    theirs.close()


def test_the_cost_of_a_connection_does_not_grow_with_the_number_of_descriptors(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A trainer of 500 workers has thousands of descriptors, and makes two connections for each worker.
    looked_at: list[str] = []
    real = stores._identity
    monkeypatch.setattr(stores, "_identity", lambda fd: looked_at.append(str(fd)) or real(fd))
    for behind in (store, dist.PrefixStore("a", dist.PrefixStore("b", store))):
        looked_at.clear()
        client = Client(behind)
        assert len(looked_at) == 2  # to find the socket, and to copy it
        assert client.own_address == "127.0.0.1"
        client.cut()
        with pytest.raises(TransportError, match="the store at "):
            client.set("key", b"")
        client.close()


def test_a_connection_is_found_among_all_sockets_if_torch_does_not_name_its_descriptor(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_DESCRIPTOR_PATTERN", re.compile("(?!)"))
    client = Client(store)
    assert client.own_address == "127.0.0.1"
    client.cut()
    with pytest.raises(TransportError, match="the store at "):
        client.set("key", b"")
    client.close()


def _opened(what: str) -> int:
    """The number of open descriptors of one kind. Threads of former stores may close others meanwhile."""
    return list(descriptors().values()).count(what)


def test_a_socket_is_copied_only_while_its_descriptor_still_refers_to_it() -> None:
    ours, theirs = socket.socketpair()
    number = os.dup(ours.fileno())
    identity = stores._identity(number)
    assert stores.ConnectedSocket("socket:[another]", number, 1).copy() is None
    assert _opened(identity) == 2
    with stores.ConnectedSocket(identity, number, 1).copy() as copied:
        assert os.path.sameopenfile(copied.fileno(), number)
    os.close(number)
    assert stores.ConnectedSocket(identity, number, 1).copy() is None
    ours.close()
    theirs.close()


def test_a_default_timeout_changes_the_blocking_mode_of_no_socket(client: Client, store: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_connection((store.host, store.port), 5) as users:
        users.settimeout(None)
        socket.setdefaulttimeout(5.0)
        try:
            made = Client(store)
        finally:
            socket.setdefaulttimeout(None)
        assert all(os.get_blocking(sock.fileno()) for sock in (ours, theirs, users))
    assert made._socket_copy is not None
    assert client._socket_copy is not None
    assert os.get_blocking(made._socket_copy.fileno()) == os.get_blocking(client._socket_copy.fileno())
    assert made.own_address == "127.0.0.1"
    made.cut()
    with pytest.raises(TransportError, match="the store at "):
        made.set("key", b"")
    made.close()


def test_a_connection_that_ends_while_it_is_being_made_raises_transport_error(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_new_sockets(monkeypatch, FakeSocket(store.port))
    with pytest.raises(TransportError) as caught:
        Client(store)
    where = f"the store at {store.host}:{store.port}"
    assert str(caught.value) == f"The connection to {where} ended while it was being made, or no descriptor is left."


@pytest.mark.parametrize("left", [0, 2, 3])
def test_a_connection_fails_unless_three_descriptors_are_free(
    store: Any, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it looked for are closed again, also if not all are free."""
    shipped, close, made, closed = os.eventfd, os.close, [], []

    def eventfd(*given: int) -> int:
        if len(made) == left:
            raise OSError(24, "Too many open files")
        made.append((shipped(*given), given))
        return made[-1][0]

    monkeypatch.setattr(os, "eventfd", eventfd)
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), close(fd)))
    if left == 3:
        Client(store).close()
    else:
        with pytest.raises(TransportError, match=r"^the store at .* failed: \[Errno 24\] Too many open files$"):
            Client(store)
    assert [given for _, given in made] == [(0, os.EFD_CLOEXEC)] * left
    assert {fd for fd, _ in made} <= set(closed)


def test_probing_for_free_descriptors_leaves_none_open() -> None:
    gc.collect()  # close the descriptors that other tests have left
    before = _opened("anon_inode:[eventfd]")
    stores._require_descriptors()
    assert _opened("anon_inode:[eventfd]") == before


def test_inherited_objects_are_kept_in_a_child_and_its_connecting_locks_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "_inherited", WeakSet())
    monkeypatch.setattr(stores, "_inherited", [])
    stores.keep_in_child(1, 2)
    assert stores._inherited == [(1, 2)]

    dialling = stores._ConnectionLocks()
    for _ in range(2):
        assert dialling.lock_of(1).acquire(blocking=False)
        process._forget_all()  # as in a child, and in a child's child
    assert dialling.lock_of(1).acquire(blocking=False)
