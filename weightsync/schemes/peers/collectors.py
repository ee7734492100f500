"""Remote collectors over RPC: how to address them, and how weights are sent to one without our receiver."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed import rpc

from weightsync.engine.context import MISSING, optional
from weightsync.errors import ConfigurationError, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol.messages import Message, Update, WeightsForm
from weightsync.schemes.arguments import unpack_arguments
from weightsync.schemes.peers.base import SharedPresenter, SharedWeights
from weightsync.transports.base import Link
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, CallLink
from weightsync.transports.calls.waiting import AskingClient, CallsInTurn, complete_like
from weightsync.transports.calls.without_receiver import ack, refusal, start_call
from weightsync.transports.rpc import (
    ENDLESS,
    TRANSPORT_NAME,
    RpcCallClient,
    WorkerInfo,
    ask_listening,
    begin,
    lost,
    raised_remotely,
    worker_named,
)
from weightsync.weights.unpacking import form_taken

#: The method of a collector that takes weights.
METHOD: Final = "update_policy_weights_"
#: How TorchRL addresses a collector.
COLLECTOR: Final = ("collector_info", "collector_rref", "collector_class")


@dataclass(frozen=True, slots=True)
class Collector:
    """How a worker is reached over RPC.

    The name alone means a process with our receiver: messages wait there until it listens. With ``rref`` or ``kind``
    the handshake finds out whether a weightsync receiver listens there for the model; if not, the collector's own
    method is called.
    """

    #: The worker's name, rank or `WorkerInfo`; None: the owner of ``rref``.
    worker: Any = None
    #: A reference to the collector.
    rref: Any = None
    #: Its class.
    kind: Any = None


def collector_of(endpoint: Any) -> Collector:
    """How a worker is reached, from a `Collector`, its name, or ``(collector_info, collector_rref, collector_class)``.

    Raises ConfigurationError: a tuple of another length.
    """
    if isinstance(endpoint, Collector):
        return endpoint
    return Collector(*unpack_arguments(COLLECTOR, endpoint, {}).values())


def link_to(
    collector: Collector, model_id: str, peer: str, presenter: SharedPresenter, key: SharedKey | None = None
) -> Link:
    """A link to a worker; ``key`` is shared with it.

    Raises ConfigurationError: no worker is given, RPC is not initialised, or has no worker of that name.
    """
    worker = worker_of(collector, peer)
    our_client = RpcCallClient(worker, model_id, peer, key)
    if collector.rref is None and collector.kind is None:
        return CallLink(our_client, peer, lambda: our_client.remark, (TRANSPORT_NAME, model_id, str(worker.name)))
    kind = CollectorClass(collector)
    # By its id: a reference has no other identity, and lives as long as a call over a former link.
    identity = TRANSPORT_NAME, model_id, id(collector.rref)
    plain_client = CollectorCallClient(calling(collector, worker, peer), peer, presenter, kind.form, identity)
    asking_client = AskingClient(
        model_id, lambda: kind.before(lambda: ask_listening(worker, model_id, peer)), our_client, plain_client
    )
    return CallLink(asking_client, peer, worker=(TRANSPORT_NAME, model_id, str(worker.name)))


def worker_of(collector: Collector, peer: str) -> WorkerInfo:
    """The worker that is called.

    Raises ConfigurationError: none is given, RPC is not initialised, or has no worker of that name; or what is given
    as a reference to a collector is not one.
    """
    if collector.rref is not None and optional(collector.rref, "owner") is MISSING:
        raise ConfigurationError(
            f"{peer}: collector_rref is of type {type(collector.rref).__name__}: give what rpc.remote() returns. "
            "Nothing was sent."
        )
    if collector.worker is not None:
        return worker_named(collector.worker, peer)
    if collector.rref is None:
        raise ConfigurationError(
            f"{peer} was given neither collector_info nor collector_rref: give one of them. Nothing was sent."
        )
    return worker_named(collector.rref.owner(), peer)


def calling(collector: Collector, worker: WorkerInfo, peer: str) -> Callable[[Any], torch.futures.Future[Any]]:
    """Calls a collector's own method with weights.

    A function that takes the reference is called with ``(rref, weights)``, as TorchRL's first generation does; an
    instance method is called on the instance.

    Raises ConfigurationError: there is no reference to a collector.
    """
    rref, kind = collector.rref, collector.kind
    if rref is None:
        raise ConfigurationError(
            f"{peer} was given collector_class but no collector_rref: the class's {METHOD}() is called with that. "
            "Nothing was sent."
        )
    if kind is None or _takes_self(kind):
        return _instance_caller(rref)
    function = getattr(kind, METHOD)
    return lambda weights: rpc.rpc_async(worker, function, args=(rref, weights), timeout=ENDLESS)


def _instance_caller(rref: Any) -> Callable[[Any], torch.futures.Future[Any]]:
    # Each call makes a new proxy, which finds out the instance's type without waiting.
    def call(weights: Any) -> torch.futures.Future[Any]:
        over: torch.futures.Future[Any] = getattr(rref.rpc_async(timeout=ENDLESS), METHOD)(weights)
        return over

    return call


def _takes_self(kind: Any) -> bool:
    try:
        method = inspect.getattr_static(kind, METHOD)
    except AttributeError:
        raise ConfigurationError(
            f"collector_class {getattr(kind, '__name__', kind)!r} has no {METHOD}(). Nothing was sent."
        ) from None
    if not inspect.isfunction(method):
        return False
    return next(iter(inspect.signature(method).parameters), "") == "self"


class CollectorClass:
    """A collector's class: the one given, or the class of the object behind its reference, found by RPC."""

    def __init__(self, collector: Collector) -> None:
        self._kind = collector.kind
        self._asked: Any = None if collector.kind is not None else collector.rref._get_type(ENDLESS, blocking=False)

    def form(self) -> WeightsForm | None:
        """The form in which its method takes weights; None: any. Raises TransportError: it cannot be found out."""
        kind = self._kind if self._asked is None else self._found()
        method = optional(kind, METHOD)
        return None if method is MISSING else form_taken(inspect.signature(method).parameters)

    def _found(self) -> Any:
        try:
            return self._asked.value()
        except Exception as error:
            raise TransportError(
                f"the class of the collector of collector_rref cannot be determined: {_reason(str(error).strip())}. "
                "Nothing was sent to it."
            ) from error

    def before(self, ask: Callable[[], Future[Sequence[str]]]) -> Future[Sequence[str]]:
        """Ask something once the class is known."""
        if self._asked is None:
            return ask()
        models: Future[Sequence[str]] = Future()
        self._asked.add_done_callback(lambda _: _ask_and_forward(models, ask))
        return models


def _ask_and_forward(models: Future[Sequence[str]], ask: Callable[[], Future[Sequence[str]]]) -> None:
    try:
        ask().add_done_callback(functools.partial(complete_like, models))
    except TransportError as error:
        models.set_exception(error)


class CollectorCallClient:
    """Carries versions to a collector without our receiver; it is only known that the collector's method returned.

    Args:
        form: returns the form that the method takes; None: the form in which the weights were given.
        worker: identifies the collector and the model: calls over former links end first. None: there are none.
    """

    def __init__(
        self,
        call: Callable[[Any], torch.futures.Future[Any]],
        peer: str,
        presenter: SharedPresenter,
        form: Callable[[], WeightsForm | None],
        worker: Hashable | None = None,
    ) -> None:
        self._call = call
        self._form = form
        self._peer = peer
        self._presenter = presenter
        self._in_turn = CallsInTurn(peer, worker)

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries an update; a handshake is answered at once: see `CallClient.start`."""
        return start_call(message, self._peer, lambda update: self._deliver(update, payload))

    def _deliver(self, update: Update, payload: Buffer | None) -> Answers:
        shared = self._presenter.present(update, payload, self._form())
        # The call keeps the weights alive for the links that present the same version.
        said = functools.partial(self._answers, update, shared)
        return self._in_turn.begin(lambda: begin(self._peer, lambda: self._call(shared.weights), said))

    def _answers(self, update: Update, _: SharedWeights, finished: torch.futures.Future[Any]) -> Sequence[Message]:
        try:
            finished.value()
        except Exception as error:
            if not raised_remotely(error):
                raise lost(self._peer, error) from error
            trace = str(error).strip()
            return [refusal(update, _reason(trace), trace)]
        return [ack(update)]

    def close(self) -> None:
        """Begin no further calls: see `CallClient.close`."""
        self._in_turn.close()


def _reason(trace: str) -> str:
    """The error itself: torch's text has the place, the error, and a traceback that ends with the error."""
    lines = [line for line in trace.partition("\n\nAt:\n")[0].splitlines() if line.strip(" \"')")]
    return lines[-1] if lines else trace
