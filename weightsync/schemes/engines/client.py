"""The interface of an engine's adapter, and the client that gives it each version in a thread of its own."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Final

from torch import Tensor

from weightsync.clock import Stopwatch
from weightsync.errors import LayoutError, PartlyLoadedError, TransportError
from weightsync.protocol.messages import Message, Update
from weightsync.schemes.peers.base import PLAIN_METHODS, JobThread, payload_of, refuse_coroutines
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers
from weightsync.transports.calls.without_receiver import ack, raised, start_call
from weightsync.weights.layout import Layout
from weightsync.weights.loader import BUCKET_BYTES, draw, is_unawaited

logger = logging.getLogger("weightsync")

#: Names and tensors that go to an engine in one call.
Bucket = list[tuple[str, Tensor]]
#: Seconds that `EngineClient.close` waits for its thread once the call in it was aborted.
PATIENCE: Final = 10.0


class EngineInDoubtError(PartlyLoadedError):
    """A version failed, and the engine may not be as it was before. The message says in full what state it is in."""


class Engine(abc.ABC):
    """Adapter for one inference engine: it loads each version by calls that the engine answers.

    When the calls of a version have returned, nothing more is known about it: the evidence is ``call``.
    """

    #: How many bytes go to the engine in one call. A larger tensor goes alone.
    bucket_bytes: int = BUCKET_BYTES
    #: The engine's name of a tensor, by its name in the trainer's weights. Tensors that it lacks keep their names.
    name_map: Mapping[str, str] | None = None
    #: The client of the newest link to it; None: it has none.
    _client: EngineClient | None = None
    #: How many links to it were created.
    _links: int = 0

    @abc.abstractmethod
    def open(self) -> None:
        """Get ready: a link to the engine was created, perhaps a new one after `abort`. Must not block."""

    @abc.abstractmethod
    def load(self, buckets: Iterable[Bucket], version: str) -> None:
        """Load a version, and return once the engine serves it.

        Args:
            buckets: its tensors, on the CPU, each valid until the next bucket is asked for.
            version: the incarnation and the number of the version, for the engine's own records.

        Raises:
            PartlyLoadedError: it failed, and the engine has perhaps begun to change.
            TransportError: the engine cannot be reached, and its state is unknown.
            Exception: any other exception: it failed, and the engine still serves the previous version.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """End the call in progress, from another thread; all calls after it fail, until `open`."""

    @property
    def awaited(self) -> str:
        """The call that the engine has not answered yet, for messages; empty: none, or unknown."""
        return ""

    @abc.abstractmethod
    def __str__(self) -> str:
        """How messages name it."""


class EngineClient:
    """Gives an engine one version after the other, in a thread of its own.

    `close` ends the call in progress and the thread. A call that cannot be ended is left to a daemon thread. A client
    of the same engine that was not closed yet is closed first: otherwise it would end the calls of this one.

    Args:
        engine: the adapter.
        peer: its name in messages.

    Raises:
        ConfigurationError: a method of the adapter is ``async``.
    """

    def __init__(self, engine: Engine, peer: str) -> None:
        refuse_coroutines(engine, ("open", "load", "abort"), PLAIN_METHODS)
        self._engine = engine
        self._peer = peer
        self._layouts: dict[bytes, Layout] = {}
        self._thread = JobThread(f"weightsync feeds {peer}")
        if engine._client is not None:
            engine._client.close()
        engine._client = self
        engine._links += 1
        self._number = engine._links
        engine.open()

    @property
    def remark(self) -> str:
        """Why the engine does not answer: see `Remarks`."""
        awaited = self._engine.awaited
        return awaited and f"it has not answered {awaited} yet"

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the calls that carry an update; a handshake is answered here, since no engine knows it."""
        return start_call(message, self._peer, lambda update: self._call(update, payload_of(update, payload)))

    def close(self) -> None:
        """End the call in progress and the thread."""
        if self._engine._client is self:
            self._engine._client = None
            self._engine.abort()
        thread = self._thread.end()
        if thread is not None:
            thread.join(PATIENCE)

    def _call(self, update: Update, view: memoryview) -> Answers:
        if self._engine._client is not self:
            raise TransportError(f"{self._peer} was given another link, which has ended this one.")
        if update.layout:
            sent = Layout.decode(update.layout)
            self._layouts = {sent.digest: sent}
        layout, answers = self._layouts[update.layout_digest], Answers()
        self._thread.begin(lambda: self._feed(update, layout, view, answers))
        return answers

    def _feed(self, update: Update, layout: Layout, view: memoryview, answers: Answers) -> None:
        """Runs in the thread."""
        stopwatch, engine = Stopwatch(), self._engine
        if engine._client is not self:  # closed since: a newer link may have loaded a newer version
            answers.set_exception(TransportError(f"The link to {self._peer} is closed."))
            return
        try:
            if layout.extras:
                raise LayoutError(
                    f"an engine takes tensors, but the weights have the extra state of {list(layout.extras)}. Send a "
                    "state dict from which you took the _extra_state entries.",
                    unexpected=layout.extras,
                )
            buckets = group_into_buckets(draw(layout, view, engine.name_map, engine.bucket_bytes), engine.bucket_bytes)
            first = list(islice(buckets, 1))  # before the engine is called, so that names that do not fit are refused
            counted_buckets = self._buckets_unless_replaced(chain(first, buckets))
            if is_unawaited(engine.load(counted_buckets, f"{update.incarnation}.{update.version}")):
                raise PartlyLoadedError("load() returned an awaitable, and nothing here awaits it.")
        except EngineInDoubtError as error:
            self._lose(answers, str(error), error)
        except PartlyLoadedError as error:
            self._lose(answers, f"{engine} may hold parts of two versions, or be paused: {error}", error)
        except TransportError as error:
            self._lose(answers, f"{error} If {engine} still runs, it may hold parts of two versions.", error)
        except BaseException as error:  # noqa: BLE001 - whatever an adapter raises is reported to the sender
            answers.set_result([raised(update, error, f"{engine}: ")])
        else:
            answers.set_result([ack(update, seconds=stopwatch.seconds)])

    def _buckets_unless_replaced(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """The buckets. A call that could not be ended gets no more once there is a newer link to the engine.

        Raises TransportError: there is, or was, one.
        """
        self._require_unreplaced()
        for bucket in buckets:
            yield bucket
            self._require_unreplaced()

    def _require_unreplaced(self) -> None:
        if self._engine._links != self._number:
            raise TransportError(f"{self._peer} was given another link, which may have loaded a newer version.")

    def _lose(self, answers: Answers, message: str, error: Exception) -> None:
        """The engine is lost. The answer of a closed link reaches no sender, so it is logged."""
        if self._engine._client is not self:
            logger.warning("a link was closed while a version was loaded: %s", message)
        answers.set_exception(_lost(message, error))


def group_into_buckets(weights: Iterator[tuple[str, Tensor]], nbytes: int) -> Iterator[Bucket]:
    """Group tensors into buckets of at most ``nbytes`` bytes, or of one larger tensor."""
    bucket: Bucket = []
    bucket_nbytes = 0
    for name, tensor in weights:
        if bucket and bucket_nbytes + tensor.nbytes > nbytes:
            yield bucket
            bucket, bucket_nbytes = [], 0
        bucket.append((name, tensor))
        bucket_nbytes += tensor.nbytes
    if bucket:
        yield bucket


def _lost(what: str, error: Exception) -> TransportError:
    lost = TransportError(f"{what} Start it again before you call add_worker() for it.")
    lost.__cause__ = error
    return lost
