"""Explore one scenario: `frontrun python tests/protocol/schedules/exploring.py NAME [FAULT]` prints a verdict as JSON.

Threads call public methods of a sender at the same time. frontrun (DPOR) runs them under every schedule that differs in
the order of conflicting accesses, with at most two preemptions. After each schedule, the scenario decides whether the
calls ended in an allowed way. If a lock is missing, some schedule ends wrongly. FAULT removes the locks, to show this.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import frontrun

from weightsync.engine.driver import Driver
from weightsync.engine.packer import Packed
from weightsync.engine.sender import WeightSender
from weightsync.options import Verify
from weightsync.protocol._tables import Delivery, State
from weightsync.protocol.messages import Ack, Message, Update
from weightsync.protocol.report import SyncReport
from weightsync.transports.base import Received
from weightsync.transports.buffers import Buffer
from weightsync.weights.layout import Layout
from weightsync.weights.strategy import WeightStrategy
from weightsync.weights.target import Mode

#: How long an exploration may take, and how many schedules it may try.
SECONDS, SCHEDULES = 60.0, 400


class ScriptedLink:
    """A link to a worker, whose answers are put in `arrived` by the scenario."""

    delivery = Delivery.ORDERED
    peer = "a worker"

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.arrived: list[Received] = []
        self.closed = False

    def send(self, message: Message, payload: Buffer | None = None) -> None:
        if isinstance(message, Update):
            self.sent.append(message.version)

    def receive(self) -> list[Received]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def flush(self) -> bool:
        return True

    def waitables(self) -> list[int]:
        return []

    def wants_write(self) -> int | None:
        return None

    def watch(self, pid: int, started: int) -> None:
        return None

    def close(self) -> None:
        self.closed = True


class EmptyPacker:
    """A packer that packs nothing, since payloads do not matter to schedules."""

    sends_deltas = False

    def __init__(self) -> None:
        self.packed = Packed(Layout(()), Buffer(1), b"", b"", verify=Verify.LAYOUT)

    def layout_of(self, weights: Any) -> Layout:
        return self.packed.layout

    def reserve(self, readers: Any = None) -> None:
        return None

    def pack(self, *given: Any) -> Packed:
        return self.packed

    def release_packed(self, packed: Packed) -> None:
        return None

    def close(self) -> None:
        return None


class Scheme:
    """A scheme whose endpoints already are links, with such a packer."""

    apply_mode = Mode.COPY
    applied_selection = None
    strategy = WeightStrategy("tensordict")

    @property
    def packer(self) -> Any:
        return EmptyPacker()

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Any:
        return endpoint

    def weights_to_send(self, weights: Any, model_id: str, context: Any = None) -> Any:
        return weights

    def published(self, model_id: str, weights: Any) -> None:
        return None


class Stage:
    """A ready sender with one worker, and the result of each call."""

    def __init__(self) -> None:
        self.wire = ScriptedLink()
        self.sender = WeightSender(Scheme())  # type: ignore[arg-type]
        self.sender.add_worker(0, self.wire)
        self.sender.connect()
        self.outcome: dict[str, Any] = {}

    def answer(self) -> None:
        """Let the worker's ack of version 1 arrive."""
        self.wire.arrived = [Received(Ack(model_id="policy", incarnation=self.sender.incarnation, version=1))]

    @property
    def outcome_names(self) -> dict[str, str]:
        """The result of each call, in a word."""
        return {call: _name_of_outcome(outcome) for call, outcome in self.outcome.items()}


def _name_of_outcome(outcome: Any) -> str:
    if isinstance(outcome, SyncReport):
        return outcome[0].kind.name
    return "None" if outcome is None else type(outcome).__name__


def call(name: str, does: Callable[[WeightSender], Any]) -> Callable[[Stage], None]:
    """The function of a thread that makes one call and keeps its result."""

    def run(stage: Stage) -> None:
        try:
            stage.outcome[name] = does(stage.sender)
        except Exception as error:  # noqa: BLE001 - the scenario's ends say which errors are allowed
            stage.outcome[name] = error

    return run


def ready() -> Stage:
    return Stage()


def sent() -> Stage:
    stage = Stage()
    stage.sender.send_async("weights")
    return stage


def answered() -> Stage:
    stage = sent()
    stage.answer()
    return stage


SEND = "send_async", lambda sender: sender.send_async("weights")
WAIT = "wait_async", lambda sender: sender.wait_async(timeout=0)
ABANDON = "abandon", lambda sender: sender.abandon()
POLL = "poll", lambda sender: sender.poll()
CLOSE = "close", lambda sender: sender.close()


def again(named_call: tuple[str, Any]) -> tuple[str, Any]:
    """The same call once more, by another thread."""
    return f"{named_call[0]} again", named_call[1]


@dataclass(frozen=True)
class Scenario:
    """Calls that threads make at the same time, and every way in which they may end.

    Attributes:
        setup: makes the stage before the calls.
        calls: one for each thread.
        ends: all allowed ends: the result of each call, in the calls' order; the number of versions sent; the state.
    """

    setup: Callable[[], Stage]
    calls: tuple[tuple[str, Any], ...]
    ends: frozenset[tuple[tuple[str, ...], int, State]]

    def holds(self, stage: Stage) -> bool:
        """Whether the calls ended in an allowed way."""
        outcome_names = stage.outcome_names
        end = tuple(outcome_names.get(name, "-") for name, _ in self.calls), len(stage.wire.sent), stage.sender.state
        closed = stage.sender.state is State.CLOSED
        return end in self.ends and stage.wire.closed == closed and stage.sender.version == len(stage.wire.sent)


def ends(*each: tuple[tuple[str, ...], int, State]) -> frozenset[tuple[tuple[str, ...], int, State]]:
    return frozenset(each)


SCENARIOS = {
    "two sends": Scenario(
        ready,
        (SEND, again(SEND)),
        ends(
            (("PENDING", "StateError"), 1, State.PENDING_ASYNC),
            (("StateError", "PENDING"), 1, State.PENDING_ASYNC),
        ),
    ),
    "a send and a close": Scenario(
        ready,
        (SEND, CLOSE),
        ends((("PENDING", "None"), 1, State.CLOSED), (("ABANDONED", "None"), 1, State.CLOSED))
        | ends((("StateError", "None"), 0, State.CLOSED)),
    ),
    "two waits": Scenario(
        sent,
        (WAIT, again(WAIT)),
        ends(
            (("AckTimeoutError", "AckTimeoutError"), 1, State.PENDING_ASYNC),
            (("AckTimeoutError", "StateError"), 1, State.PENDING_ASYNC),
            (("StateError", "AckTimeoutError"), 1, State.PENDING_ASYNC),
        ),
    ),
    "a wait and a close": Scenario(
        sent,
        (WAIT, CLOSE),
        ends(
            (("AckTimeoutError", "None"), 1, State.CLOSED),
            (("SyncError", "None"), 1, State.CLOSED),
            (("StateError", "None"), 1, State.CLOSED),
        ),
    ),
    "two abandon": Scenario(
        sent,
        (ABANDON, again(ABANDON)),
        ends((("ABANDONED", "StateError"), 1, State.READY), (("StateError", "ABANDONED"), 1, State.READY)),
    ),
    "an answer is polled and abandoned": Scenario(
        answered,
        (POLL, ABANDON),
        ends((("APPLIED", "APPLIED"), 1, State.READY), (("None", "APPLIED"), 1, State.READY)),
    ),
    "an answer is waited for and abandoned": Scenario(
        answered,
        (WAIT, ABANDON),
        ends(
            (("APPLIED", "StateError"), 1, State.READY),
            (("StateError", "APPLIED"), 1, State.READY),
        ),
    ),
    "a send, a poll and a close": Scenario(
        ready,
        (SEND, POLL, CLOSE),
        frozenset(
            ((send, poll, "None"), int(send != "StateError"), State.CLOSED)
            for send in ("PENDING", "ABANDONED", "StateError")
            for poll in ("None", "PENDING", "ABANDONED", "StateError")
        ),
    ),
}


@contextlib.contextmanager
def without_locks() -> Iterator[None]:
    """The fault: steps are not atomic, since the locks of the driver and the machine do nothing."""
    made = Driver.__init__

    def init(self: Any, *given: Any) -> None:
        made(self, *given)
        self.lock = self.machine.lock = contextlib.nullcontext()

    Driver.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Driver.__init__ = made  # type: ignore[method-assign]


FAULTS = {"none": contextlib.nullcontext, "without locks": without_locks}


def explore(scenario: Scenario) -> Any:
    """Explore every schedule of a scenario.

    Garbage is collected only between schedules: a finalizer that ran in an explored thread, in the middle of frontrun's
    own bookkeeping, would wait there forever.
    """

    def setup() -> Stage:
        gc.collect()
        return scenario.setup()

    gc.freeze()  # what was imported
    gc.disable()
    return frontrun.explore(
        setup,
        [call(*each) for each in scenario.calls],
        scenario.holds,
        preemption_bound=2,
        max_executions=SCHEDULES,
        total_timeout=SECONDS,
        detect_io=False,
        reproduce_on_failure=0,
        trace_packages=["weightsync*"],
    )


def main() -> None:
    """Print the verdict of one scenario."""
    scenario, fault = SCENARIOS[sys.argv[1]], sys.argv[2] if len(sys.argv) > 2 else "none"
    with FAULTS[fault]():
        result = explore(scenario)
    print(json.dumps({"holds": result.property_holds, "schedules": result.num_explored, "why": result.explanation}))


if __name__ == "__main__":
    main()
