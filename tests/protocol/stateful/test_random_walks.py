"""Random walks of real senders and receivers over a faulty network, compared at each step with the reference model.

Each step of a walk is a method of `Actions`, and so is each thing that happens while a caller waits. An action runs on
the real objects and on the reference model (`reference`); `world` has both. After each step, all visible state must be
that of the model, and the guarantees must hold for what was really sent, served and reported (`guarantees`).

The other tests of this folder: test_directed.py has walks written by hand in the same world, test_real_processes.py
walks with worker processes and real pipes, and test_delta_walks.py walks for deltas, which have a model of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import pytest
from guarantees import check_all
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from world import ROWS, LinkPair, Trainer, Worker, World

from weightsync.protocol._tables import RECEIVER_ROWS, SENDER_ROWS, Delivery, ReceiverInput, State
from weightsync.transports.base import Payloads
from weightsync.weights.target import Mode

T = TypeVar("T")

#: The share of the profile's examples that each delivery gets.
SHARES = {Delivery.ORDERED: 1.0, Delivery.REORDERED: 0.3, Delivery.AT_LEAST_ONCE: 0.4, Delivery.BEST_EFFORT: 0.3}

#: With this many examples, the random and the directed walks together take every row.
ENOUGH = 100
#: The time limit of a test in seconds: the profile "nightly" tries fifty times as many examples as "ci".
LIMIT = max(300, 3 * settings().max_examples)

NUMBERS = st.integers(0, 63)
COPY_METHODS = ("pickle", "copy", "deepcopy")
_walked: set[Delivery] = set()


def one(of: Sequence[T], number: int) -> T:
    return of[number % len(of)]


class Actions:
    """All actions of a walk. Each takes two numbers, which choose whom it acts on and how."""

    def __init__(self, world: World) -> None:
        self.world = world

    # ----------------------------------------------------------------------------------------- the network

    def deliver(self, a: int, b: int) -> None:
        for link_pair, parcel in self._parcels(a):
            self.world.deliver(link_pair, parcel)
            return

    def deliver_all(self, a: int, b: int) -> None:
        self.world.deliver_all()

    def round_trip(self, a: int, b: int) -> None:
        """Deliver all messages, let all workers but at most one receive, and deliver their answers."""
        self.world.deliver_all()
        for worker in list(self.world.workers.values()):
            if b % 4 != worker.id:
                self.world.receive(worker)
        self.world.deliver_all()

    def drop(self, a: int, b: int) -> None:
        if self.world.delivery.loses:
            for link_pair, parcel in self._parcels(a):
                self.world.drop(link_pair, parcel)
                return
        else:
            self.deliver(a, b)

    def duplicate(self, a: int, b: int) -> None:
        if self.world.delivery.duplicates:
            for link_pair, parcel in self._parcels(a):
                self.world.duplicate(link_pair, parcel)
                if b % 2:
                    self.world.deliver(link_pair, parcel)
                return
        else:
            self.deliver(a, b)

    def _parcels(self, number: int) -> Iterator[tuple[LinkPair, Any]]:
        found = [(link_pair, parcel) for link_pair in self.world.link_pairs for parcel in link_pair.deliverable()]
        if found:
            yield one(found, number)

    def cut(self, a: int, b: int) -> None:
        if self.world.link_pairs:
            self.world.cut(one(self.world.link_pairs, a))

    def clog(self, a: int, b: int) -> None:
        link_pairs = [link_pair for link_pair in self.world.link_pairs if link_pair.worker is not None]
        if link_pairs:
            self.world.clog(one(link_pairs, a), b % 2 == 0)

    # ----------------------------------------------------------------------------------------- workers

    def receive(self, a: int, b: int) -> None:
        self.world.receive(self._worker(a), held=b % 4 == 0)

    def listen(self, a: int, b: int) -> None:
        waiting = [link_pair for link_pair in self.world.link_pairs if link_pair.worker is None]
        if waiting:
            self.world.listen(one(waiting, a))

    def mood(self, a: int, b: int) -> None:
        self.world.set_mood(self._worker(a), ("fine", "refuses", "fine", "breaks")[b % 4])

    def by_hand(self, a: int, b: int) -> None:
        worker = self._worker(a)
        arrived = worker.model.arrived if worker.model.pending else None
        if arrived is None and self.world.mode is Mode.MAP:
            # In a worker process a mapping is private. Here a write would reach every worker that maps the same slot.
            self.receive(a, b)
            return
        mapped = self.world.mode is Mode.MAP
        content = arrived if arrived is not None and (b % 2 or mapped) else self.world.fresh(fits=b % 8 != 0)
        self.world.apply_by_hand(worker, content)

    def close_worker(self, a: int, b: int) -> None:
        if b % 4 == 0:
            self.world.close_worker(self._worker(a))
        else:
            self.receive(a, b)

    def half_answered(self, a: int, b: int) -> None:
        """Let a worker decide on an update while its answer cannot leave."""
        worker = self._worker(a)
        for link_pair in self.world.link_pairs:
            if link_pair.worker is worker:
                self.world.clog(link_pair, True)
        if b % 2:
            self.send_async(a - a % 4 + 1, 1)
        self.world.deliver_all()
        self.world.receive(worker)

    def crash_worker(self, a: int, b: int) -> None:
        worker = self._worker(a)
        if worker.model.state != "closed" and b % 4 == 3:
            self.receive(a, b)
            return
        self.world.crash_worker(worker, one((*COPY_METHODS, "made"), a + b))
        for trainer in self.world.trainers[-1:] if b % 4 else ():
            self.world.add(trainer, worker.id)

    def _worker(self, number: int) -> Worker:
        return self.world.workers[number % len(self.world.workers)]

    # ----------------------------------------------------------------------------------------- trainers

    def poll(self, a: int, b: int) -> None:
        self.world.poll(self._trainer(a))

    def abandon(self, a: int, b: int) -> None:
        self.world.abandon(self._trainer(a))

    def wait_with_timeout_0(self, a: int, b: int) -> None:
        self.world.wait(self._trainer(a), raises=b % 2 == 0)

    def send_async(self, a: int, b: int) -> None:
        pending = ("raise", "supersede", "wait", "supersede")[b % 4]
        self.world.send(self._trainer(a), self._targets(a, b), on_pending=pending, fits=b % 8 != 7)

    def send_with_timeout_0(self, a: int, b: int) -> None:
        self.world.send(self._trainer(a), self._targets(a, b), blocks=True, raises=b % 2 == 0)

    def add(self, a: int, b: int) -> None:
        self.world.add(self._trainer(a), b % len(self.world.workers), listen=b < 48)

    def remove(self, a: int, b: int) -> None:
        self.world.remove(self._trainer(a), b % (len(self.world.workers) + 1))

    def connect(self, a: int, b: int) -> None:
        trainer = self._trainer(a)
        fences = [setup.fence for other in self.world.trainers for setup in other.model.setups.values() if setup.fence]
        self.world.connect(trainer, one(fences, b) if fences and b % 2 else None)

    def close(self, a: int, b: int) -> None:
        self.world.close(self._trainer(a))
        if b % 4:
            self.copy_trainer(0, b)

    def crash_trainer(self, a: int, b: int) -> None:
        able = [trainer for trainer in self.world.trainers if trainer is not self.world.waiting]
        if able and len(self.world.trainers) > 1:
            over = [trainer for trainer in able if trainer.model.state == "closed"]
            self.world.crash_trainer(one(over or able, a))

    def copy_trainer(self, a: int, b: int) -> None:
        """Copy a sender. Usually the copy gets links of its own, connects and takes the workers over."""
        if len(self.world.trainers) == 3:
            self.crash_trainer(a, b)
        if len(self.world.trainers) < 3:
            self.world.copy_trainer(self._trainer(a), one(COPY_METHODS, b))
            copied = self.world.trainers[-1]
            for id in self.world.workers if b % 4 else ():
                self.world.add(copied, id)
            if b % 8 > 1:
                self.connect(1, b)

    def clock(self, a: int, b: int) -> None:
        """Set the clock forwards or back, since trainers on other machines have clocks of their own."""
        self.world.clock.ns = 1_000_000 + (a - 32) * 1000

    def _trainer(self, number: int) -> Trainer:
        # Usually the newest trainer: otherwise few walks would get far.
        return one(self.world.trainers, -1 if number % 4 else number // 4)

    def _targets(self, a: int, b: int) -> list[int] | None:
        return (None, None, None, None, [0], [1, 2], [0, 0, 1], [], [7])[(a + b) % 9]


def named(names: Sequence[str]) -> st.SearchStrategy[str]:
    return st.sampled_from(names)


NETWORK = ("deliver", "deliver", "deliver_all", "round_trip", "drop", "duplicate", "cut", "clog")
WORKERS = ("receive", "receive", "listen", "mood", "by_hand", "crash_worker", "close_worker", "half_answered")
TRAINERS = (
    "send_async",
    "send_async",
    "send_with_timeout_0",
    "wait_with_timeout_0",
    "poll",
    "abandon",
    "add",
    "remove",
)
RARELY = ("clock", "crash_worker", "connect", "close_worker", "copy_trainer", "crash_trainer", "close")
DURING_A_WAIT = ("deliver", "deliver_all", "round_trip", "receive", *NETWORK, *WORKERS, *TRAINERS, *RARELY)


class Walk(RuleBasedStateMachine):
    """A random walk. The kind of each step is drawn first, so that common kinds are common."""

    delivery: ClassVar[Delivery]

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(shared=st.booleans(), mapped=st.booleans(), workers=st.integers(0, 3), connected=st.integers(0, 7))
    def begin(self, shared: bool, mapped: bool, workers: int, connected: int) -> None:
        payloads = Payloads.SHARED if shared else Payloads.INLINE
        self.world = World(self.delivery, payloads, Mode.MAP if mapped else Mode.COPY, self.patch)
        self.actions = Actions(self.world)
        for id in range(workers):
            self.world.add(self.world.trainers[0], id)
        if connected and workers:
            self.world.connect(self.world.trainers[0])

    def _do(self, name: str, a: int, b: int) -> None:
        getattr(self.actions, name)(a, b)

    @rule(name=named(NETWORK), a=NUMBERS, b=NUMBERS)
    def network(self, name: str, a: int, b: int) -> None:
        self._do(name, a, b)

    @rule(a=NUMBERS, b=NUMBERS)
    def round_trip(self, a: int, b: int) -> None:
        self._do("round_trip", a, b)

    @rule(name=named(WORKERS), a=NUMBERS, b=NUMBERS)
    def worker(self, name: str, a: int, b: int) -> None:
        self._do(name, a, b)

    @rule(name=named(TRAINERS), a=NUMBERS, b=NUMBERS)
    def trainer(self, name: str, a: int, b: int) -> None:
        self._do(name, a, b)

    @rule(a=NUMBERS, b=NUMBERS)
    def send(self, a: int, b: int) -> None:
        self._do("send_async", a, b)

    @rule(name=named(RARELY), a=NUMBERS, b=NUMBERS, luck=st.integers(0, 3))
    def rarely(self, name: str, a: int, b: int, luck: int) -> None:
        self._do(name if luck == 0 else "round_trip", a, b)

    @rule(
        script=st.lists(st.tuples(named(DURING_A_WAIT), NUMBERS, NUMBERS), max_size=5),
        way_out=st.sampled_from(["deadline", "interrupt"]),
        timeout=st.sampled_from([None, 5.0]),
        a=NUMBERS,
        b=NUMBERS,
    )
    def blocked(self, script: list[tuple[str, int, int]], way_out: str, timeout: float | None, a: int, b: int) -> None:
        """A blocking send or wait, during which other actions happen."""
        self.world.during_the_wait([self._later(*each) for each in script], way_out)
        trainer, raises = self.actions._trainer(a), b % 2 == 0
        self.world.waiting = trainer
        if b % 3:
            pending = ("raise", "wait", "supersede")[b % 3]
            targets = self.actions._targets(a, b)
            self.world.send(trainer, targets, blocks=True, timeout=timeout, raises=raises, on_pending=pending)
        else:
            self.world.wait(trainer, timeout=timeout, raises=raises)
        self.world.waiting = None

    def _later(self, name: str, a: int, b: int) -> Callable[[], None]:
        return lambda: self._do(name, a, b)

    @invariant()
    def state_equals_the_reference_model(self) -> None:
        self.world.compare()
        check_all(self.world)

    def teardown(self) -> None:
        self.patch.undo()


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("delivery", list(Delivery), ids=lambda delivery: delivery.value)
def test_random_walks_agree_with_the_reference_model(delivery: Delivery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    walk = type(f"Walk{delivery.value}", (Walk,), {"delivery": delivery})
    examples = max(1, int(settings().max_examples * SHARES[delivery]))
    run_state_machine_as_test(
        walk,
        settings=settings(max_examples=examples, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)),
    )
    _walked.add(delivery)


#: Rows that no walk takes: workers here defer no acks, and no other weights are written into the model of a closed
#: receiver. The tests of the graphs take these rows, and so does test_side_by_side.py.
NOT_WALKED = {
    *((state, input) for state, input in RECEIVER_ROWS if input in (ReceiverInput.DEFERRED, ReceiverInput.SEND_ACK)),
    (State.CLOSED, ReceiverInput.INVALIDATED),
}


def test_the_walks_take_every_row(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    directed = any(item.path.name == "test_directed.py" for item in request.session.items)
    if not directed or _walked != set(Delivery) or settings().max_examples < ENOUGH:
        pytest.skip("needs a run of the whole folder with HYPOTHESIS_PROFILE=ci")
    rows = [*SENDER_ROWS, *RECEIVER_ROWS]
    least = sorted(rows, key=lambda row: ROWS[row])
    with capsys.disabled():
        lines = [f"{type(step).__name__} {state.value} {step.value} {ROWS[state, step]}" for state, step in least[:8]]
        print("\nleast taken rows: " + "; ".join(lines))
    assert [row for row in least if ROWS[row] == 0 and row not in NOT_WALKED] == []
    assert [row for row in NOT_WALKED if ROWS[row]] == [], "walks take these rows now: remove them from NOT_WALKED"
