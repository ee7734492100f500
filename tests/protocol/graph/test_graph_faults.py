"""A fault in a pure half or in a row changes the graph, and the first edge that differs shows the fault."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from configurations import CONFIGURATIONS
from graph_support import explored
from msgspec.structs import replace
from search import difference, search

from weightsync.protocol import receiver as receiving
from weightsync.protocol import sender as sending
from weightsync.protocol._tables import ReceiverInput, SenderInput, State


def _guard_fault(half, change):
    """Plant a fault in the guards: `change(state, data, event, named)` returns another input."""

    def plant(monkeypatch):
        before = half.name
        monkeypatch.setattr(half, "name", lambda *args: change(*args, before(*args)))

    return plant


def _advance_fault(change):
    """Plant a fault in what a receiver remembers after an event."""

    def plant(monkeypatch):
        before = receiving._advance

        def faulty(named, data, event):
            after, effects = before(named, data, event)
            return change(event, data, after), effects

        monkeypatch.setattr(receiving, "_advance", faulty)

    return plant


def _row_fault(half, name, place, to):
    """Plant a row that is not there; with None as `to`, remove one that is."""

    def plant(monkeypatch):
        rows = dict(getattr(half, name))
        if to is None:
            del rows[place]
        else:
            assert place not in rows
            rows[place] = to
        monkeypatch.setattr(half, name, MappingProxyType(rows))

    return plant


def _anything_is_current(monkeypatch):
    for name in ("_name_answer", "_name_loss"):
        monkeypatch.setattr(sending, name, _over_the_newest_link(getattr(sending, name)))


def _over_the_newest_link(before):
    def over_any(state, data, event):
        entry = data.workers.get(event.worker)
        return before(state, data, event if entry is None else replace(event, link=entry.link))

    return over_any


def _a_joiner_gets_nothing(monkeypatch):
    before = sending._join

    def lazy(data, worker, link):
        after, effects = before(data, worker, link)
        return after, tuple(sending.Greet(e.worker, e.link, 0) for e in effects if isinstance(e, sending.Greet))

    monkeypatch.setattr(sending, "_join", lazy)


def _other_input(old, new, kind=object):
    """Replace the input `old` by `new`, for events of one kind."""
    return lambda state, data, event, named: new if named is old and isinstance(event, kind) else named


def _refusal_forgotten(event, data, after):
    return replace(after, decided=data.decided) if isinstance(event, receiving.Refused) else after


def _fence_falls(event, data, after):
    return replace(after, fence=0) if isinstance(event, receiving.LinkDown) else after


_S, _R = SenderInput, ReceiverInput
CODE, MODEL = "only the code has", "only the model has"
FAULTS = {
    # An event that must be refused is taken: the code has an edge too many.
    "an abandon in ready is named JOIN": (
        _guard_fault(sending, lambda s, d, e, n: _S.JOIN if n is _S.ABANDON and s is State.READY else n),
        "two versions",
        f"{CODE} ('Abandon', 1)",
    ),
    "an answered in ready is named STALE": (
        _guard_fault(
            receiving, lambda s, d, e, n: _R.STALE if n is _R.ANSWERED and s is State.READY and d.answer else n
        ),
        "two versions",
        f"{CODE} ('Answered', 1)",
    ),
    "a row more: a wait in ready": (
        _row_fault(sending, "SENDER_ROWS", (State.READY, _S.WAIT), State.READY),
        "two versions",
        f"{CODE} ('Wait', 1)",
    ),
    "a row more: applied in ready": (
        _row_fault(receiving, "RECEIVER_ROWS", (State.READY, _R.APPLIED), State.READY),
        "two versions",
        f"{CODE} ('Applied', 1)",
    ),
    # An event that must be taken is refused: the code lacks an edge of the model.
    "a stale answer is named SEND": (
        _guard_fault(sending, lambda s, d, e, n: _S.SEND if n is _S.STALE and s is State.PENDING_ASYNC else n),
        "lingering",
        MODEL,
    ),
    "a second Hello is named CONNECT": (
        _guard_fault(receiving, _other_input(_R.DUPLICATE, _R.CONNECT, receiving.HelloArrived)),
        "duplicated",
        f"{MODEL} ('HelloArrived', 1, 1, 1)",
    ),
    "a row less: a loss in ready": (
        _row_fault(sending, "SENDER_ROWS", (State.READY, _S.LOST), None),
        "losses",
        f"{MODEL} ('GiveUp', 1, 1)",
    ),
    "a row less: a takeover in awaiting_ack": (
        _row_fault(receiving, "RECEIVER_ROWS", (State.AWAITING_ACK, _R.TAKEOVER), None),
        "losses",
        f"{MODEL} ('HelloArrived', 1, 1, 2)",
    ),
    # An event is taken, but leads to another node.
    "a wait never finds it settled": (
        _guard_fault(sending, _other_input(_S.WAIT_SETTLED, _S.WAIT)),
        "two versions",
        CODE,
    ),
    "anything is current": (_anything_is_current, "lingering", CODE),
    "a joiner gets nothing": (_a_joiner_gets_nothing, "crashes", CODE),
    "refusals are forgotten": (_advance_fault(_refusal_forgotten), "losses", CODE),
    "the fence falls with the link": (_advance_fault(_fence_falls), "successors", CODE),
    "a row leads elsewhere": (
        lambda monkeypatch: (
            _row_fault(sending, "SENDER_ROWS", (State.AWAITING_ACK, _S.DEADLINE), None)(monkeypatch),
            _row_fault(sending, "SENDER_ROWS", (State.AWAITING_ACK, _S.DEADLINE), State.READY)(monkeypatch),
        ),
        "two versions",
        f"{CODE} ('Deadline', 1)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_the_graph(monkeypatch, fault):
    plant, name, said = FAULTS[fault]
    sound = explored(name)[0]
    plant(monkeypatch)
    assert difference(search(CONFIGURATIONS[name]), sound).startswith(said)
