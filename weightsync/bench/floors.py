"""The floors: what the same bytes cost over the plainest calls there are, between the same number of processes.

They have no protocol, no checks and no failure handling: no library can be faster on the same path.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, distributed

from weightsync.bench.contenders import Contender, Situation
from weightsync.bench.judging import Floor
from weightsync.bench.models import digest_of, memory_of
from weightsync.bench.processes import Ask, Workers
from weightsync.bench.results import Kind, Label
from weightsync.bench.settings import START_TIMEOUT, SchemeName
from weightsync.local_workers import store

_PING, _COPY, _TCP, _GLOO, _GLOO_PING = b"p", b"c", b"t", b"g", b"h"
#: The requests that a worker answers at once, and then waits for what is sent another way.
_ANNOUNCED = (_TCP, _GLOO, _GLOO_PING)


class Local(Contender):
    """A floor inside the trainer.

    Args:
        target: what holds the bytes afterwards.
    """

    def __init__(self, name: Floor, copy: Callable[[], object], target: Tensor, source: Tensor) -> None:
        self.label = Label(name.value, Kind.FLOOR)
        self._copy, self._target, self._source = copy, target, source

    def send(self) -> None:
        """Copy the bytes."""
        self._copy()

    def sent_digest(self) -> str:
        """The digest of the bytes."""
        return digest_of(self._source)

    def digests(self) -> Mapping[int, str]:
        """The digest of the copy."""
        return {0: digest_of(self._target)}


class Remote(Local):
    """A floor between the trainer and worker processes, which several such floors share.

    Args:
        request: what the workers do; for `_ANNOUNCED`, before each send.
    """

    def __init__(self, name: Floor, shared: FloorWorkers, request: bytes, send: Callable[[], object]) -> None:
        super().__init__(name, send, shared.flat, shared.flat)
        self._shared, self._request = shared, request
        self._carries = request in (_COPY, _TCP, _GLOO)

    def ready(self) -> None:
        """Have the workers wait for something that does not come over their pipe."""
        if self._request in _ANNOUNCED:
            self._shared.exchange(self._request)

    def digests(self) -> Mapping[int, str]:
        """The digest of what each worker received; a ping carries nothing."""
        return self._shared.workers.ask(Ask.DIGEST) if self._carries else {}


class FloorWorkers:
    """Worker processes that receive over pipes, TCP and gloo, and the trainer's side of it.

    Args:
        situation: how many, and which bytes.
    """

    def __init__(self, situation: Situation, gloo: bool) -> None:
        self.flat = situation.source.flat.cpu()
        self._count = situation.workers
        self.slot = torch.zeros_like(self.flat).share_memory_()  # type: ignore[no-untyped-call]
        self._one = torch.zeros(1, dtype=torch.uint8)
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:
            listener = self._cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(START_TIMEOUT)
            trainers = store(0, START_TIMEOUT, self._count + 1) if gloo else None
            port = trainers.port if trainers else None
            address = listener.getsockname()
            arguments = [(self.slot, address, port, (index + 1, self._count + 1)) for index in range(self._count)]
            self.workers = Workers("floors", receive_floors, arguments)
            self._cleanup.callback(self.workers.close)
            self.workers.start()
            self._sockets = [self._accept(listener) for _ in range(self._count)]
            if trainers is not None:
                distributed.init_process_group("gloo", store=trainers, rank=0, world_size=self._count + 1)
                self._cleanup.callback(distributed.destroy_process_group)
            self.workers.gather()
            self._cleanup = self._cleanup.pop_all()
        self._whole = memory_of(self.flat)

    def _accept(self, listener: socket.socket) -> socket.socket:
        accepted = self._cleanup.enter_context(listener.accept()[0])
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return accepted

    def exchange(self, request: bytes) -> None:
        """Send every worker a few bytes over its pipe, and wait for as many back."""
        for channel in self.workers.channels:
            channel.send_bytes(request)
        for channel in self.workers.channels:
            channel.recv_bytes()

    def copy_out(self) -> None:
        """Copy the bytes into shared memory, and have each worker copy them out, all at once."""
        self.slot.copy_(self.flat)
        self.exchange(_COPY)

    def tcp(self) -> None:
        """Send the bytes to every worker over loopback TCP, all at once, and wait for a byte back from each."""
        left = dict.fromkeys(self._sockets, 0)
        with selectors.DefaultSelector() as selector:
            for each in self._sockets:
                each.setblocking(False)
                selector.register(each, selectors.EVENT_WRITE)
            while left:
                for key, _ in selector.select():
                    sock: Any = key.fileobj
                    left[sock] += sock.send(self._whole[left[sock] :])
                    if left[sock] == len(self._whole):
                        selector.unregister(sock)
                        del left[sock]
        for each in self._sockets:
            each.setblocking(True)
            each.recv(1)

    def gloo(self) -> None:
        """Send the bytes as one tensor to every worker, all at once, and wait for one element back from each."""
        self._exchange_over_gloo(self.flat)

    def gloo_ping(self) -> None:
        """The same with a tensor of one element."""
        self._exchange_over_gloo(self._one)

    def _exchange_over_gloo(self, tensor: Tensor) -> None:
        ranks = range(1, self._count + 1)
        works: list[Any] = [distributed.isend(tensor, rank) for rank in ranks]
        for work in works:
            work.wait()
        for rank in ranks:
            distributed.recv(self._one, rank)

    def close(self) -> None:
        """End the processes and close the connections."""
        self._cleanup.close()


def receive_floors(channel: Connection, slot: Tensor, address: Any, port: int | None, place: tuple[int, int]) -> None:
    """Run a floor's worker: do at each request what it says, and answer. `place`: its rank, and how many there are."""
    rank, size = place
    own, one = torch.zeros_like(slot), torch.zeros(1, dtype=torch.uint8)
    whole = memory_of(own)
    with socket.create_connection(address, START_TIMEOUT) as peer:
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if port is not None:
            distributed.init_process_group("gloo", store=store(port, START_TIMEOUT, size), rank=rank, world_size=size)
        channel.send("ready")
        while True:
            request = channel.recv_bytes()
            if request == _COPY:
                own.copy_(slot)
            if request in (_PING, _COPY, *_ANNOUNCED):
                channel.send_bytes(request)
            if request == _TCP:
                _receive(peer, whole)
            elif request in (_GLOO, _GLOO_PING):
                distributed.recv(own if request == _GLOO else one, 0)
                distributed.send(one, 0)
            elif request not in (_PING, _COPY):
                if ForkingPickler.loads(request) is None:
                    return
                channel.send(digest_of(own))


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        count = peer.recv_into(into)
        if not count:
            raise EOFError
        into = into[count:]
    peer.sendall(b"a")


def cpu_floors(situation: Situation) -> Iterator[Contender]:
    """The floors of paths between processes. They share their workers."""
    gloo = situation.chosen(SchemeName.DISTRIBUTED)
    shared = FloorWorkers(situation, gloo)
    situation.cleanup.callback(shared.close)
    yield Remote(Floor.PING, shared, _PING, lambda: shared.exchange(_PING))
    target = torch.zeros_like(shared.flat)
    yield Local(Floor.MEMCPY, lambda: target.copy_(shared.flat), target, shared.flat)
    yield Remote(Floor.COPY_OUT, shared, _COPY, shared.copy_out)
    yield Remote(Floor.TCP, shared, _TCP, shared.tcp)
    if gloo:
        yield Remote(Floor.GLOO, shared, _GLOO, shared.gloo)
        yield Remote(Floor.GLOO_PING, shared, _GLOO_PING, shared.gloo_ping)


def cuda_floors(situation: Situation) -> Iterator[Contender]:
    """Copies of the bytes inside the GPU, and between it and pinned memory."""
    flat = situation.source.flat
    device = flat if flat.is_cuda else flat.cuda()
    other = torch.zeros_like(device)
    pinned = torch.zeros(flat.shape, dtype=flat.dtype, pin_memory=True)
    host = torch.zeros(flat.shape, dtype=flat.dtype, pin_memory=True)
    yield Local(Floor.D2D, lambda: _copy_and_synchronize(other, device), other, device)
    yield Local(Floor.D2H, lambda: _copy_and_synchronize(pinned, device), pinned, device)
    yield Local(Floor.H2D, lambda: _copy_and_synchronize(other, host), other, host)


def _copy_and_synchronize(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
