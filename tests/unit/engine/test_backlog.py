"""How far a link runs ahead of its worker."""

from __future__ import annotations

from weightsync.engine.driver import Backlog


def test_two_versions_leave_unanswered_and_the_newest_of_the_others_waits() -> None:
    backlog = Backlog()

    assert [backlog.admit(1), backlog.admit(2), backlog.waits] == [True, True, False]
    assert [backlog.admit(3), backlog.waits, backlog.admit(4), backlog.waits] == [False, True, False, True]


def test_an_answer_for_a_version_is_one_for_all_before_it_and_frees_the_one_that_waits_once() -> None:
    backlog = Backlog()
    for version in (1, 2, 3):
        backlog.admit(version)

    assert [backlog.answered(0), backlog.waits] == [0, True]
    assert [backlog.answered(2), backlog.waits] == [3, False]
    assert [backlog.answered(2), backlog.waits] == [0, False]
    assert [backlog.admit(3), backlog.admit(4), backlog.admit(5)] == [True, True, False]
    assert [backlog.answered(3), backlog.waits] == [5, False]
