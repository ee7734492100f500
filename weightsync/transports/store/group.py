"""How a payload travels: behind its message over the link's own connection, or in buckets through a group.

The group is a private NCCL group of two ranks. It is made directly, not by ``new_group``, so it works alongside the
user's own groups and without any. Either both ranks connect or neither does.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from weightsync.clock import Deadline
from weightsync.errors import ConfigurationError, TransportError
from weightsync.transports.buffers import anonymous
from weightsync.transports.store.store import FOR_EVER, Client, Store, StoreEndpoint
from weightsync.transports.store.stream import Stream

#: How often a rank checks whether the other has arrived. Once for each link: both arrive soon.
_LOOK_SECONDS: Final = 0.001
#: How long a rank that is to end still waits for one that has agreed to connect, and may have died since.
_LAST_SECONDS: Final = 5.0
#: Where two ranks agree whether to connect. The first to write decides.
_AGREED: Final = "agreed"
_CONNECT: Final = "connect"
_GIVEN_UP: Final = "given up"


class RendezvousStore(Store):
    """The store through which two ranks find each other. Unlike a plain store, the wait can be ended.

    A rank that has found the other connects and waits for it inside NCCL, where it cannot be interrupted. So the ranks
    agree beforehand, in `meet`: either both connect or neither does.
    """

    def __init__(self, client: Client, prefix: str, over: threading.Event) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._over = over
        self._pause = threading.Event()  # which is never set
        self._own: set[str] = set()

    def meet(self, rank: int) -> None:
        """Return once both ranks have come, and have agreed to connect. Rank 0 of NCCL asks for no key of the other's.

        Raises TransportError: as `wait`.
        """
        self.set(f"arrived/{rank}", b"yes")
        self.wait([f"arrived/{1 - rank}"])

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override] # torch passes bytes
        """Write a value."""
        self._own.add(key)
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, once it exists."""
        self.wait([key])
        return self._client.await_value(self._prefix + key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._client.present(self._prefix + key) for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return self._client.add(self._prefix + key, amount)

    def wait(self, keys: Sequence[str], timeout: timedelta = FOR_EVER) -> None:  # noqa: ARG002
        """Return once all keys have values and the other rank is known to connect too.

        Raises TransportError: the rendezvous was ended, here or at the other rank; or the other rank has died.
        """
        if self._own.issuperset(keys):
            return  # a rank also asks for its own value, which says nothing about the other rank
        last_deadline: Deadline | None = None
        while not self.check(keys):
            if last_deadline is not None:
                self._pause.wait(_LOOK_SECONDS)
            elif self._over.wait(_LOOK_SECONDS):
                self._agree(_GIVEN_UP)
                last_deadline = Deadline(_LAST_SECONDS)
            given_up = self._client.value(self._prefix + _AGREED) == _GIVEN_UP.encode()
            if given_up or (last_deadline is not None and last_deadline.passed):
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
#: For one bucket. No caller waits that long: it ends a thread whose link was lost long ago.
_LONGEST: Final = timedelta(minutes=1)
#: Makes a group from a store and our rank.
_Make = Callable[[Store, int], Any]


class NoGroup:
    """Payloads follow their messages on the connection, with the errors of `Stream`."""

    def write(
        self,
        stream: Stream,
        client: Client,  # noqa: ARG002
        text: bytes,
        payload: memoryview | None,
        go_on: Callable[[], None],
    ) -> None:
        """Write a message, and the payload behind it."""
        stream.write(text, payload, go_on)

    def read(self, stream: Stream, client: Client, payload: memoryview) -> None:  # noqa: ARG002
        """Read a payload."""
        stream.read_into(payload)

    def skip(self, stream: Stream, client: Client, nbytes: int) -> None:  # noqa: ARG002
        """Read a payload for which there is no memory."""
        stream.skip(nbytes)

    def abort(self) -> None:
        """Do nothing: what ends the connection ends this."""

    def notify_aborted(self, client: Client) -> None:
        """Do nothing: the other end sees that the connection has ended."""


class Group:
    """A group of two ranks, made on first use. `write` and `read` block; `abort`, from another thread, ends them.

    Args:
        in_flight: how many buckets of a payload may be in flight.
    """

    def __init__(self, rank: int, key: str, make: _Make, device: torch.device, in_flight: int) -> None:
        self._make, self._device = make, device
        self._in_flight = in_flight
        self._rank = rank
        self._prefix = f"{key}/group/"
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._group: Any = None

    def write(
        self, stream: Stream, client: Client, text: bytes, payload: memoryview | None, go_on: Callable[[], None]
    ) -> None:
        """Write a message to the connection, and send its payload; returns or raises once it is no longer read.

        Raises TransportError: the other rank has ended, or the group was aborted.
        """
        stream.write(text, None, go_on)
        if payload is not None:
            self._join(client)
            self._move(_buckets(payload), self._sending)

    def read(self, stream: Stream, client: Client, payload: memoryview) -> None:  # noqa: ARG002
        """Receive a payload; returns or raises once the group no longer writes it.

        Raises TransportError: as for `write`; the contents of ``payload`` are then undefined.
        """
        self._join(client)
        self._move(_buckets(payload), self._receiving)

    def skip(self, stream: Stream, client: Client, nbytes: int) -> None:  # noqa: ARG002
        """Receive a payload for which there is no memory, into the memory of one bucket.

        Raises TransportError: as for `write`, or there is not even memory for a bucket.
        """
        self._join(client)
        scratch = torch.frombuffer(anonymous(min(nbytes, BUCKET_NBYTES)), dtype=torch.uint8)
        starts = range(0, nbytes, BUCKET_NBYTES)
        self._move([scratch[: nbytes - start] for start in starts], self._receiving)

    def abort(self) -> None:
        """Make all operations in flight fail, here and at the other end. The group is unusable afterwards.

        An operation that is being posted may be waiting inside NCCL for the other rank; the first one connects to it.
        `abort` does not wait for that: the thread that posts the operation aborts the group afterwards.
        """
        self._over.set()
        if not self._lock.acquire(blocking=False):
            return
        group, self._group = self._group, None
        self._lock.release()
        if group is not None:
            group.abort()

    def notify_aborted(self, client: Client) -> None:
        """Tell the other rank, which may be waiting for us, that the group was aborted.

        Raises TransportError: the store is gone.
        """
        RendezvousStore(client, self._prefix, self._over).give_up()

    def _join(self, client: Client) -> None:
        if self._group is not None:
            return
        rendezvous = RendezvousStore(client, self._prefix, self._over)
        with _as_transport_errors("could not be made"):
            if self._over.is_set():
                rendezvous.give_up()
                raise _aborted_error()
            rendezvous.meet(self._rank)
            group = self._make(rendezvous, self._rank)
        try:
            with self._lock_unless_aborted():
                self._group = group
        except TransportError:  # a thread that aborted meanwhile found no group
            group.abort()
            raise

    @contextlib.contextmanager
    def _lock_unless_aborted(self) -> Iterator[None]:
        """A block with the lock held. An `abort` meanwhile is done at its end.

        Raises TransportError: the group was aborted before.
        """
        try:
            with self._lock:
                if self._over.is_set():
                    raise _aborted_error()
                yield
        finally:
            if self._over.is_set():
                self.abort()

    def _move(self, buckets: Sequence[torch.Tensor], start: Callable[[torch.Tensor, int], Callable[[], None]]) -> None:
        ends: deque[Callable[[], None]] = deque()
        try:
            with _as_transport_errors("failed"):
                for number, bucket in enumerate(buckets):
                    if len(ends) == self._in_flight:
                        ends.popleft()()
                    ends.append(start(bucket, number))
                while ends:
                    ends.popleft()()
        finally:
            # No operation may touch the payload after this returns.
            if ends:
                self.abort()
            for finish in ends:
                with contextlib.suppress(RuntimeError, TransportError):
                    finish()

    def _sending(self, bucket: torch.Tensor, number: int) -> Callable[[], None]:
        staged = bucket.to(self._device)
        return self._post(lambda group: group.send([staged], 1 - self._rank, number))

    def _receiving(self, bucket: torch.Tensor, number: int) -> Callable[[], None]:
        staged = torch.empty_like(bucket, device=self._device)
        finish = self._post(lambda group: group.recv([staged], 1 - self._rank, number))

        def received() -> None:
            finish()
            bucket.copy_(staged)

        return received

    def _post(self, post: Callable[[Any], Any]) -> Callable[[], None]:
        with self._lock_unless_aborted():
            work = post(self._group)

        def finish() -> None:
            work.wait(_LONGEST)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            if self._over.is_set():  # an operation of NCCL's that is aborted ends as if it had succeeded
                raise _aborted_error()

        return finish


def _aborted_error() -> TransportError:
    return TransportError("the process group was aborted")


def _buckets(payload: memoryview) -> Sequence[torch.Tensor]:
    return torch.split(torch.frombuffer(payload, dtype=torch.uint8), BUCKET_NBYTES)


@contextlib.contextmanager
def _as_transport_errors(what: str) -> Iterator[None]:
    try:
        yield
    except TransportError:
        raise
    except (RuntimeError, OSError) as error:
        raise TransportError(f"The process group with the peer {what}: {_error_summary(error)}") from error


def _error_summary(error: Exception) -> str:
    """An error's first line; for NCCL's errors also the cause, such as that both ranks have the same GPU."""
    first, *others = str(error).splitlines() or [""]
    _, mark, cause = "\n".join(others).partition("Last error:\n")
    return f"{first}: {cause.splitlines()[0]}" if mark and cause else first


def make_group(endpoint: StoreEndpoint, rank: int, key: str) -> Group | NoGroup:
    """The object that carries a link's payloads.

    Raises ConfigurationError: this torch, or this machine, does not have the backend.
    """
    require_backend(endpoint.backend)
    if endpoint.backend == "gloo":
        return NoGroup()
    return Group(rank, key, _make_nccl_group, torch.device("cuda", endpoint.gpu), endpoint.in_flight)


def require_backend(name: str) -> None:
    """Raise ConfigurationError if that backend is not available here."""
    if not isinstance(name, str) or name not in ("gloo", "nccl"):
        raise ConfigurationError(f"backend is {name!r}: give 'gloo' or 'nccl'.")
    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigurationError(
            f"backend {name!r} is not available here: this torch, or this machine, does not have it."
        )


def _make_nccl_group(store: Store, rank: int) -> Any:
    return dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
