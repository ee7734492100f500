"""The sender's guards, rule by rule: which input an event becomes, and what the step returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from weightsync.errors import ConfigurationError, RefusedError, StateError, WorkerLostError
from weightsync.protocol import sender as pure
from weightsync.protocol._tables import RefusalKind, SenderInput, State
from weightsync.protocol.by_worker import put
from weightsync.protocol.messages import Ack, Bye, Hello, Refusal
from weightsync.protocol.report import OutcomeKind

INCARNATION = 7


@dataclass
class Sender:
    """The pure half of a sender, and its current state and data."""

    state: State = State.UNINITIALIZED
    data: pure.SenderData = field(default_factory=pure.SenderData)

    def take(self, event: pure.Event) -> pure.Step:
        step = pure.step(self.state, self.data, event)
        self.state, self.data = step.to, step.data
        return step

    def receives(self, worker: int, message: Hello | Ack | Refusal, link: int | None = None) -> pure.Step:
        return self.take(pure.Answer(worker, link or self.data.workers[worker].link, message))


def hello() -> Hello:
    return Hello(model_id="policy", incarnation=INCARNATION)


def ack(version: int, incarnation: int = INCARNATION) -> Ack:
    return Ack(model_id="policy", incarnation=incarnation, version=version)


def refusal(version: int, kind: RefusalKind = RefusalKind.REFUSED, fence: int = INCARNATION) -> Refusal:
    return Refusal(model_id="policy", incarnation=INCARNATION, version=version, kind=kind, reason="why", fence=fence)


@pytest.fixture
def sender() -> Sender:
    """A ready sender, with workers 0 and 1 up on links 1 and 2."""
    sender = Sender()
    for worker in (0, 1):
        sender.take(pure.Join(worker, worker + 1))
    sender.take(pure.Connect(INCARNATION))
    for worker in (0, 1):
        sender.receives(worker, hello())
    return sender


def test_connect_greets_every_worker() -> None:
    sender = Sender()
    sender.take(pure.Join(0, 1))

    step = sender.take(pure.Connect(INCARNATION))

    assert step.effects == (pure.Greet(0, 1, 0),)
    assert sender.data.workers[0].link_state is pure.LinkState.EXPECTED


def test_the_first_hello_of_a_worker_brings_its_link_up_and_the_second_is_stale(sender: Sender) -> None:
    sender.take(pure.Join(2, 3))

    assert sender.receives(2, hello()).input is SenderInput.ARRIVED
    assert sender.data.workers[2].link_state is pure.LinkState.UP
    assert sender.receives(2, hello()).input is SenderInput.STALE


def test_the_last_answer_ends_a_blocking_send(sender: Sender) -> None:
    sender.take(pure.Send(None))

    assert sender.receives(0, ack(1)).input is SenderInput.REPLY
    step = sender.receives(1, ack(1))

    assert step.input is SenderInput.SETTLED
    assert sender.state is State.READY
    (concluded,) = step.effects
    assert isinstance(concluded, pure.Conclude)
    assert [o.kind for o in concluded.outstanding.outcomes.values()] == [OutcomeKind.APPLIED] * 2


def test_an_async_send_stays_pending_until_the_caller_waits(sender: Sender) -> None:
    sender.take(pure.SendAsync(None))
    sender.receives(0, ack(1))
    sender.take(pure.LinkLost(1, 2, "died"))

    assert sender.state is State.PENDING_ASYNC
    assert sender.take(pure.Wait()).input is SenderInput.WAIT_SETTLED
    assert sender.state is State.READY


@pytest.mark.parametrize("unrelated", [ack(2), ack(1, incarnation=6), refusal(2)])
def test_g1_an_answer_for_another_version_or_incarnation_is_stale(sender: Sender, unrelated: Ack | Refusal) -> None:
    sender.take(pure.Send((0,)))

    assert sender.receives(0, unrelated).input is SenderInput.STALE
    assert sender.data.outstanding is not None
    assert sender.data.outstanding.owed == {0: 1}


def test_g1_a_second_answer_is_stale(sender: Sender) -> None:
    sender.take(pure.Send(None))
    sender.receives(0, ack(1))

    assert sender.receives(0, ack(1)).input is SenderInput.STALE
    assert sender.data.stale == 1


def test_g2_an_answer_over_a_replaced_link_does_not_count(sender: Sender) -> None:
    sender.take(pure.SendAsync((0, 1)))
    for event in pure.joining(sender.state, sender.data, 0, 9):
        sender.take(event)

    assert sender.receives(0, ack(1), link=1).input is SenderInput.STALE
    assert sender.receives(0, ack(1), link=9).input is SenderInput.CAUGHT_UP
    assert sender.data.outstanding is not None
    assert sender.data.outstanding.outcomes[0].kind is OutcomeKind.LOST


def test_versions_are_never_used_twice(sender: Sender) -> None:
    sender.take(pure.SendAsync(None))
    sender.take(pure.Abandon())
    sender.take(pure.Send((0,)))

    assert sender.data.version == 2
    assert sender.receives(0, ack(1)).input is SenderInput.STALE


def test_g5_a_second_send_is_refused(sender: Sender) -> None:
    sender.take(pure.SendAsync(None))
    before = sender.data

    for event in (pure.Send(None), pure.SendAsync(None)):
        with pytest.raises(StateError):
            sender.take(event)

    assert sender.data == before


def test_g7_only_targets_are_sent_to(sender: Sender) -> None:
    step = sender.take(pure.Send((1,)))

    assert step.effects == (pure.Dispatch(1, 2, 1),)
    assert sender.data.workers[0].due == 0


def test_a_lost_target_is_reported_at_once_and_owes_nothing(sender: Sender) -> None:
    sender.take(pure.LinkLost(0, 1, "died"))

    sender.take(pure.Send(None))

    assert sender.data.outstanding is not None
    assert sender.data.outstanding.owed == {1: 2}
    assert sender.data.outstanding.outcomes[0].reason == "died"


def test_a_send_raises_worker_lost_error_if_every_target_is_lost(sender: Sender) -> None:
    for worker in (0, 1):
        sender.take(pure.LinkLost(worker, worker + 1, "died"))

    with pytest.raises(WorkerLostError) as caught:
        sender.take(pure.Send(None))

    assert caught.value.lost == {0: "died", 1: "died"}
    assert (sender.state, sender.data.version) == (State.READY, 0)


def test_a_refused_handshake_is_a_refused_outcome_in_this_report_and_the_next(sender: Sender) -> None:
    sender.take(pure.Join(2, 3))
    sender.take(pure.Send((0, 2)))

    step = sender.receives(2, refusal(0))

    assert (step.input, sender.data.workers[2].link_state) == (SenderInput.LOST, pure.LinkState.REFUSED)
    assert sender.data.outstanding is not None
    outcome = sender.data.outstanding.outcomes[2]
    assert (outcome.kind, outcome.reason) == (OutcomeKind.REFUSED, "it refused the handshake: why")
    sender.receives(0, ack(1))
    sender.take(pure.Send((0, 2)))
    assert sender.data.outstanding.outcomes[2] == outcome


def test_a_send_raises_refused_error_if_every_target_refused_the_handshake(sender: Sender) -> None:
    for worker in (0, 1):
        sender.receives(worker, refusal(0))

    with pytest.raises(RefusedError) as caught:
        sender.take(pure.Send(None))

    assert set(caught.value.refused) == {0, 1}
    assert (sender.state, sender.data.version) == (State.READY, 0)


def test_a_worker_that_reports_its_failure_is_lost_with_its_reason_and_stays_a_member(sender: Sender) -> None:
    sender.take(pure.Send((0,)))

    step = sender.receives(0, replace(refusal(0, RefusalKind.FAILED), remote_traceback="line 1"))

    assert step.input is SenderInput.SETTLED
    concluded = step.effects[-1]
    assert isinstance(concluded, pure.Conclude)
    outcome = concluded.outstanding.outcomes[0]
    assert (outcome.kind, outcome.reason, outcome.remote_traceback) == (OutcomeKind.LOST, "it failed: why", "line 1")
    assert sender.data.workers[0].link_state is pure.LinkState.LOST
    assert concluded.left == {}


def test_a_goodbye_removes_the_worker_and_is_named_in_the_report(sender: Sender) -> None:
    sender.take(pure.Send((0,)))

    bye = Bye(model_id="policy", incarnation=INCARNATION, reason="done")
    step = sender.take(pure.Answer(0, 1, bye))

    assert step.input is SenderInput.SETTLED
    assert step.effects[:2] == (pure.CloseLink(0, 1), pure.Farewell(0, "done"))
    concluded = step.effects[-1]
    assert isinstance(concluded, pure.Conclude)
    assert (concluded.left, concluded.outstanding.outcomes[0].kind) == ({0: "done"}, OutcomeKind.LOST)
    assert list(sender.data.workers) == [1]


@pytest.mark.parametrize(("link", "incarnation"), [(1, INCARNATION + 1), (1, INCARNATION - 1), (9, INCARNATION)])
def test_a_goodbye_to_another_sender_or_over_another_link_changes_nothing(
    sender: Sender, link: int, incarnation: int
) -> None:
    before = sender.data

    step = sender.take(pure.Answer(0, link, Bye(model_id="policy", incarnation=incarnation)))

    assert (step.input, step.effects) == (SenderInput.STALE, ())
    assert sender.data == replace(before, stale=before.stale + 1)


def test_a_send_without_workers_names_the_workers_that_left(sender: Sender) -> None:
    for worker in (0, 1):
        bye = Bye(model_id="policy", incarnation=INCARNATION, reason=f"done {worker}")
        assert sender.take(pure.Answer(worker, worker + 1, bye)).input is SenderInput.LEFT

    with pytest.raises(ConfigurationError, match=r"no workers to send to.*Worker 0 left: done 0.*Worker 1 left"):
        sender.take(pure.Send(None))


@pytest.mark.parametrize("targets", [(), (5,), (0, 5)])
def test_a_send_with_no_targets_or_an_unknown_target_is_refused(sender: Sender, targets: tuple[int, ...]) -> None:
    before = sender.data

    with pytest.raises(ConfigurationError):
        sender.take(pure.Send(targets))

    assert sender.data == before


def test_the_loss_of_a_replaced_link_is_late(sender: Sender) -> None:
    for event in pure.joining(sender.state, sender.data, 0, 9):
        sender.take(event)

    assert sender.take(pure.LinkLost(0, 1, "eof")).input is None
    assert sender.data.late == 1
    assert sender.data.workers[0].link_state is pure.LinkState.EXPECTED


def test_the_deadline_of_a_finished_send_is_late(sender: Sender) -> None:
    sender.take(pure.Send((0,)))
    sender.receives(0, ack(1))

    assert sender.take(pure.Deadline(1)).input is None


def test_after_a_deadline_the_answer_still_counts(sender: Sender) -> None:
    sender.take(pure.Send((0,)))
    sender.take(pure.Deadline(1))

    assert sender.state is State.PENDING_ASYNC
    assert sender.receives(0, ack(1)).input is SenderInput.REPLY


@pytest.mark.parametrize("kind", [RefusalKind.FENCED, RefusalKind.REFUSED])
def test_a_refused_handshake_closes_the_link_and_keeps_the_workers_fence(sender: Sender, kind: RefusalKind) -> None:
    sender.take(pure.Join(2, 3))
    sender.take(pure.Send((0, 2)))

    step = sender.receives(2, refusal(0, kind, fence=9))

    assert step.input is SenderInput.LOST
    assert pure.CloseLink(2, 3) in step.effects
    assert sender.data.workers[2].fence == 9


def test_a_refusal_that_names_a_higher_fence_loses_the_link(sender: Sender) -> None:
    sender.take(pure.Send((0,)))

    step = sender.receives(0, refusal(1, RefusalKind.STALE, fence=INCARNATION + 1))

    assert step.input is SenderInput.SETTLED
    assert sender.data.workers[0].link_state is pure.LinkState.LOST


def test_g12_a_joiner_gets_the_latest_version_sent_to_all_and_owes_no_answer(sender: Sender) -> None:
    sender.take(pure.SendAsync(None))
    sender.take(pure.Abandon())
    sender.take(pure.SendAsync((0,)))

    step = sender.take(pure.Join(2, 3))

    assert step.effects == (pure.Greet(2, 3, 1),)
    assert sender.data.outstanding is not None
    assert 2 not in sender.data.outstanding.owed
    assert sender.receives(2, ack(1)).input is SenderInput.CAUGHT_UP
    assert sender.data.workers[2].served == 1


def test_g12_a_rejoining_worker_gets_the_newest_version_addressed_to_it(sender: Sender) -> None:
    sender.take(pure.SendAsync(None))
    sender.take(pure.Abandon())
    sender.take(pure.SendAsync((0,)))

    *_, joined = [sender.take(event) for event in pure.joining(sender.state, sender.data, 0, 9)]

    assert joined.effects == (pure.Greet(0, 9, 2),)


def test_a_joiner_that_refuses_is_reported_in_the_next_report(sender: Sender) -> None:
    sender.take(pure.SendAsync(None))
    sender.take(pure.Abandon())
    sender.take(pure.Join(2, 3))
    sender.receives(2, refusal(1))
    sender.take(pure.Send((0,)))

    (concluded,) = sender.receives(0, ack(2)).effects

    assert isinstance(concluded, pure.Conclude)
    assert concluded.not_caught_up[2].kind is OutcomeKind.REFUSED
    assert sender.data.not_caught_up == {}


def test_removing_the_last_worker_that_owes_an_answer_ends_the_send(sender: Sender) -> None:
    sender.take(pure.Send((0,)))

    lost, removed = (sender.take(event) for event in pure.removal(sender.state, sender.data, 0, "removed"))

    assert (lost.input, removed.input) == (SenderInput.SETTLED, SenderInput.REMOVE)
    assert 0 not in sender.data.workers
    with pytest.raises(ConfigurationError):
        pure.removal(sender.state, sender.data, 0, "again")


def test_close_abandons_the_outstanding_update_and_is_final(sender: Sender) -> None:
    sender.take(pure.Send(None))
    sender.receives(0, ack(1))

    step = sender.take(pure.Close())

    *closed, concluded = step.effects
    assert closed == [pure.CloseLink(0, 1), pure.CloseLink(1, 2)]
    assert isinstance(concluded, pure.Conclude)
    assert concluded.outstanding.outcomes[1].kind is OutcomeKind.ABANDONED
    assert sender.take(pure.Close()).to is State.CLOSED
    with pytest.raises(StateError):
        sender.take(pure.Send(None))
    assert sender.receives(0, ack(1)).input is None


def test_sends_and_answers_keep_unrelated_fields_of_workers_and_the_sender(sender: Sender) -> None:
    for worker, entry in tuple(sender.data.workers.items()):
        changed = replace(entry, reason="why", remote_traceback="where", fence=4)
        sender.data = replace(sender.data, workers=put(sender.data.workers, worker, changed))
    sender.data = replace(sender.data, left={9: "done"}, stale=3, late=5)

    def kept() -> tuple[object, ...]:
        entries = {(e.reason, e.remote_traceback, e.fence) for e in sender.data.workers.values()}
        return entries, sender.data.stale, sender.data.late

    expected = ({("why", "where", 4)}, 3, 5)
    sender.take(pure.Send(None))
    assert (kept(), sender.data.left) == (expected, {9: "done"})
    assert sender.receives(0, ack(1)).input is SenderInput.REPLY
    assert (kept(), sender.data.left) == (expected, {9: "done"})
    step = sender.receives(1, ack(1))
    assert [effect.left for effect in step.effects if isinstance(effect, pure.Conclude)] == [{9: "done"}]
    assert (kept(), sender.data.left) == (expected, {})


def test_a_goodbye_without_a_reason_is_reported_as_such(sender: Sender) -> None:
    bye = Bye(model_id="policy", incarnation=INCARNATION)

    step = sender.take(pure.Answer(0, 1, bye))

    assert step.effects[-1] == pure.Farewell(0, "it gave no reason")


def test_the_loss_of_a_link_that_is_already_lost_or_was_never_opened_has_no_effect(sender: Sender) -> None:
    sender.take(pure.LinkLost(0, 1, "gone"))
    unopened = Sender()
    unopened.take(pure.Join(0, 1))

    for each in (sender, unopened):
        step = each.take(pure.LinkLost(0, 1, "gone again"))
        assert (step.input, step.effects) == (None, ())
