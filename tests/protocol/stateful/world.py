"""Real senders and receivers, each with its reference model, over a network that the test controls.

A method of `World` makes a call, delivers a message or injects a fault. It does so on the real objects and on the
models (`reference`), and requires that callers get equal results. Time does not pass by itself. A call that blocks runs
a script: at each wake-up one action, such as another call or a message that arrives.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import reference
import torch
from local_links import LocalLink, Network, Pace, Parcel, Side
from policy import Policy
from reference import SENDER, WORKER, Content, Interrupt, Raised

from weightsync.clock import Clock as SystemClock
from weightsync.engine.receiver import WeightReceiver
from weightsync.engine.sender import WeightSender
from weightsync.errors import WeightSyncError
from weightsync.protocol import messages
from weightsync.protocol._tables import Delivery, ReceiverInput, SenderInput, State
from weightsync.protocol.report import SyncReport
from weightsync.schemes.base import WeightSyncScheme
from weightsync.transports.base import Payloads
from weightsync.weights.target import Mode

WORKERS = 3
SIDES = {SENDER: Side.FIRST, WORKER: Side.SECOND}

#: How often each row was taken, by state and input.
ROWS: Counter[tuple[State, SenderInput | ReceiverInput]] = Counter()


# ---------------------------------------------------------------------------------------------------- weights


def weights(content: Content) -> dict[str, Any]:
    """Weights whose every element is the number of `content`; one tensor has a wrong shape if they must not fit."""
    return {
        "weight": torch.full((8 if content.fits else 9,), content.code, dtype=torch.float64),
        "bias": torch.full((3,), float(content.code)),
        "count": torch.full((2,), content.code, dtype=torch.int64),
        "_extra_state": content.code,
    }


# ------------------------------------------------------------------------------------------------------ links


class CloggedLink(LocalLink):
    """A link that can be made to write nothing; what is sent meanwhile is queued."""

    def __init__(self, network: Network, side: Side, payloads: Payloads) -> None:
        super().__init__(network, side, payloads)
        self.clogged = False
        self._queued: list[messages.Message] = []
        #: Called with each message that is sent over this end.
        self.listener: Callable[[messages.Message], None] = lambda message: None

    def send(self, message: messages.Message, payload: Any = None) -> None:
        self.listener(message)
        if self.clogged or self._queued:
            self._require_open()
            self.network.require_alive(self.side)
            self._queued.append(message)
        else:
            super().send(message, payload)

    def flush(self) -> bool:
        self._require_open()
        if self._queued:
            self.network.require_alive(self.side)
            while self._queued and not self.clogged:
                super().send(self._queued.pop(0))
        return not self._queued


class LocalScheme(WeightSyncScheme):
    """A scheme whose endpoints already are links."""

    def __init__(self, apply_mode: Mode = Mode.COPY) -> None:
        super().__init__()
        self.apply_mode = apply_mode

    def create_transport(self, pipe_or_context: Any) -> Any:
        return pipe_or_context

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Any:
        return endpoint


def described(message: messages.Message) -> reference.Message:
    """Convert a real message to a message of the reference model."""
    match message:
        case messages.Hello():
            return reference.Message("Hello", message.incarnation, message.version, "", message.fence)
        case messages.Refusal():
            return reference.Message("Refusal", message.incarnation, message.version, message.kind.name, message.fence)
        case messages.Bye():
            return reference.Message("Bye", message.incarnation)
        case _:
            return reference.Message(type(message).__name__, message.incarnation, message.version)


class Clock(SystemClock):
    """Stands in for the system clock and for `secrets`: time passes only when a test advances it."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.ns = 1_000_000
        self.drawn = 0

    def monotonic(self) -> float:
        return self.seconds

    def time_ns(self) -> int:
        return self.ns

    def randbits(self, bits: int) -> int:
        self.drawn += 1
        return self.drawn

    def next_incarnation(self, fence: int = 0) -> int:
        """The incarnation that a sender takes if it connects now."""
        return (max(self.ns, (fence >> 32) + 1) << 32) | (self.drawn + 1)


# ----------------------------------------------------------------------------- real objects and their models


@dataclass(eq=False)
class Trainer:
    """A sender and its model."""

    real: WeightSender
    model: reference.Sender
    closed: bool = False


@dataclass(eq=False)
class Worker:
    """A receiver and its model: one life of a worker."""

    id: int
    policy: Policy
    real: WeightReceiver
    model: reference.Receiver
    #: Every key that was ever served, with the number of the weights that were live then.
    served: list[tuple[reference.Key, int]] = field(default_factory=list)
    #: The lengths of `served` at which the version served was written over by hand: it may be served again.
    overwritten: set[int] = field(default_factory=set)
    #: The length of `served` when the receiver was closed; None: it is not closed.
    at_close: int | None = None


@dataclass(eq=False)
class LinkPair:
    """The two ends of a link, and their model."""

    network: Network
    ends: dict[str, CloggedLink]
    model: reference.Wire
    trainer: Trainer
    worker_id: int
    #: The worker that has registered its end; None: none has yet.
    worker: Worker | None = None
    #: The Hello has been delivered to the worker. Before it, the link delivers nothing to the worker.
    greeted: bool = False

    @property
    def over(self) -> bool:
        """Whether both ends are closed or dead, so that neither reads or writes again."""
        ends = {end for end in (SENDER, WORKER) if end in self.model.closed or end in self.model.dead}
        return len(ends) == 2

    def deliverable(self) -> list[Parcel]:
        """The messages that may arrive next."""
        parcels = list(self.network.deliverable())
        if not self.greeted:
            hellos = [p for p in parcels if p.to is Side.SECOND and isinstance(p.received.message, messages.Hello)]
            parcels = [p for p in parcels if p.to is Side.FIRST] + hellos
        return parcels

    def modelled(self, parcel: Parcel) -> reference.Parcel:
        """The parcel of the model that corresponds to a real one."""
        return next(flying for flying in self.model.flying if flying.number == parcel.number)


def check_g8(original: Any, copied: Any) -> None:
    """G8: a copy is uninitialized, and shares no mutable state with its original."""
    one, other = original._driver, copied._driver
    assert other.machine.state is State.UNINITIALIZED
    assert other.links() == []
    assert other.data == type(other.data)()
    for name in ("machine", "lock", "waker", "_links"):
        assert getattr(one, name) is not getattr(other, name)


def check_g11(raises: bool, found: Any) -> None:
    """G11: a blocking call that raises on failure returns only if every target has applied the version."""
    assert not raises or not isinstance(found, SyncReport) or found.ok


class World:
    """All trainers, workers and links of a walk, each as a real object and as a model."""

    def __init__(self, delivery: Delivery, payloads: Payloads, mode: Mode, patch: pytest.MonkeyPatch) -> None:
        self.delivery, self.payloads, self.mode = delivery, payloads, mode
        self.clock = Clock()
        for name in ("_clock", "secrets"):
            patch.setattr(f"weightsync.clock.{name}", self.clock)
        patch.setattr("weightsync.transports.base.Waits.wait", lambda _, *args: self._waiting(*args))
        self.trainers: list[Trainer] = []
        self.link_pairs: list[LinkPair] = []
        self.workers: dict[int, Worker] = {}
        self.gone: list[Worker] = []
        #: What really happened: the weights and targets of each key, the updates and acks that left, and the reports.
        self.sent: dict[reference.Key, Content] = {}
        self.targets: dict[reference.Key, set[int] | None] = {}
        self.left: list[tuple[reference.Key, int]] = []
        self.acked: set[tuple[Trainer, int, reference.Key]] = set()
        self.reported: list[tuple[Trainer, SyncReport]] = []
        #: The trainer whose call is blocked.
        self.waiting: Trainer | None = None
        self._codes = 0
        #: The actions of the next waits, one for each wake-up, and how the waiting then ends.
        self._script: list[Callable[[], None]] = []
        self._way_out = "deadline"
        self._blocked: Generator[None, None, Any] | None = None
        self.add_trainer(WeightSender(LocalScheme(mode)))
        for id in range(WORKERS):
            self.workers[id] = self._worker(id, WeightReceiver(LocalScheme(mode)))

    # ------------------------------------------------------------------------------------------- calls on both

    def same(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """Make a call on the real object and on the model, and require equal outcomes. Returns the real one."""
        expected = _outcome(model)
        found = _outcome(real)
        assert _told(found) == _told(expected), f"{found!r}, where the model has {expected!r}"
        return found

    def blocking(self, real: Callable[[], Any], model: Generator[None, None, Any]) -> Any:
        """Make a call that may wait. At each wait the model catches up, and the next action of the script runs."""
        outer, self._blocked = self._blocked, model
        interrupted, self._interrupted = self._interrupted, False
        try:
            found = _outcome(real)
            expected = _outcome(self._ended)
        finally:
            self._blocked, self._interrupted = outer, interrupted
        assert _told(found) == _told(expected), f"{found!r}, where the model has {expected!r}"
        return found

    def _ended(self) -> Any:
        assert self._blocked is not None
        if self._interrupted:
            self._blocked.throw(Interrupt())
        try:
            next(self._blocked)
        except StopIteration as stop:
            return stop.value
        pytest.fail("the model still waits where the sender does not")

    _interrupted = False

    def _waiting(self, links: Any, timeout: float | None, since: int) -> list[Any] | None:
        """Stands in for `Waits.wait`, the only place where a sender blocks. None makes the sender read all links."""
        if timeout == 0.0:  # the sender only asks which links can be read now
            return list(links)
        assert self._blocked is not None, "a call that must not block did"
        try:
            next(self._blocked)
        except (StopIteration, Raised) as end:
            pytest.fail(f"the sender waits where the model is done: {end!r}")
        self.compare()
        if self._script:
            self._script.pop(0)()
            self.compare()
        elif timeout is not None and self._way_out == "deadline":
            self.clock.seconds += timeout + 1
        else:
            self._interrupted = True
            raise KeyboardInterrupt
        return None

    def during_the_wait(self, script: list[Callable[[], None]], way_out: str) -> None:
        """Set the actions that happen in the next waits, and how the waiting ends: "deadline" or "interrupt"."""
        self._script, self._way_out = list(script), way_out

    # ------------------------------------------------------------------------------------------- making things

    def fresh(self, fits: bool = True) -> Content:
        """Weights with a number that was never used."""
        self._codes += 1
        return Content(fits, self._codes)

    def add_trainer(self, real: WeightSender) -> Trainer:
        trainer = Trainer(real, reference.Sender(self.clock.monotonic))
        real._driver.machine.observe(_count)
        self.trainers.append(trainer)
        return trainer

    def _worker(self, id: int, real: WeightReceiver) -> Worker:
        policy = Policy()
        real.register_model(policy)
        worker = Worker(id, policy, real, reference.Receiver())
        real._driver.machine.observe(lambda before, input, after: self._stepped(worker, before, input))
        return worker

    def _stepped(self, worker: Worker, before: State, input: ReceiverInput) -> None:
        ROWS[before, input] += 1
        if input is ReceiverInput.APPLIED:
            key = worker.real._driver.data.served
            (code,) = worker.policy.codes
            assert key is not None
            worker.served.append((key, code))
        elif input is ReceiverInput.INVALIDATED:
            worker.overwritten.add(len(worker.served))

    def create_link(self, trainer: Trainer, id: int) -> LinkPair:
        """Create a link between a trainer and a worker. Neither side has registered its end yet."""
        network = Network(self.delivery, Pace.HELD)
        ends = {end: CloggedLink(network, side, self.payloads) for end, side in SIDES.items()}
        link_pair = LinkPair(network, ends, reference.Wire(self.delivery.loses), trainer, id)
        self.link_pairs.append(link_pair)
        for end in ends.values():
            end.listener = lambda message: self._overheard(link_pair, message)
        return link_pair

    def _overheard(self, link_pair: LinkPair, message: messages.Message) -> None:
        match message:
            case messages.Ack():
                self.acked.add((link_pair.trainer, link_pair.worker_id, (message.incarnation, message.version)))
            case messages.Update():
                self.left.append(((message.incarnation, message.version), link_pair.worker_id))

    # ------------------------------------------------------------------------------------------- trainers' calls

    def add(self, trainer: Trainer, id: int, listen: bool = True) -> None:
        link_pair = self.create_link(trainer, id)
        found = self.same(
            lambda: trainer.real.add_worker(id, link_pair.ends[SENDER]), lambda: trainer.model.add(id, link_pair.model)
        )
        if isinstance(found, BaseException):
            self.link_pairs.remove(link_pair)
        elif listen:
            self.listen(link_pair)

    def listen(self, link_pair: LinkPair) -> None:
        worker = self.workers[link_pair.worker_id]
        found = self.same(
            lambda: worker.real.register_worker_transport(link_pair.ends[WORKER]),
            lambda: worker.model.register(link_pair.model),
        )
        if not isinstance(found, BaseException):
            link_pair.worker = worker

    def connect(self, trainer: Trainer, fence: int | None = None) -> None:
        incarnation = self.clock.next_incarnation(fence or 0)
        self.same(lambda: trainer.real.connect(fence=fence), lambda: trainer.model.connect(incarnation))

    def send(
        self,
        trainer: Trainer,
        targets: list[int] | None = None,
        *,
        blocks: bool = False,
        timeout: float | None = 0.0,
        raises: bool = True,
        on_pending: str = "raise",
        fits: bool = True,
    ) -> Any:
        content = self.fresh(fits)
        arguments: dict[str, Any] = {"timeout": timeout, "on_pending": on_pending}
        if blocks:
            arguments["on_failure"] = "raise" if raises else "report"
        call = trainer.real.send if blocks else trainer.real.send_async
        model = (trainer.model.send if blocks else trainer.model.send_async)(
            targets=targets,
            content=content,
            timeout=timeout,
            raises=raises,
            on_pending=on_pending,
            incarnation=self._taken_incarnation(trainer),
        )
        real = trainer.real

        def send() -> Any:
            # The key of these weights is needed during the call, but certain only after it: note the expected key.
            connecting = real.state is State.UNINITIALIZED
            key = self.clock.next_incarnation() if connecting else real.incarnation, real.version + 1
            before = self.sent.get(key), self.targets.get(key)
            self.sent[key], self.targets[key] = content, None if targets is None else set(targets)
            try:
                return call(weights(content), targets, **arguments)
            finally:
                if real.version < key[1] and before[0] is not None:
                    self.sent[key], self.targets[key] = before

        found = self._noted(trainer, self.blocking(send, model))
        check_g11(blocks and raises, found)
        return found

    def _taken_incarnation(self, trainer: Trainer) -> Callable[[], int]:
        """The incarnation that an implicit connect takes, as a function for the model.

        It is computed now, because the model may connect before or after the real sender.
        """
        upcoming = self.clock.next_incarnation()
        return lambda: upcoming

    def wait(self, trainer: Trainer, timeout: float | None = 0.0, raises: bool = True) -> Any:
        found = self.blocking(
            lambda: trainer.real.wait_async(timeout=timeout, on_failure="raise" if raises else "report"),
            trainer.model.wait(timeout=timeout, raises=raises),
        )
        check_g11(raises, found)
        return self._noted(trainer, found)

    def poll(self, trainer: Trainer) -> Any:
        return self._noted(trainer, self.same(trainer.real.poll, trainer.model.poll))

    def abandon(self, trainer: Trainer) -> Any:
        return self._noted(trainer, self.same(trainer.real.abandon, trainer.model.abandon))

    def remove(self, trainer: Trainer, id: int) -> Any:
        return self.same(lambda: trainer.real.remove_worker(id), lambda: trainer.model.remove(id))

    def close(self, trainer: Trainer) -> None:
        """Close the sender from another thread than that of the walk, which may be blocked in a call."""
        self.same(lambda: _in_another_thread(trainer.real.close), trainer.model.close)

    def _noted(self, trainer: Trainer, found: Any) -> Any:
        report = getattr(found, "report", found)
        if isinstance(report, SyncReport):
            self.reported.append((trainer, report))
        return found

    def copy_trainer(self, trainer: Trainer, how: str) -> None:
        """Add a copy of a trainer's sender, and check that the original is unchanged (G8)."""
        self.add_trainer(_copied(trainer.real, how))
        check_g8(trainer.real, self.trainers[-1].real)
        self.compare()

    def crash_trainer(self, trainer: Trainer) -> None:
        """Kill a trainer's process: its links end without a goodbye."""
        for link_pair in self.link_pairs:
            if link_pair.trainer is trainer:
                link_pair.network.crash(Side.FIRST)
                link_pair.model.crash(SENDER)
        self.trainers.remove(trainer)

    # ------------------------------------------------------------------------------------------- workers' calls

    def receive(self, worker: Worker, held: bool = False) -> Any:
        def real() -> bool:
            if not held:
                return worker.real.receive(timeout=0)
            with worker.real.serving() as version:
                found = worker.real.receive(timeout=0)
                assert worker.real.version == version
                return found

        return self.same(real, lambda: worker.model.receive(held))

    def apply_by_hand(self, worker: Worker, content: Content) -> Any:
        return self.same(
            lambda: worker.real.apply_weights(weights(content)), lambda: worker.model.apply_by_hand(content)
        )

    def set_mood(self, worker: Worker, mood: str) -> None:
        worker.policy.mood = worker.model.mood = mood

    def close_worker(self, worker: Worker) -> None:
        self.same(lambda: _in_another_thread(worker.real.close), worker.model.close)

    def crash_worker(self, worker: Worker, how: str) -> None:
        """Kill a worker's process and start another with the same id, whose receiver is made as `how` says."""
        for link_pair in self.link_pairs:
            if link_pair.worker is worker:
                link_pair.network.crash(Side.SECOND)
                link_pair.model.crash(WORKER)
        made = WeightReceiver(LocalScheme(self.mode)) if how == "made" else _copied(worker.real, how)
        check_g8(worker.real, made)
        self.gone.append(worker)
        self.workers[worker.id] = self._worker(worker.id, made)

    # ------------------------------------------------------------------------------------------- the network

    def deliver(self, link_pair: LinkPair, parcel: Parcel) -> None:
        link_pair.model.deliver(link_pair.modelled(parcel))
        link_pair.network.deliver(parcel)
        if parcel.to is Side.SECOND and isinstance(parcel.received.message, messages.Hello):
            link_pair.greeted = True

    def deliver_all(self) -> None:
        for link_pair in self.link_pairs:
            while parcels := link_pair.deliverable():
                self.deliver(link_pair, parcels[0])

    def drop(self, link_pair: LinkPair, parcel: Parcel) -> None:
        link_pair.model.drop(link_pair.modelled(parcel))
        link_pair.network.drop(parcel)

    def duplicate(self, link_pair: LinkPair, parcel: Parcel) -> None:
        link_pair.model.duplicate(link_pair.modelled(parcel))
        link_pair.network.duplicate(parcel)

    def cut(self, link_pair: LinkPair) -> None:
        link_pair.network.cut()
        link_pair.model.cut()

    def clog(self, link_pair: LinkPair, clogged: bool) -> None:
        link_pair.ends[WORKER].clogged = link_pair.model.clogged = clogged

    # ------------------------------------------------------------------------------------------- comparing

    def compare(self) -> None:
        """Require that all visible state, and all messages in transit, are those of the models."""
        for trainer in self.trainers:
            assert _seen_sender(trainer.real) == _model_sender(trainer.model)
        for worker in self.workers.values():
            assert _seen_receiver(worker) == _model_receiver(worker.model)
            assert worker.model.code is None or worker.policy.codes == {worker.model.code}
        for link_pair in self.link_pairs:
            found = [(p.number, p.to, described(p.received.message)) for p in link_pair.network.in_flight]
            assert found == [(p.number, SIDES[p.to], p.message) for p in link_pair.model.flying]
        self.link_pairs = [link_pair for link_pair in self.link_pairs if not link_pair.over]


def _count(before: State, input: SenderInput | ReceiverInput, after: State) -> None:
    ROWS[before, input] += 1


def _copied(original: Any, how: str) -> Any:
    ways = {"pickle": lambda it: pickle.loads(pickle.dumps(it)), "copy": copy.copy, "deepcopy": copy.deepcopy}
    return ways[how](original)


def _in_another_thread(call: Callable[[], Any]) -> None:
    """Call a function in another thread, and raise here what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed over
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (WeightSyncError, RuntimeError, KeyboardInterrupt, Raised, Interrupt) as error:
        return error


def _told(found: Any) -> Any:
    """What a caller got, in a form that is equal for the real call and for the model."""
    match found:
        case Raised(kind=kind, report=report, fence=fence):
            return kind, _told(report), fence
        case Interrupt() | KeyboardInterrupt():
            return ("interrupted",)
        case BaseException():
            report, fence = getattr(found, "report", None), getattr(found, "fence", None)
            return type(found).__name__, _told(report), fence
        case SyncReport():
            outcomes = {worker: outcome.kind.name for worker, outcome in found.outcomes.items()}
            not_caught_up = {worker: outcome.kind.name for worker, outcome in found.not_caught_up.items()}
            previous = _told(found.previous)
            return found.version, outcomes, dict(found.superseded), not_caught_up, previous, set(found.left)
        case reference.Report():
            return *found[:4], _told(found.previous), set(found.left)
        case _:
            return found


def _seen_sender(real: WeightSender) -> dict[str, Any]:
    data = real._driver.data
    outstanding = data.outstanding
    return {
        "state": real.state.value,
        "version": real.version,
        "incarnation": real.incarnation,
        "for_all": data.due_all,
        "stale": real.stale_answers,
        "members": {
            worker: (entry.link_state.value, entry.served, entry.due, entry.catching, entry.fence)
            for worker, entry in real.workers.items()
        },
        "outstanding": outstanding and outstanding.version,
        "owed": set(outstanding.owed) if outstanding else set(),
        "outcomes": {w: o.kind.name for w, o in outstanding.outcomes.items()} if outstanding else {},
        "links": len(real._driver.links()),
    }


def _model_sender(model: reference.Sender) -> dict[str, Any]:
    return {
        "state": model.state,
        "version": model.version,
        "incarnation": model.incarnation,
        "for_all": model.for_all,
        "stale": model.stale,
        "members": {w: (s.link_state, s.acked, s.due, s.catching, s.fence) for w, s in model.setups.items()},
        "outstanding": model.outstanding,
        "owed": set(model.owed),
        "outcomes": model.outcomes,
        "links": len(model.open),
    }


def _seen_receiver(worker: Worker) -> dict[str, Any]:
    real, data = worker.real, worker.real._driver.data
    served = None if real.version is None else (real.incarnation, real.version)
    return {
        "state": real.state.value,
        "served": served,
        "fence": data.fence,
        "decided": data.decided,
        "pending": data.pending,
        "links": len(real._driver.links()),
    }


def _model_receiver(model: reference.Receiver) -> dict[str, Any]:
    return {
        "state": model.state,
        "served": model.served,
        "fence": model.fence,
        "decided": model.decided,
        "pending": model.pending,
        "links": len(model.open),
    }
