"""Drivers that record every step and message. They are made only while a recording is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from weightsync.engine.receiver_driver import ReceiverDriver
from weightsync.engine.recorder import LineKind, MachineTrace, Recorder, recorder
from weightsync.engine.sender_driver import SenderDriver, TakeEvent
from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import ReceiverInput, SenderInput, State
from weightsync.protocol.machine import Role, Step
from weightsync.protocol.messages import Message
from weightsync.protocol.report import SyncReport
from weightsync.transports.base import Link, Received
from weightsync.transports.buffers import Buffer
from weightsync.transports.wakeup import AwaitedProcess

AnyStep = TypeVar("AnyStep", bound=Step[Any, Any, Any])


def sender_driver(model_id: str) -> SenderDriver:
    """A driver for a new sender, recorded if a recording is on."""
    records = recorder()
    return SenderDriver(model_id) if records is None else RecordedSenderDriver(model_id, records)


def receiver_driver(model_id: str) -> ReceiverDriver:
    """A driver for a new receiver, recorded if a recording is on."""
    records = recorder()
    return ReceiverDriver(model_id) if records is None else RecordedReceiverDriver(model_id, records)


class RecordedSenderDriver(SenderDriver):
    """A sender's driver that is recorded."""

    def __init__(self, model_id: str, records: Recorder) -> None:
        super().__init__(model_id)
        self._machine_trace: MachineTrace = records.born(Role.SENDER, model_id)
        #: The report written last, until the next step: a caller that polls gets the same one again and again.
        self._last_report: SyncReport | None = None

    def tell(self, line_kind: LineKind, **facts: object) -> None:
        """Record what happened."""
        self._machine_trace.tell(line_kind, self.model_id, **facts)

    def reported(self, report: SyncReport) -> None:
        """Record a report that was returned to a caller, or raised."""
        with self.lock:
            costs: dict[str, Any] = {"nbytes": 0, "payload_nbytes": {}, "previous": None}
            spoken = replace(report, pack_s=0.0, connect_s=0.0, transfer_s=0.0, apply_s=0.0, **costs)
            if spoken == self._last_report:
                return
            self._last_report = spoken
            fields = {"version": report.version, "incarnation": report.incarnation, "outcomes": report.outcomes}
            beside = {"not_caught_up": report.not_caught_up, "left": report.left}
            self.tell(LineKind.REPORTED, **fields, superseded=report.superseded, **beside)

    def _step(self, event: sending.Event) -> Step[SenderInput, sending.SenderData, sending.Effect]:
        self._last_report = None
        return _take_and_record(self, event, super()._step)

    def join(self, worker: int, link: Link, process: AwaitedProcess | None = None) -> None:
        """Add a worker with a link, or give it a new one. Its process is watched from the start."""
        with self.lock:
            delivery = link.delivery.name
            self.tell(LineKind.LINK, link=self._last_link + 1, worker=worker, delivery=delivery, peer=link.peer)
            super().join(worker, link, process)

    def _write(self, worker: int, link: int, message: Message, payload: Buffer | None = None) -> None:
        if link in self._links:
            # Recorded before it is sent: where both ends share a process, it may be received within the call.
            self.tell(LineKind.SENT, link=link, message=message)
        super()._write(worker, link, message, payload)

    def _handle(self, worker: int, number: int, link: Link, message: Message, take: TakeEvent) -> None:
        self.tell(LineKind.RECEIVED, link=number, message=message)
        super()._handle(worker, number, link, message, take)

    def _read_then_lose(self, worker: int, number: int, reason: str, take: TakeEvent) -> None:
        self.tell(LineKind.FAILED, link=number, reason=reason)
        super()._read_then_lose(worker, number, reason, take)

    def _close_link(self, link: int) -> None:
        if link in self._links:
            self.tell(LineKind.CLOSED, link=link, incarnation=self.data.incarnation)
        super()._close_link(link)


class RecordedReceiverDriver(ReceiverDriver):
    """A receiver's driver that is recorded."""

    def __init__(self, model_id: str, records: Recorder) -> None:
        super().__init__(model_id)
        self._machine_trace: MachineTrace = records.born(Role.RECEIVER, model_id)

    def tell(self, line_kind: LineKind, **facts: object) -> None:
        """Record what happened."""
        self._machine_trace.tell(line_kind, self.model_id, **facts)

    def _step(self, event: receiving.Event) -> Step[ReceiverInput, receiving.ReceiverData, receiving.Effect]:
        return _take_and_record(self, event, super()._step)

    def add_link(self, link: Link) -> None:
        """Listen on one more link; the handshake decides which link is current."""
        with self.lock:
            if self.machine.state is not State.CLOSED:
                delivery = link.delivery.name
                self.tell(LineKind.LINK, link=self._last_link + 1, delivery=delivery, peer=link.peer)
            super().add_link(link)

    def _write(self, link: int, message: Message) -> None:
        if link in self._links:
            self.tell(LineKind.SENT, link=link, message=message)
        super()._write(link, message)

    def _handle(self, number: int, link: Link, received: Received) -> None:
        self.tell(LineKind.RECEIVED, link=number, message=received.message)
        super()._handle(number, link, received)

    def _send_last(self, link: int, message: Message) -> None:
        if link in self._links:
            self.tell(LineKind.SENT, link=link, message=message)
        super()._send_last(link, message)

    def _take_link_down(self, link: int, reason: str) -> None:
        self.tell(LineKind.FAILED, link=link, reason=reason)
        super()._take_link_down(link, reason)

    def _close_link(self, link: int) -> None:
        if link in self._links:
            self.tell(LineKind.CLOSED, link=link)
        super()._close_link(link)


def _take_and_record(
    driver: RecordedSenderDriver | RecordedReceiverDriver, event: Any, take: Callable[[Any], AnyStep]
) -> AnyStep:
    """Take an event, and record the step, or that it was refused."""
    before = driver.machine.state
    try:
        step = take(event)
    except Exception as error:
        facts: dict[str, object] = {"before": before, "after": driver.machine.state, "data": driver.data}
        driver.tell(LineKind.REFUSED, event=event, error=type(error).__name__, **facts)
        raise
    facts = {"input": step.input, "before": before, "after": driver.machine.state, "data": driver.data}
    driver.tell(LineKind.STEP, event=event, **facts, effects=step.effects)
    return step
