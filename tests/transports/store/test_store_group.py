"""The process group of a link, which carries its payloads, ends with the link, even while it is being made."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weightsync import TransportError
from weightsync.transports.store import group as module
from weightsync.transports.store.group import Group, RendezvousStore
from weightsync.transports.store.store import Client, StoreEndpoint

PAYLOAD = memoryview(bytearray(5))
#: Seconds. Only a failing test waits this long.
PATIENCE = 30.0


class FakeProcessGroup:
    """A fake process group whose other rank accepts all tensors, and sends tensors of sevens."""

    def __init__(self) -> None:
        self.aborted = False
        self.unawaited = 0
        #: Called while a send is posted (NCCL connects in the first), and while an operation is awaited.
        self.connecting: Callable[[], object] = lambda: None
        self.carrying: Callable[[], object] = lambda: None

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> FakeProcessGroup:
        del tensors, to, tag
        self.connecting()
        self.unawaited += 1
        return self

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> FakeProcessGroup:
        del of, tag
        tensors[0].fill_(7)
        self.unawaited += 1
        return self

    def wait(self, timeout: Any) -> None:
        assert timeout is not None
        self.carrying()
        self.unawaited -= 1

    def abort(self) -> None:
        self.aborted = True


class FakeGroupFactory:
    """Makes a fake group. ``meanwhile`` is called before the group is returned."""

    def __init__(self) -> None:
        self.made = FakeProcessGroup()
        self.meanwhile: Callable[[], None] = lambda: None
        self.group = Group(0, "a link", self, torch.device("cpu"), in_flight=3)

    def __call__(self, store: Any, rank: int) -> FakeProcessGroup:
        del store, rank
        self.meanwhile()
        return self.made


class RecordingStream:
    """A fake connection that records the messages written to it."""

    def __init__(self) -> None:
        self.written: list[tuple[bytes, memoryview | None]] = []

    def write(self, text: bytes, payload: memoryview | None, go_on: Callable[[], None]) -> None:
        self.written.append((text, payload))


@pytest.fixture
def client(store: Any) -> Iterator[Client]:
    """A connection to the store, in which rank 1 of the link has already arrived."""
    client = Client(store)
    client.set("a link/group/arrived/1", b"yes")
    yield client
    client.close()


def test_a_payload_passes_through_the_group_in_buckets(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_NBYTES", 2)
    group, received = FakeGroupFactory().group, memoryview(bytearray(5))
    stream = RecordingStream()
    group.write(stream, client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]
    group.read(stream, client, received)  # type: ignore[arg-type]
    group.skip(stream, client, 5)  # type: ignore[arg-type]

    assert bytes(received) == b"\7" * 5
    assert stream.written == [(b"text", None)]


@pytest.mark.parametrize("way", ["write", "read", "skip"])
def test_every_operation_on_a_payload_is_awaited_before_its_buffer_is_released(
    client: Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(module, "BUCKET_NBYTES", 1)
    making, stream = FakeGroupFactory(), RecordingStream()
    calls: dict[str, Callable[[Any], None]] = {
        "write": lambda given: making.group.write(given, client, b"text", PAYLOAD, lambda: None),
        "read": lambda given: making.group.read(given, client, memoryview(bytearray(5))),
        "skip": lambda given: making.group.skip(given, client, 5),
    }
    calls[way](stream)

    assert making.made.unawaited == 0


@pytest.mark.parametrize("way", ["write", "read", "skip"])
def test_an_abort_during_the_last_bucket_of_a_payload_raises(client: Client, way: str) -> None:
    """NCCL ends aborted kernels, so that torch's wait for one returns as after a success."""
    making, stream = FakeGroupFactory(), RecordingStream()
    making.made.carrying = making.group.abort
    calls: dict[str, Callable[[Any], None]] = {
        "write": lambda given: making.group.write(given, client, b"text", PAYLOAD, lambda: None),
        "read": lambda given: making.group.read(given, client, memoryview(bytearray(5))),
        "skip": lambda given: making.group.skip(given, client, 5),
    }
    with pytest.raises(TransportError, match="the process group was aborted"):
        calls[way](stream)

    assert making.made.unawaited == 0


def test_nccl_errors_are_raised_with_their_cause(client: Client) -> None:
    making, lines = (
        FakeGroupFactory(),
        ("NCCL error in: a.cpp:9, invalid usage", "ncclInvalidUsage: ...", "Last error:", "Twice"),
    )

    def fail() -> None:
        raise RuntimeError("\n".join(lines))

    making.made.connecting = fail
    with pytest.raises(TransportError, match=r"failed: NCCL error in: a\.cpp:9, invalid usage: Twice$"):
        making.group.write(RecordingStream(), client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]


def test_an_abort_aborts_the_process_group_and_later_writes_raise(client: Client) -> None:
    making = FakeGroupFactory()
    making.group.write(RecordingStream(), client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]
    assert not making.made.aborted

    making.group.abort()

    assert making.made.aborted
    with pytest.raises(TransportError, match="aborted"):
        making.group.write(RecordingStream(), client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]


def test_a_process_group_created_during_an_abort_is_aborted(client: Client) -> None:
    making = FakeGroupFactory()
    making.meanwhile = making.group.abort

    with pytest.raises(TransportError, match="aborted"):
        making.group.write(RecordingStream(), client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]

    assert making.made.aborted


def test_an_abort_does_not_wait_for_a_rank_that_connects_to_a_dead_peer(client: Client) -> None:
    making, connecting, died = FakeGroupFactory(), threading.Event(), threading.Event()
    making.made.connecting = lambda: (connecting.set(), died.wait(PATIENCE))
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(making.group.write, RecordingStream(), client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]
        assert connecting.wait(PATIENCE)
        threads.submit(making.group.abort).result(PATIENCE / 2)
        assert not making.made.aborted
        died.set()
        wait([writing], PATIENCE)
    assert making.made.aborted


def test_no_process_group_is_created_if_the_peer_has_given_up(store: Any) -> None:
    making = FakeGroupFactory()
    making.meanwhile = lambda: pytest.fail("it was made")
    with contextlib.closing(Client(store)) as client:
        RendezvousStore(client, making.group._prefix, threading.Event()).give_up()

        with pytest.raises(TransportError, match="closed while it was being made"):
            making.group.write(RecordingStream(), client, b"text", PAYLOAD, lambda: None)  # type: ignore[arg-type]


def test_a_failed_send_aborts_the_group_and_awaits_the_operations_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroupFactory().group
    happened: list[object] = []

    def start(bucket: torch.Tensor, number: int) -> Callable[[], None]:
        del bucket

        def finish() -> None:
            happened.append(number)
            if number == 0:
                raise TransportError("the connection has ended")

        return finish

    monkeypatch.setattr(group, "abort", lambda: happened.append("aborted"))
    with pytest.raises(TransportError, match="the connection has ended"):
        group._move([torch.empty(1)] * 5, start)

    assert happened == [0, "aborted", 1, 2]


def test_nccl_uses_the_gpu_that_was_current_in_the_thread_that_created_the_endpoint(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    # As in CUDA, the current device of a new thread is the first GPU.
    of_user = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: int(threading.get_ident() == of_user))
    end, groups = StoreEndpoint(store, 1, "nccl"), []

    def listen() -> None:
        groups.append(module.make_group(end, 1, "a link"))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()

    assert groups[0]._device == torch.device("cuda", 1)
