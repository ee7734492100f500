"""What a group says when a send fails or a call is refused, in the words of its own methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from weightsync.engine.refusal_hints import workers_text
from weightsync.engine.sender import WeightSender
from weightsync.errors import StateError
from weightsync.group.members import Member, Members, MemberState
from weightsync.protocol._tables import State
from weightsync.protocol.report import ADVICE as SENDERS_ADVICE
from weightsync.protocol.report import OutcomeKind, SyncReport

#: What the user of a group can do after a send that did not reach all workers.
ADVICE: Final[Mapping[OutcomeKind, str]] = {
    **SENDERS_ADVICE,
    OutcomeKind.TIMED_OUT: (
        "The update is still outstanding: wait_async() waits for it again, and the next send() or send_async() "
        "supersedes it."
    ),
    OutcomeKind.LOST: (
        "A worker that is LOST has failed. It is restarted as often as max_restarts= says; group.failures has the "
        "reason."
    ),
    OutcomeKind.REFUSED: (
        "Workers that refused serve what they served before, unless your method or loader raised halfway through. "
        "Correct what they refused, and send again."
    ),
}

#: Why a group is not pickled: a copy would have its workers, and close their descriptors.
NO_COPY: Final = (
    "a WorkerGroup can be neither pickled nor copied. If run= or make_model= is a method, its object may have the "
    "group as an attribute: give a function, or have the object's __getstate__() leave the group out."
)
#: What to know of a worker in such a state that gave no result in time.
_LATE: Final = {
    MemberState.STARTING: " A worker that starts imports the program and torch first: it may need a longer timeout=.",
    MemberState.HELD: (
        " One that waits for a newer version has not applied the newest one: wait_async() says why, unless send() did. "
        "It goes on with the next version that it applies."
    ),
}
_SENDS: Final = ("send", "send_async")
_ALLOWED: Final[Mapping[State, tuple[str, ...]]] = {
    State.UNINITIALIZED: ("start",),
    State.READY: (*_SENDS, "results", "stop", "close"),
    State.PENDING_ASYNC: ("wait_async", *_SENDS, "results", "stop", "close"),
}
_HINTS: Final = {
    State.UNINITIALIZED: "no worker runs yet. Enter the group by `with`, or call start(), first.",
    State.CLOSED: "the group has ended its workers, and starts no others. Make a new WorkerGroup.",
}


def refusal(state: State, method: str) -> StateError:
    """The error of a call that a group in this state refuses."""
    return StateError("worker group", state.value, method, _ALLOWED.get(state, ()), _HINTS.get(state, ""))


def senders_refusal(error: StateError, sender: WeightSender, method: str) -> StateError:
    """The error of a call that the group's sender refused."""
    state = State(error.state)
    hint = f"another thread waits for version {sender.version}. Use a group in one thread."
    if state is State.READY:
        hint = "no update is outstanding. send_async() dispatches one that wait_async() waits for."
    elif state is State.PENDING_ASYNC:
        owing = sender.owing
        awaits = f"still awaits {workers_text(owing)}" if owing else "has been answered, but not reported yet"
        hint = f"version {sender.version} {awaits}. Call wait_async(), or leave out on_pending=: then it is superseded."
    elif state is State.CLOSED:
        hint = _HINTS[state]
    return StateError("worker group", state.value, method, _ALLOWED.get(state, ()), hint, steps=error.steps)


def reword_report(report: SyncReport, members: Members, sender: WeightSender) -> SyncReport:
    """A report of the sender's that says of workers that start or were given up what the group knows of them."""
    previous = report.previous and reword_report(report.previous, members, sender)
    reworded = {}
    for worker, outcome in report.outcomes.items() if report.version else ():
        member = members.by_index[worker]
        if outcome.kind is OutcomeKind.TIMED_OUT and member.state is MemberState.STARTING:
            reworded[worker] = replace(outcome, reason=f"it {member.state_in_words}")
        elif outcome.kind is OutcomeKind.LOST and worker in members.given_up(sender.worker_ids):
            reworded[worker] = replace(outcome, reason=members.failure(worker).reason)
    if not reworded and previous is report.previous:
        return report
    return replace(report, outcomes={**report.outcomes, **reworded}, previous=previous)


def too_late(members: Mapping[int, Member]) -> str:
    """The message when no worker gave a result in time."""
    lives = ", ".join(f"{index} {member.state_in_words}" for index, member in members.items())
    states = {member.state for member in members.values()}
    advice = "".join(words for state, words in _LATE.items() if state in states)
    return f"no worker gave a result in time (worker {lives}). results() may be called again.{advice}"
