"""A private process group of two ranks, which carries payloads in buckets, and the rendezvous of the two ranks.

The group is made directly, not by ``new_group``, so it works beside the user's own groups and without any. Either both
ranks connect or neither does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from weightsync.errors import ConfigurationError, TransportError
from weightsync.transports.buffers import anonymous
from weightsync.transports.store.sockets import Watched, watching
from weightsync.transports.store.store import FOR_EVER, Client, ProcessGroupGloo, Store

#: How often a rank checks whether the other has arrived. Once for each link: both arrive soon.
_LOOK: Final = 0.001
#: Where two ranks agree whether to connect. The first to write decides.
_AGREED: Final = "agreed"
_CONNECT: Final = "connect"
_GIVEN_UP: Final = "given up"


class Rendezvous(Store):
    """The store through which two ranks find each other. Unlike a plain store, the wait can be ended.

    A rank that has found the other connects and waits for it inside gloo, where it cannot be interrupted. So the ranks
    agree beforehand: either both connect or neither does.

    Args:
        client: used by one thread at a time.
        prefix: the prefix of all keys.
        over: set once this end no longer wants a group.
    """

    def __init__(self, client: Client, prefix: str, over: threading.Event) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._over = over
        self._own: set[str] = set()
        #: The values that the two ranks have exchanged: the addresses at which gloo can reach each.
        self.exchanged: set[bytes] = set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch passes bytes
        """Write a value."""
        self._own.add(key)
        self.exchanged.add(bytes(value))
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it exists."""
        self.wait([key])
        value = self._client.await_value(self._prefix + key)
        self.exchanged.add(value)
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._client.present(self._prefix + key) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._client.add(self._prefix + key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta = FOR_EVER) -> None:  # noqa: ARG002
        """Return once all keys have values and the other rank is known to connect too.

        Raises:
            TransportError: the rendezvous was ended, here or at the other rank.
        """
        if self._own.issuperset(keys):
            return  # gloo also asks for its own value, which says nothing about the other rank
        while not self.check(keys):
            if self._over.wait(_LOOK):
                self._agree(_GIVEN_UP)
            if self._client.value(self._prefix + _AGREED) == _GIVEN_UP.encode():
                break
        else:
            if self._agree(_CONNECT) == _CONNECT:
                return
        raise TransportError("the process group was closed while it was being made")

    def _agree(self, wish: str) -> str:
        return self._client.claim(self._prefix + _AGREED, wish, (_CONNECT, _GIVEN_UP).__contains__)

    def give_up(self) -> None:
        """End the other rank's wait, if it waits here."""
        self._client.set(self._prefix + _AGREED, _GIVEN_UP.encode())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys."""
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        self._client.delete(self._prefix + key)
        return True


#: Payloads are sent in pieces of this size.
BUCKET_NBYTES: Final = 64 * 2**20
#: For making a group. gloo waits five times as long for the other rank to connect, and nothing ends that wait.
_RENDEZVOUS: Final = timedelta(seconds=2)
#: For one bucket. Nobody waits that long: it ends a thread whose link was lost long ago.
_LONGEST: Final = timedelta(minutes=1)
_AT_ONCE: Final = timedelta(milliseconds=1)
#: The tag of an operation that the other rank never answers. Buckets are numbered from 0.
_NOBODYS_TAG: Final = 2**30
#: The first tag of receipts, one byte for each bucket that has arrived. gloo never completes a send whose connection
#: ends just before it is written; a receive always completes.
_RECEIPTS: Final = 2**29
#: Begins an operation of a group.
_Post = Callable[[Any], Any]


class Group:
    """A group of two ranks, made on first use. `send` and `receive` block; `abort`, from another thread, ends them.

    Args:
        backend: "gloo" or "nccl".
        rank: 0 or 1.
        key: the link's key, so that two groups never mix.

    Raises:
        ConfigurationError: this torch, or this machine, does not have the backend.
    """

    def __init__(self, backend: str, rank: int, key: str) -> None:
        self._make, self._device = _backend(backend)
        self._backend = backend
        self._rank = rank
        self._prefix = f"{key}/group/"
        #: Whether both ranks are in one network namespace; known before the rendezvous.
        self.stays_on_host = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._group: Any = None
        self._connection: Watched | None = None
        self._works: deque[Any] = deque()
        self._stuck: tuple[Any, ...] = ()

    def send(self, client: Client, payload: memoryview, in_flight: int) -> None:
        """Send a payload; returns or raises once the group no longer reads it.

        Args:
            client: a connection to the store, for the rendezvous.
            payload: the payload.
            in_flight: how many buckets are in flight at once.

        Raises:
            TransportError: the other rank has ended, or the group was aborted.
        """
        self._meet(client)
        self._move(_buckets(payload), in_flight, self._sending)

    def receive(self, client: Client, payload: memoryview, in_flight: int) -> None:
        """Receive a payload; returns or raises once the group no longer writes it.

        Raises:
            TransportError: as `send`; the contents of ``payload`` are then undefined.
        """
        self._meet(client)
        self._move(_buckets(payload), in_flight, self._receiving)

    def skip(self, client: Client, nbytes: int, in_flight: int) -> None:
        """Receive a payload for which there is no memory, into the memory of one bucket.

        Raises:
            TransportError: as `send`, or there is not even memory for a bucket.
        """
        self._meet(client)
        scratch = torch.frombuffer(anonymous(min(nbytes, BUCKET_NBYTES)), dtype=torch.uint8)
        starts = range(0, nbytes, BUCKET_NBYTES)
        self._move([scratch[: nbytes - start] for start in starts], in_flight, self._receiving)

    def abort(self) -> None:
        """Make all operations in flight fail, here and at the other end. The group is unusable afterwards."""
        self._over.set()
        with self._lock:
            busy, group = bool(self._works), self._group
        if group is None:
            return
        if self._backend != "gloo":
            group.abort()
        elif busy:
            # An operation that times out ends its pair of ranks, and so all other operations. We use one of our own:
            # waiting for one of theirs could take its completion away from the thread that waits for it.
            with contextlib.suppress(RuntimeError):
                self._recv(_byte(), _NOBODYS_TAG)(group).wait(_AT_ONCE)

    def notify_aborted(self, client: Client) -> None:
        """Tell the other rank, which may be waiting for us, that the group was aborted.

        Raises:
            TransportError: the store is gone.
        """
        Rendezvous(client, self._prefix, self._over).give_up()

    def stuck(self) -> bool:
        """Whether an operation in flight will never end, as of the last check.

        gloo does not report the end of a connection in the middle of a message; only the timeout ends the operation.
        """
        with self._lock:
            works = tuple(self._works)
            ended = bool(works) and self._connection is not None and self._connection.ended
            before, self._stuck = self._stuck, works if ended else ()
        return ended and before == works

    def close(self) -> None:
        """Close the group; if another thread is making it, as soon as it is made."""
        self.abort()
        with self._lock:
            connection, self._connection, self._group = self._connection, None, None
        if connection is not None:
            connection.close()

    def _meet(self, client: Client) -> None:
        if self._group is None:
            rendezvous = Rendezvous(client, self._prefix, self._over)
            with _errors_as("could not be made"):
                if self._over.is_set():
                    rendezvous.give_up()
                    raise TransportError("the process group was aborted")
                address = own_address(self.stays_on_host, client.own_address)
                self._adopt(*watching(lambda: self._make(rendezvous, self._rank, address), rendezvous.exchanged))

    def _adopt(self, group: Any, connection: Watched | None) -> None:
        with self._lock:
            if not self._over.is_set():
                self._group, self._connection = group, connection
                return
        # A thread that aborted meanwhile found no group to close.
        if connection is not None:
            connection.close()
        raise TransportError("the process group was aborted")

    def _move(
        self,
        buckets: Sequence[torch.Tensor],
        in_flight: int,
        start: Callable[[torch.Tensor, int], Callable[[], None]],
    ) -> None:
        ends: deque[Callable[[], None]] = deque()
        try:
            with _errors_as("failed"):
                for number, bucket in enumerate(buckets):
                    if len(ends) == in_flight:
                        ends.popleft()()
                    ends.append(start(bucket, number))
                while ends:
                    ends.popleft()()
        finally:
            # No operation may touch the payload after this returns.
            if ends:
                self.abort()
            for finish in ends:
                with contextlib.suppress(RuntimeError):
                    finish()

    def _sending(self, bucket: torch.Tensor, number: int) -> Callable[[], None]:
        staged = bucket if self._device is None else bucket.to(self._device)
        if self._backend != "gloo":
            return self._posted(self._send(staged, number))
        # The receipt first: the peer then knows that we await it once it has the bucket.
        return self._posted(self._recv(_byte(), _RECEIPTS + number), self._send(staged, number))

    def _receiving(self, bucket: torch.Tensor, number: int) -> Callable[[], None]:
        staged = bucket if self._device is None else torch.empty_like(bucket, device=self._device)
        finish = self._posted(self._recv(staged, number))

        def received() -> None:
            finish()
            if staged is not bucket:
                bucket.copy_(staged)
            if self._backend == "gloo":
                # A peer that cannot be told any more learns it from the end of the connection. The bucket has arrived.
                with contextlib.suppress(RuntimeError):
                    self._posted(self._send(_byte(), _RECEIPTS + number))()

        return received

    def _send(self, tensor: torch.Tensor, tag: int) -> _Post:
        return lambda group: group.send([tensor], 1 - self._rank, tag)

    def _recv(self, tensor: torch.Tensor, tag: int) -> _Post:
        return lambda group: group.recv([tensor], 1 - self._rank, tag)

    def _posted(self, *posts: _Post) -> Callable[[], None]:
        with self._lock:
            if self._over.is_set():
                raise TransportError("the process group was aborted")
            works = [post(self._group) for post in posts]
            self._works.extend(works)

        def finish() -> None:
            try:
                for work in works:
                    work.wait(_LONGEST)
                if self._device is not None:
                    torch.cuda.current_stream(self._device).synchronize()
            finally:
                with self._lock:
                    for work in works:
                        self._works.remove(work)

        return finish


def _buckets(payload: memoryview) -> Sequence[torch.Tensor]:
    return torch.split(torch.frombuffer(payload, dtype=torch.uint8), BUCKET_NBYTES)


def _byte() -> torch.Tensor:
    return torch.empty(1, dtype=torch.uint8)


@contextlib.contextmanager
def _errors_as(what: str) -> Any:
    try:
        yield
    except TransportError:
        raise
    except (RuntimeError, OSError) as error:
        raise TransportError(f"The process group with the peer {what}: {str(error).splitlines()[0]}") from error


#: Makes a group from a store, our rank, and our address to listen at (None: the backend chooses).
_Make = Callable[[Store, int, str | None], Any]


def own_address(stays_on_host: bool, towards_store: str | None) -> str | None:
    """The address to listen at for the other rank; None: the backend's choice, which is the host's name.

    Args:
        stays_on_host: whether the other rank is in our network namespace.
        towards_store: our address on the connection to the store.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return None
    if stays_on_host:
        return "127.0.0.1"
    # A store on the loopback shows nothing about the route to a rank elsewhere.
    loopback = towards_store is None or ipaddress.ip_address(towards_store.partition("%")[0]).is_loopback
    return None if loopback else towards_store


def _backend(name: str) -> tuple[_Make, torch.device | None]:
    """How to make a group of that backend, and the device of its tensors; None: where they are.

    Raises:
        ConfigurationError: it is not available here.
    """
    if name == "gloo" and dist.is_gloo_available():
        return _gloo, None
    if name == "nccl" and dist.is_nccl_available() and torch.cuda.is_available():
        return _nccl, torch.device("cuda", torch.cuda.current_device())
    if name in ("gloo", "nccl"):
        raise ConfigurationError(
            f"backend {name!r} is not available here: this torch, or this machine, does not have it."
        )
    raise ConfigurationError(f"backend is {name!r}: give 'gloo' or 'nccl'.")


def require_backend(name: str) -> None:
    """Raise ConfigurationError if that backend is not available here."""
    _backend(name)


def _gloo(store: Store, rank: int, address: str | None) -> Any:
    if address is None:
        return ProcessGroupGloo(store, rank, 2, _RENDEZVOUS)
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = _RENDEZVOUS
    return gloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, _: str | None) -> Any:
    return dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
