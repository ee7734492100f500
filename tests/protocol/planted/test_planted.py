"""For each guarantee, a planted fault in the code: its check passes with the shipped code and fails with the fault.

The checks are in `checks`. The descriptions of the faults are shown in docs/assurance.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import checks
import pytest
from msgspec.structs import replace

from weightsync.engine.applier import Applier
from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.sender import WeightSender
from weightsync.engine.sender_driver import SenderDriver
from weightsync.protocol import receiver as pure_receiver
from weightsync.protocol import sender
from weightsync.protocol import sender as pure_sender
from weightsync.protocol._tables import SENDER_ROWS, ReceiverInput, SenderInput, State
from weightsync.protocol.machine import SenderMachine
from weightsync.protocol.messages import Ack
from weightsync.protocol.report import Outcome, OutcomeKind
from weightsync.transports.buffers import Pins
from weightsync.weights.target import _Undo

# The machines are broken on purpose, so their traces need not conform.
pytestmark = pytest.mark.untraced("plants a fault in the machines, the drivers or the links")

Plant = Callable[[pytest.MonkeyPatch], None]


def any_ack_counts(patch: pytest.MonkeyPatch) -> None:
    """G1: an ack counts for whatever is outstanding."""
    shipped = sender._name_answer

    def name(state: State, data: Any, event: Any) -> SenderInput | None:
        if isinstance(event.message, Ack):
            event = replace(event, message=replace(event.message, version=data.version))
        return shipped(state, data, event)

    patch.setattr(sender, "_name_answer", name)


def ack_is_sent_before_the_swap(patch: pytest.MonkeyPatch) -> None:
    """G2: the ack leaves before the swap."""

    def apply(self: Applier, target: Any) -> bool:
        pending = self._driver.pending
        assert pending is not None
        self._driver.take(pure_receiver.Applied(self._ack(pending, pending.update.digest, 0.0)))
        with contextlib.suppress(RuntimeError):
            target.swap(target.stage(pending.layout, pending.payload, pending.update.extras))
        return True

    patch.setattr(Applier, "apply", apply)


def slots_are_not_pinned(patch: pytest.MonkeyPatch) -> None:
    """G3: a slot is written again though a worker maps it."""
    patch.setattr(Pins, "hold", lambda self, update, buffer: None)


def incarnations_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """G4: incarnations are ignored."""

    def name_hello(state: State, data: Any, event: Any) -> ReceiverInput:
        return ReceiverInput.CONNECT if state is State.UNINITIALIZED else ReceiverInput.TAKEOVER

    def name_update(state: State, data: Any, event: Any) -> ReceiverInput:
        newest = max(key[1] for key in (data.decided, data.pending, (0, 0)) if key)
        if event.version <= newest:
            return ReceiverInput.STALE
        return ReceiverInput.NEWER if state is State.PENDING_ASYNC else ReceiverInput.UPDATE

    patch.setattr(pure_receiver, "_name_hello", name_hello)
    patch.setattr(pure_receiver, "_name_update", name_update)


def a_second_send_is_allowed(patch: pytest.MonkeyPatch) -> None:
    """G5: a second send is allowed while an update is outstanding."""
    pair, to = (State.PENDING_ASYNC, SenderInput.SEND_ASYNC), State.PENDING_ASYNC
    rows = {**SENDER_ROWS, pair: to}
    patch.setattr(SenderMachine, "rows", rows)
    patch.setattr(pure_sender, "SENDER_ROWS", rows)
    patch.setitem(SenderMachine._events[SenderInput.SEND_ASYNC]._targets, pair[0], to)


def failed_swaps_are_not_undone(patch: pytest.MonkeyPatch) -> None:
    """G6: a swap that fails leaves what it had changed."""
    patch.setattr(_Undo, "all", lambda self, cause: None)


def every_worker_is_a_target(patch: pytest.MonkeyPatch) -> None:
    """G7: every update is sent to all workers, whatever its targets."""
    shipped = pure_sender.targets_of
    patch.setattr(pure_sender, "targets_of", lambda data, targets: shipped(data, None))


def pickled_senders_keep_data_and_state(patch: pytest.MonkeyPatch) -> None:
    """G8: a pickled sender takes its data and its state along."""
    save, load = WeightSender.__getstate__, WeightSender.__setstate__

    def getstate(self: WeightSender) -> Any:
        return save(self), self._driver.data

    def setstate(self: WeightSender, state: Any) -> None:
        load(self, state[0])
        self._driver.data = state[1]
        for step in (SenderInput.CONNECT, SenderInput.SEND_ASYNC):
            self._driver.machine.fire(step)

    patch.setattr(WeightSender, "__getstate__", getstate)
    patch.setattr(WeightSender, "__setstate__", setstate)


def closed_receivers_still_apply(patch: pytest.MonkeyPatch) -> None:
    """G9: an update that had arrived is applied after the close."""
    shipped = ReceiverDriver.close

    def close(self: ReceiverDriver) -> None:
        pending = self.pending
        shipped(self)
        self.pending = pending

    def receive_and_apply_to(self: Applier, target: Any) -> bool | None:
        self._driver.pump()
        return None if self._driver.pending is None else self.apply(target)

    patch.setattr(ReceiverDriver, "close", close)
    patch.setattr(Applier, "_receive_and_apply_to", receive_and_apply_to)


def losses_of_links_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """G10: the loss of a link is ignored."""
    shipped = SenderDriver._read

    def heard(self: SenderDriver, number: int, lane: Any, take: Any) -> None:
        shipped(self, number, lane, lambda each: isinstance(each, pure_sender.LinkLost) or take(each))

    patch.setattr(SenderDriver, "_read", heard)


def refusals_count_as_success(patch: pytest.MonkeyPatch) -> None:
    """G11: of the failures in a report, only losses count."""
    patch.setattr(Outcome, "fine", property(lambda self: self.kind is not OutcomeKind.LOST))


def joiners_get_no_update(patch: pytest.MonkeyPatch) -> None:
    """G12: no update follows a joiner's Hello."""
    shipped = pure_sender._join

    def join(data: Any, worker: int, link: int) -> Any:
        after, effects = shipped(data, worker, link)
        return after, tuple(replace(each, due=0) if isinstance(each, pure_sender.Greet) else each for each in effects)

    patch.setattr(pure_sender, "_join", join)


PLANTS: dict[str, tuple[Callable[[], None], Plant]] = {
    "G1": (checks.check_g1, any_ack_counts),
    "G2": (checks.check_g2, ack_is_sent_before_the_swap),
    "G3": (checks.check_g3, slots_are_not_pinned),
    "G4": (checks.check_g4, incarnations_are_ignored),
    "G5": (checks.check_g5, a_second_send_is_allowed),
    "G6": (checks.check_g6, failed_swaps_are_not_undone),
    "G7": (checks.check_g7, every_worker_is_a_target),
    "G8": (checks.check_g8, pickled_senders_keep_data_and_state),
    "G9": (checks.check_g9, closed_receivers_still_apply),
    "G10": (checks.check_g10, losses_of_links_are_ignored),
    "G11": (checks.check_g11, refusals_count_as_success),
    "G12": (checks.check_g12, joiners_get_no_update),
}


@pytest.mark.parametrize("guarantee", PLANTS)
def test_the_shipped_code_passes_the_check_of_each_guarantee(guarantee: str) -> None:
    check, _ = PLANTS[guarantee]
    check()


@pytest.mark.parametrize("guarantee", PLANTS)
def test_a_planted_fault_fails_the_check_of_its_guarantee(guarantee: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, plant = PLANTS[guarantee]
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        check()
