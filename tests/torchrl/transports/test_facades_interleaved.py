"""Random interleavings of the facade's methods at both ends, in one thread, agree with a model of their effects."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from typing import Any

import torch
from fleet import PATIENCE
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightsync import MPTransport, OutcomeKind, StateError

MODELS = ("policy", "value")
#: The text of the worker's ack (None: no ack), and the outcome that the trainer gets.
KINDS = {None: OutcomeKind.TIMED_OUT, "updated": OutcomeKind.APPLIED, "no": OutcomeKind.REFUSED}


@dataclass
class Account:
    """The expected state of one model's versions, as the trainer and the worker must see them."""

    version: int = 0
    #: The version that the trainer may wait for, and whether its timeout was reported.
    outstanding: int | None = None
    reported: bool = False
    #: The newest unread version in the pipe, and the version received but not answered.
    unread: int | None = None
    handed: int | None = None
    #: The worker's ack of each version.
    answers: dict[int, str] = field(default_factory=dict)
    #: The newest version that the worker has answered or that was overtaken, as known to the worker and to the trainer.
    done: int = 0
    seen: int = 0
    #: Whether the version received but not answered may have been overtaken.
    unsure: bool = False

    @property
    def withheld(self) -> bool:
        """Whether the sender may still hold back the newest version: a link carries at most two unanswered versions."""
        return self.version - self.seen > 2


def weights(fill: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2,), float(fill))}


class OneThread(RuleBasedStateMachine):
    """Sends, receives, acks and waits in any order, with user messages in both directions in between."""

    def __init__(self) -> None:
        super().__init__()
        self.pipes = multiprocessing.Pipe()
        self.trainer, self.worker = MPTransport(self.pipes[0], timeout=PATIENCE), MPTransport(self.pipes[1])
        self.accounts = {model_id: Account() for model_id in MODELS}
        self.order: list[str] = []
        self.last: str | None = None
        self.down: list[int] = []
        self.up: list[int] = []
        self.messages = 0

    @initialize()
    def start(self) -> None:
        assert self.trainer.check_connection()

    # ---------------------------------------------------------------------------------------- the trainer

    def dispatched(self, model_id: str) -> None:
        account = self.accounts[model_id]
        account.version += 1
        account.seen = account.done
        account.outstanding, account.reported = account.version, False
        account.unread = account.version

    def _send_async(self, model_id: str) -> None:
        account = self.accounts[model_id]
        if account.outstanding is not None and not account.reported:
            try:
                self.trainer.send_weights_async(model_id, weights(99))
            except StateError:
                return
            raise AssertionError("a second send was taken while one was outstanding")
        if account.outstanding is None:
            self.order.append(model_id)
        report = self.trainer.send_weights_async(model_id, weights(account.version + 1))
        self.dispatched(model_id)
        assert (account.version, OutcomeKind.PENDING) == (report.version, report[0].kind)

    @rule()
    def send_async_policy(self) -> None:
        self._send_async("policy")

    @rule()
    def send_async_value(self) -> None:
        self._send_async("value")

    @rule()
    def wait_ack(self) -> None:
        if not self.order:
            try:
                self.trainer.wait_ack()
            except StateError:
                return
            raise AssertionError("there was nothing to wait for")
        model_id = self.order[0]
        account = self.accounts[model_id]
        said = account.answers.get(account.outstanding or 0)
        account.seen = account.done
        report = self.trainer.wait_ack(timeout=0.0 if said is None else PATIENCE, on_failure="report")
        assert (account.outstanding, model_id, KINDS[said]) == (report.version, report.model_id, report[0].kind)
        if said is None:
            account.reported = True
            return
        account.outstanding = None
        self.order.pop(0)

    # ----------------------------------------------------------------------------------------- the worker

    def _took(self, model_id: str, given: Any) -> None:
        account = self.accounts[model_id]
        assert account.unread is not None, "an update was handed out twice, or was never sent"
        (version,) = {int(entry) for entry in given["weight"].tolist()}
        assert version == account.unread or (account.withheld and account.done < version < account.unread)
        account.handed, account.unsure = version, False
        account.unread = None if version == account.unread else account.unread
        account.done = version - 1
        self.last = model_id

    @rule()
    def receive(self) -> None:
        found = self.worker.receive_weights(0.0)
        if found is None:
            assert all(account.unread is None or account.withheld for account in self.accounts.values())
        else:
            self._took(*found)
        self._overtaken()

    def _overtaken(self) -> None:
        """After any read of the pipe, a newer version overtakes the version that was received but not answered."""
        for account in self.accounts.values():
            if account.unread is not None and account.handed is not None:
                account.unsure = account.withheld
                account.handed = account.handed if account.withheld else None

    @rule()
    def read_the_pipe(self) -> None:
        if not self.worker.pipe.poll():
            assert not self.down
            assert all(account.unread is None or account.withheld for account in self.accounts.values())
            return
        data = self.worker.pipe.recv()
        if isinstance(data, int):
            assert data == self.down.pop(0)
        else:
            (model_id, given), message = data
            assert message == "update_weights"
            self._took(model_id, given)
        self._overtaken()

    def _answer(self, text: str) -> None:
        account = self.accounts[self.last] if self.last is not None else Account()
        try:
            self.worker.send_ack(text)
        except StateError:
            assert account.handed is None or account.unsure
            account.handed = None
            return
        assert account.handed is not None
        account.done = account.handed
        account.answers[account.handed] = text
        account.handed = None

    @rule()
    def ack(self) -> None:
        self._answer("updated")

    @rule()
    def ack_with_another_text(self) -> None:
        self._answer("no")

    # ------------------------------------------------------------------------------------ user messages

    @rule()
    def message_down(self) -> None:
        self.messages += 1
        self.trainer.pipe.send(self.messages)
        self.down.append(self.messages)

    @rule()
    def message_up(self) -> None:
        self.messages += 1
        self.worker.pipe.send(self.messages)
        self.up.append(self.messages)

    @precondition(lambda self: self.up)
    @rule()
    def read_above(self) -> None:
        assert self.up.pop(0) == self.trainer.pipe.recv()

    @invariant()
    def versions_never_run_ahead_of_what_was_dispatched(self) -> None:
        for account in self.accounts.values():
            assert all(version <= account.version for version in account.answers)

    def teardown(self) -> None:
        for end in (self.trainer, self.worker, *self.pipes):
            end.close()


TestOneThreadDrivesBothEnds = OneThread.TestCase
TestOneThreadDrivesBothEnds.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
