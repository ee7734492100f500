"""Remote collectors over RPC: how one is addressed, and what is sent to one without a receiver of ours."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed import rpc

from weightsync.errors import ConfigurationError, TransportError
from weightsync.keys import SharedKey
from weightsync.protocol._tables import RefusalKind
from weightsync.protocol.messages import Ack, Bye, Hello, Message, Refusal, Update, WeightsForm
from weightsync.protocol.report import Evidence
from weightsync.schemes.arguments import one_by_one
from weightsync.transports.base import Link
from weightsync.transports.buffers import Buffer
from weightsync.transports.calls.client import Answers, CallLink
from weightsync.transports.calls.forwarding import ForwardingClient, complete_like
from weightsync.transports.rpc import (
    ENDLESS,
    RpcCallClient,
    WorkerInfo,
    ask_listening,
    begin,
    lost,
    raised_there,
    worker_named,
)
from weightsync.weights.context import MISSING, optional
from weightsync.weights.layout import Layout
from weightsync.weights.unpacking import form_taken, present_as

#: The method of a collector that takes weights.
METHOD: Final = "update_policy_weights_"
#: How TorchRL addresses a collector.
COLLECTOR: Final = ("collector_info", "collector_rref", "collector_class")


@dataclass(frozen=True, slots=True)
class Collector:
    """How a worker is reached over RPC.

    The name alone means a process with our receiver: what is sent waits there until one listens. With ``rref`` or
    ``kind`` it is asked at the handshake: if no receiver of ours listens there for the model, the collector's own
    method is called.
    """

    #: The worker's name, rank or `WorkerInfo`; None: the owner of ``rref``.
    worker: Any = None
    #: A reference to the collector.
    rref: Any = None
    #: Its class.
    kind: Any = None


def collector_of(endpoint: Any) -> Collector:
    """How a worker is reached: a `Collector`, TorchRL's ``(collector_info, collector_rref, collector_class)``, or who.

    Raises:
        ConfigurationError: a tuple of another length.
    """
    if isinstance(endpoint, Collector):
        return endpoint
    return Collector(*one_by_one(COLLECTOR, endpoint, {}).values())


def link_to(collector: Collector, model_id: str, peer: str, presenter: Presenter, key: SharedKey | None = None) -> Link:
    """A link to a worker; ``key`` is shared with it.

    Raises:
        ConfigurationError: it is not said who that is, RPC is not initialised, or it knows nobody of that name.
    """
    worker = worker_named(_worker_of(collector, peer), peer)
    ours = RpcCallClient(worker, model_id, peer, key)
    if collector.rref is None and collector.kind is None:
        return CallLink(ours, peer)
    kind = Kind(collector)
    plain = CollectorCallClient(calling(collector, worker, peer), peer, presenter, kind.form)
    asking = ForwardingClient(lambda: kind.before(lambda: ask_listening(worker, model_id, peer)), ours, plain)
    return CallLink(asking, peer)


def _worker_of(collector: Collector, peer: str) -> Any:
    if collector.worker is not None:
        return collector.worker
    if collector.rref is None:
        raise ConfigurationError(
            f"{peer} was given neither collector_info nor collector_rref: say which RPC worker it is. Nothing was sent."
        )
    return collector.rref.owner()


def calling(collector: Collector, worker: WorkerInfo, peer: str) -> Callable[[Any], torch.futures.Future[Any]]:
    """Calls a collector's own method with weights.

    A function that takes the reference itself is called as TorchRL's first generation does, with ``(rref, weights)``; a
    method of instances is called on the instance.

    Raises:
        ConfigurationError: there is no reference to a collector.
    """
    rref, kind = collector.rref, collector.kind
    if rref is None:
        raise ConfigurationError(
            f"{peer} was given collector_class but no collector_rref: the class's {METHOD}() is called with that. "
            "Nothing was sent."
        )
    if kind is None or _takes_self(kind):
        return _calling_the_instance(rref)
    function = getattr(kind, METHOD)
    return lambda weights: rpc.rpc_async(worker, function, args=(rref, weights), timeout=ENDLESS)


def _calling_the_instance(rref: Any) -> Callable[[Any], torch.futures.Future[Any]]:
    # The proxy is for one call each: it finds out the instance's type without waiting.
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


class Kind:
    """A collector's class: the one that was given, or the one of what its reference leads to, which is asked there.

    Args:
        collector: the collector.
    """

    def __init__(self, collector: Collector) -> None:
        self._kind = collector.kind
        self._asked: Any = None if collector.kind is not None else collector.rref._get_type(ENDLESS, blocking=False)

    def form(self) -> WeightsForm | None:
        """The form in which its method takes weights; None: whatever is given."""
        kind = self._kind if self._asked is None else self._asked.value()
        method = optional(kind, METHOD)
        return None if method is MISSING else form_taken(inspect.signature(method).parameters)

    def before(self, ask: Callable[[], Future[bool]]) -> Future[bool]:
        """Ask something else once the class is known."""
        if self._asked is None:
            return ask()
        found: Future[bool] = Future()
        self._asked.add_done_callback(lambda _: _passed_on(found, ask))
        return found


def _passed_on(found: Future[bool], ask: Callable[[], Future[bool]]) -> None:
    try:
        ask().add_done_callback(functools.partial(complete_like, found))
    except TransportError as error:
        found.set_exception(error)


# ---------------------------------------------------------------------------------------- what is sent, and said


class _Made:
    """A version's weights, made once for all collectors and kept while some call carries them."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights


class Presenter:
    """Makes weights of updates as their sender's caller gave them. Updates tell their layout once a link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layouts: dict[bytes, Layout] = {}
        self._made: weakref.WeakValueDictionary[tuple[str, int, int, WeightsForm], _Made] = (
            weakref.WeakValueDictionary()
        )

    def make(self, update: Update, payload: Buffer | None, form: WeightsForm | None) -> _Made:
        """The weights of an update, in a form (None: as they were given). The payload may be written again then."""
        form = form or update.form
        key = update.model_id, update.incarnation, update.version, form
        with self._lock:
            if update.layout:
                self._layouts[update.layout_digest] = Layout.decode(update.layout)
            made = self._made.get(key)
            if made is None:
                view = memoryview(b"") if payload is None else payload.view[: update.nbytes]
                layout = self._layouts[update.layout_digest]
                made = self._made[key] = _Made(present_as(form, layout, view, update.extras))
            return made


class CollectorCallClient:
    """Carries versions to a collector without our receiver: that its method returned is all that is known.

    Args:
        call: calls the method with weights.
        peer: who is at the other end, for messages to people.
        presenter: makes the weights.
        form: gives the form that the method takes; None: whatever is given.
    """

    def __init__(
        self,
        call: Callable[[Any], torch.futures.Future[Any]],
        peer: str,
        presenter: Presenter,
        form: Callable[[], WeightsForm | None],
    ) -> None:
        self._call = call
        self._form = form
        self._peer = peer
        self._presenter = presenter

    def start(self, message: Message, payload: Buffer | None) -> Answers:
        """Begin the call that carries an update; a handshake is answered at once: see `CallClient.start`."""
        match message:
            case Hello():
                return done(Hello(model_id=message.model_id, incarnation=message.incarnation))
            case Update():
                made = self._presenter.make(message, payload, self._form())
                return begin(self._peer, lambda: self._call(made.weights), lambda over: self._said(message, made, over))
            case Bye():
                return done()
        raise TransportError(f"A sender says no {type(message).__name__} to {self._peer}.")

    def _said(self, update: Update, made: _Made, over: torch.futures.Future[Any]) -> Sequence[Message]:
        named: dict[str, Any] = {
            "model_id": update.model_id,
            "incarnation": update.incarnation,
            "version": update.version,
            "evidence": Evidence.CALL,
        }
        try:
            over.value()
        except Exception as error:
            if not raised_there(error):
                raise lost(self._peer, error) from error
            trace = str(error).strip()
            return [Refusal(**named, kind=RefusalKind.REFUSED, reason=_reason(trace), remote_traceback=trace)]
        return [Ack(**named, digest=update.digest)]

    def close(self) -> None:
        """No further call will be begun."""


def _reason(trace: str) -> str:
    """What was raised, of torch's text: where, what, and the traceback that ends with it."""
    lines = trace.partition("\n\nAt:\n")[0].splitlines()
    return lines[-1] if lines else trace


def done(*messages: Message) -> Answers:
    """A call that is over."""
    answers: Answers = Future()
    answers.set_result(messages)
    return answers
