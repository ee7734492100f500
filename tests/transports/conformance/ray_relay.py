"""A real Ray actor that forwards calls to this process, where the kit drives the receiver, and returns the answers.

All code between the ends is the shipped one: `ActorCallClient`, Ray's calls, the object store, `CallServer`. Calls that
drive the receiver themselves, as in a serial actor, are tested in `tests/transports/ray`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from weightsync import RayWeightSyncScheme
from weightsync.protocol.codec import decode
from weightsync.protocol.messages import Bye
from weightsync.testing import Ends
from weightsync.transports.calls.same_host import SegmentPlace
from weightsync.transports.calls.server import CallServer, Frames, Parcel


class Relay:
    """The actor. Each call waits for the answer of the other process."""

    def __init__(self, address: str) -> None:
        self._connection = Client(address, "AF_UNIX")
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[Frames]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    async def _weightsync_call(  # noqa: PLR0917 - the signature of `WeightSyncActor`
        self, model_id: str, link: str, number: int, frame: bytes, payload: Any, lost: tuple[int, ...] = ()
    ) -> Frames:
        answer: concurrent.futures.Future[Frames] = concurrent.futures.Future()
        carried = payload if payload is None or isinstance(payload, tuple) else memoryview(payload).tobytes()
        with self._lock:
            call = next(self._numbers)
            self._waiting[call] = answer
            self._connection.send((call, model_id, link, number, frame, carried, lost))
        return await asyncio.wrap_future(answer)

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                call, frames, error = self._connection.recv()
                answer = self._waiting.pop(call)
                answer.set_result(frames) if error is None else answer.set_exception(error)


class ActorServer:
    """This process's end of the connection. It passes each call to the call server of its model."""

    def __init__(self, connection: Connection) -> None:
        self.call_servers: dict[str, CallServer] = {}
        self._connection = connection
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._listen, name="relay")
        self.thread.start()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                call, *parcel = self._connection.recv()
                self._take(call, *parcel)

    def _take(  # noqa: PLR0917 - the arguments of an actor's method
        self, call: int, model_id: str, link: str, number: int, frame: bytes, carried: Any, lost: Any
    ) -> None:
        call_server = self.call_servers[model_id]
        place = SegmentPlace.read(carried) if isinstance(carried, tuple) else None
        payload = None if carried is None or place else memoryview(bytearray(carried))
        parcel = Parcel(link, number, frame, payload, place)
        try:
            if isinstance(decode(frame), Bye):
                call_server.hang_up(parcel)
                self._answer(call, [], None)
                return
            answer = call_server.submit(parcel)
            call_server.skip(parcel, lost)
        except Exception as error:  # noqa: BLE001 - the call's error, as from an actor's method
            self._answer(call, [], error)
        else:
            answer.add_done_callback(lambda over: self._return_answer(call, over))

    def _return_answer(self, call: int, over: concurrent.futures.Future[Frames]) -> None:
        error = over.exception()
        self._answer(call, [] if error else over.result(), error)

    def _answer(self, call: int, frames: Frames, error: BaseException | None) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((call, frames, error))


@contextlib.contextmanager
def ray_factory(folder: str) -> Iterator[Callable[[str], Ends]]:
    """Links to a real actor, with the receivers' ends in this process."""
    ray: Any = importlib.import_module("ray")
    with Listener(f"{folder}/relay", "AF_UNIX") as listener:
        actor = ray.remote(num_cpus=0, max_concurrency=1000)(Relay).remote(listener.address)
        connection = listener.accept()
    actor_server, scheme = ActorServer(connection), RayWeightSyncScheme()

    def connect(model_id: str) -> Ends:
        call_server = CallServer(model_id)
        name = f"{model_id} {uuid.uuid4().hex}"
        actor_server.call_servers[name] = call_server
        return Ends(scheme.create_link(actor, name, "the worker"), call_server.open)

    try:
        yield connect
    finally:
        ray.kill(actor)
        actor_server.thread.join()
        connection.close()
