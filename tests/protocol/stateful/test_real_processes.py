"""Random walks of a real sender and real worker processes, compared with the reference model at each step.

Pipes, shared memory and processes are real, and workers are killed by SIGKILL, also in the middle of a swap. The walks
are still deterministic: a message that is sent is in the pipe at once, and a worker reads only when the test tells it
to.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import reference
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from reference import WORKER, Content
from remote import PATIENCE, Remote
from world import Clock, _copied, _model_receiver, _model_sender, _outcome, _seen_sender, _told, weights

from weightsync import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from weightsync.engine.sender import WeightSender
from weightsync.errors import WeightSyncError
from weightsync.protocol.report import OutcomeKind, SyncReport

WORKERS = 2
NUMBERS = st.integers(0, 15)


class WorkerProcesses:
    """Worker processes that are started before an example needs them. One that was killed is replaced."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.all = [Remote(context) for _ in range(WORKERS)]

    def replace(self, id: int) -> None:
        self.all[id] = Remote(self.context)

    def end(self) -> None:
        for remote in self.all:
            remote.kill()


class Link(reference.Wire):
    """A wire on which each message arrives at once."""

    def __init__(self, sender: reference.Sender, id: int) -> None:
        super().__init__(loses=False)
        self.sender, self.id = sender, id
        self.listening = False

    def settle(self) -> None:
        while self.flying:
            self.deliver(self.flying[0])


class Fleet:
    """Senders, of which only the newest is used, their workers, and the models of all."""

    def __init__(self, scheme: Any, staff: WorkerProcesses, patch: pytest.MonkeyPatch) -> None:
        self.scheme, self.staff = scheme, staff
        self.clock = Clock()
        patch.setattr("weightsync.clock.secrets", self.clock)
        patch.setattr("weightsync.clock.time.time_ns", self.clock.time_ns)
        self.codes = 0
        self.links: list[Link] = []
        self.ends: list[Any] = []
        self.senders: list[tuple[WeightSender, reference.Sender]] = []
        self.workers: dict[int, reference.Receiver] = {}
        self.digests: dict[reference.Key, bytes] = {}
        self.add_sender(WeightSender(scheme()))
        for id in range(WORKERS):
            self.begin(id)

    @property
    def real(self) -> WeightSender:
        return self.senders[-1][0]

    @property
    def model(self) -> reference.Sender:
        return self.senders[-1][1]

    def add_sender(self, real: WeightSender) -> None:
        self.senders.append((real, reference.Sender(self.clock.monotonic)))

    def begin(self, id: int) -> None:
        """Begin a new life of a worker: a receiver without links."""
        self.staff.all[id].do("begin", self.scheme())
        if id in self.workers:
            self.workers[id].close()
            self.settle()
        self.workers[id] = reference.Receiver()

    def same(self, real: Any, model: Any) -> Any:
        found, expected = _outcome(real), _outcome(model)
        assert _told(found) == _told(expected), f"{found!r}, where the model has {expected!r}"
        self.settle()
        return found

    def settle(self) -> None:
        for link in self.links:
            link.settle()

    # ------------------------------------------------------------------------------------------ trainer's calls

    def add(self, id: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        link = Link(self.model, id)
        found = self.same(lambda: self.real.add_worker(id, ours), lambda: self.model.add(id, link))
        if isinstance(found, WeightSyncError):
            ours.close()
            theirs.close()
            return
        self.ends.append(ours)
        self.links.append(link)
        self.settle()
        if self.workers[id].state == "closed":
            self.begin(id)
        self.staff.all[id].listen(theirs)
        theirs.close()
        self.workers[id].register(link)

    def connect(self) -> None:
        self.clock.ns += 1
        incarnation = self.clock.next_incarnation()
        self.same(self.real.connect, lambda: self.model.connect(incarnation))

    def content(self, fits: bool = True) -> Content:
        self.codes += 1
        return Content(fits, self.codes)

    def asked(self, content: Content, targets: list[int] | None, on_pending: str) -> dict[str, Any]:
        incarnation = self.clock.next_incarnation()
        return {
            "targets": targets,
            "content": content,
            "timeout": 0.0,
            "raises": True,
            "on_pending": on_pending,
            "incarnation": lambda: incarnation,
        }

    def send_async(self, targets: list[int] | None, on_pending: str, fits: bool) -> None:
        content = self.content(fits)
        asked = self.asked(content, targets, on_pending)
        self.same(
            lambda: self.real.send_async(weights(content), targets, on_pending=on_pending, timeout=0),
            lambda: _run(self.model.send_async(**asked)),
        )
        self.digests[self.real.incarnation, self.real.version] = self.real.digest()

    def sync(self, dying: int | None) -> None:
        """A blocking send during which every worker receives. Worker `dying` is killed in the middle of its swap."""
        for id, worker in self.workers.items():
            for _ in range(4):
                if worker.state != "closed" and worker.open:
                    self.receive(id)
        self.poll()
        receiving = [
            id
            for id, worker in self.workers.items()
            if id in self.model.setups and worker.wire is self.model.setups[id].wire and worker.wire in worker.open
        ]
        if self.model.state != "ready" or set(receiving) != set(self.model.setups) or not receiving:
            return
        content = self.content()
        asked = {**self.asked(content, None, "raise"), "timeout": None}
        for id in receiving:
            if id == dying:
                self.staff.all[id].do("mood", "dies")
            self.staff.all[id].tell("receive", PATIENCE)
        found = _outcome(lambda: self.real.send(weights(content), timeout=PATIENCE, on_failure="report"))
        call = self.model.send(**{**asked, "raises": False})
        next(call)
        self.settle()
        for id in receiving:
            if id == dying:
                self._died(id)
            else:
                self.same(self.staff.all[id].answer, lambda id=id: self.workers[id].receive())
        expected = _run(call)
        assert _told(found) == _told(expected)
        assert isinstance(found, SyncReport)
        assert dying not in receiving or found[dying].kind is OutcomeKind.LOST
        self.digests[self.real.incarnation, self.real.version] = self.real.digest()

    def poll(self) -> None:
        self.same(self.real.poll, self.model.poll)

    def wait(self) -> None:
        self.same(lambda: self.real.wait_async(timeout=0), lambda: _run(self.model.wait(timeout=0.0, raises=True)))

    def abandon(self) -> None:
        self.same(self.real.abandon, self.model.abandon)

    def remove(self, id: int) -> None:
        self.same(lambda: self.real.remove_worker(id), lambda: self.model.remove(id))

    def close(self) -> None:
        self.same(self.real.close, self.model.close)

    def take_over(self, how: str) -> None:
        """Let a copy of the sender take the workers over, with links of its own."""
        self.add_sender(_copied(self.real, how))
        for id in self.workers:
            self.add(id)
        self.connect()

    # ------------------------------------------------------------------------------------------ workers' calls

    def receive(self, id: int) -> None:
        worker = self.workers[id]
        self.same(lambda: self.staff.all[id].do("receive", 0), worker.receive)

    def mood(self, id: int, mood: str) -> None:
        self.staff.all[id].do("mood", mood)
        self.workers[id].mood = mood

    def leave(self, id: int) -> None:
        self.same(lambda: self.staff.all[id].do("close"), self.workers[id].close)

    def kill(self, id: int) -> None:
        self.staff.all[id].kill()
        self._replace(id)

    def _died(self, id: int) -> None:
        self.staff.all[id].died()
        self._replace(id)

    def _replace(self, id: int) -> None:
        for link in self.workers[id].open:
            link.crash(WORKER)
        self.staff.replace(id)
        del self.workers[id]
        self.begin(id)

    # ---------------------------------------------------------------------------------------------- comparing

    def compare(self) -> None:
        for real, model in self.senders:
            assert _seen_sender(real) == _model_sender(model)
        for id, worker in self.workers.items():
            seen, codes, digest = self.staff.all[id].do("show")
            assert seen == _model_receiver(worker)
            assert codes == {worker.code}
            if self.digests.get(worker.served):
                assert digest == self.digests[worker.served]

    def end(self) -> None:
        for real, _ in self.senders:
            real.close()
        for end in self.ends:
            end.close()


def _run(call: Iterator[Any]) -> Any:
    """Run a call of the model that need not wait, and return its result."""
    try:
        next(call)
    except StopIteration as stop:
        return stop.value
    pytest.fail("the model waits")


class Walk(RuleBasedStateMachine):
    """A random walk over one scheme."""

    scheme: ClassVar[Any]
    staff: ClassVar[WorkerProcesses]

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(workers=st.integers(1, WORKERS))
    def begin(self, workers: int) -> None:
        self.fleet = Fleet(self.scheme, self.staff, self.patch)
        for id in range(workers):
            self.fleet.add(id)
        self.fleet.connect()

    @rule(a=NUMBERS, b=NUMBERS)
    def send_async(self, a: int, b: int) -> None:
        targets = (None, None, None, [0], [1], [0, 1])[a % 6]
        self.fleet.send_async(targets, ("raise", "supersede")[b % 2], fits=b % 8 != 7)

    @rule(dying=st.sampled_from([None, None, 0, 1]))
    def sync(self, dying: int | None) -> None:
        self.fleet.sync(dying)

    @rule(a=NUMBERS)
    def receive(self, a: int) -> None:
        self.fleet.receive(a % WORKERS)

    @rule()
    def everybody_receives(self) -> None:
        for id in range(WORKERS):
            self.fleet.receive(id)

    @rule(name=st.sampled_from(["wait", "wait", "poll", "abandon"]))
    def see(self, name: str) -> None:
        getattr(self.fleet, name)()

    @rule(a=NUMBERS)
    def add(self, a: int) -> None:
        self.fleet.add(a % WORKERS)

    @rule(a=NUMBERS)
    def lose(self, a: int) -> None:
        id = a % WORKERS
        (self.fleet.kill, self.fleet.kill, self.fleet.leave, self.fleet.remove)[a // WORKERS % 4](id)
        if a > 7:
            self.fleet.add(id)

    @rule(a=NUMBERS, refuses=st.booleans())
    def mood(self, a: int, refuses: bool) -> None:
        self.fleet.mood(a % WORKERS, "refuses" if refuses else "fine")

    @rule(how=st.sampled_from(["pickle", "copy", "deepcopy"]), close=st.booleans())
    def take_over(self, how: str, close: bool) -> None:
        if len(self.fleet.senders) < 4:
            if close:
                self.fleet.close()
            self.fleet.take_over(how)

    @invariant()
    def state_equals_the_reference_model(self) -> None:
        self.fleet.compare()

    def teardown(self) -> None:
        self.patch.undo()
        if hasattr(self, "fleet"):
            self.fleet.end()


@pytest.fixture
def staff(forkserver: Any) -> Iterator[WorkerProcesses]:
    staff = WorkerProcesses(forkserver)
    yield staff
    staff.end()


@pytest.mark.timeout(max(300, 3 * settings().max_examples))
@pytest.mark.parametrize("scheme", [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme])
def test_random_walks_of_worker_processes_agree_with_the_reference_model(
    scheme: Any, staff: WorkerProcesses, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "weightsync")
    walk = type("Walk", (Walk,), {"scheme": scheme, "staff": staff})
    # 10 examples with the profile "ci".
    examples = max(1, settings().max_examples // 10)
    run_state_machine_as_test(
        walk,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
