"""Calls of a scheme in the wrong order: the error names the call, and says what to do instead."""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from fleet import PATIENCE, Pair
from torch import nn

from weightsync import (
    ConfigurationError,
    MultiProcessWeightSyncScheme,
    State,
    StateError,
    WeightSyncScheme,
    WorkerLostError,
)
from weightsync.schemes.worker_set import refuse_repeated


@pytest.mark.parametrize(
    ("asked", "call", "first"),
    [
        ("send", lambda scheme: scheme.send(), "init_on_sender()"),
        ("get_sender", lambda scheme: scheme.get_sender(), "init_on_sender()"),
        ("receive", lambda scheme: scheme.receive(), "init_on_worker() or init_on_receiver()"),
        ("apply_weights", lambda scheme: scheme.apply_weights({}), "init_on_worker() or init_on_receiver()"),
        ("connect", lambda scheme: scheme.connect(), "init_on_sender() or init_on_receiver()"),
    ],
)
def test_errors_of_an_uninitialized_copy_name_the_call_to_make_first(
    asked: str, call: Callable[[WeightSyncScheme], Any], first: str, pair: Pair
) -> None:
    with pytest.raises(StateError) as refused:
        call(copy.copy(pair.scheme))

    assert str(refused.value).startswith(f"{asked}(): Call {first} first, also on a copy of a scheme (pickled, copied")


def test_connect_of_a_closed_scheme_raises_that_it_is_closed(scheme_class: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, scheme_class() as scheme, scheme_class() as worker:
        scheme.init_on_sender("policy", pipes=[ours])
        worker.init_on_worker("policy", pipe=theirs, model=nn.Linear(2, 2))
        worker.get_receiver().receive(0.0)  # answers the handshake
        scheme.connect(timeout=PATIENCE)
        scheme.close()

        with pytest.raises(StateError, match=r"^connect\(\): this sender is closed for good\. Make a new scheme"):
            scheme.connect()


@pytest.mark.parametrize("entry", [None, 5, "a"])
def test_the_error_for_an_invalid_entry_of_pipes_names_its_index(entry: Any) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, MultiProcessWeightSyncScheme() as scheme:
        with pytest.raises(ConfigurationError, match=r"^pipes= has an entry that cannot be used, at index 1\. "):
            scheme.init_on_sender("policy", pipes=[ours, entry], model=nn.Linear(2, 2))

        scheme.init_on_sender("policy", pipes=[ours], model=nn.Linear(2, 2))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_fail_refuses_arguments_that_are_not_exceptions_and_closes_nothing(side: str, pair: Pair) -> None:
    participant = getattr(pair, side)
    with pytest.raises(ConfigurationError, match=r"^error= is 'text': give an exception, .* Nothing was closed\."):
        participant.fail("text")

    assert participant.state is not State.CLOSED
    assert pair.sync().ok


class ReturnsNoLink(MultiProcessWeightSyncScheme):
    """A user's scheme whose method forgets to return its link."""

    def create_link(self, endpoint: Any, model_id: str, peer: str) -> Any:
        super().create_link(endpoint, model_id, peer)


def test_init_names_a_custom_scheme_whose_create_link_returns_nothing() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, ReturnsNoLink() as scheme:
        missing = r"^create_link\(\) of ReturnsNoLink returned an object of type NoneType, which lacks delivery, peer"
        with pytest.raises(ConfigurationError, match=missing):
            scheme.init_on_sender("policy", pipes=[ours], model=nn.Linear(2, 2))


def test_a_module_without_pipes_is_refused_as_multiprocessing_context() -> None:
    with MultiProcessWeightSyncScheme() as scheme:
        with pytest.raises(ConfigurationError, match=r"^ctx= is <module 'copy' .*: give a multiprocessing context"):
            scheme.init_on_sender("policy", num_workers=1, ctx=copy, model=nn.Linear(2, 2))

        scheme.init_on_sender("policy", num_workers=1, ctx=multiprocessing, model=nn.Linear(2, 2))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), None], ids=["with a model", "without a model"])
def test_connect_with_both_ends_of_one_pipe_names_them_as_the_cause(model: nn.Module | None) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, MultiProcessWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", pipes=[ours, theirs], model=model)
        cause = (
            r"worker 0 sent a sender's handshake; .* At its other end is a sender, perhaps this one: give init_on_sen"
        )
        with pytest.raises(WorkerLostError, match=cause):
            scheme.connect(timeout=PATIENCE)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"processes": b"x"}, r"^processes= is b'x': give the process of each of the 1 workers"),
        ({"processes": {True: 1}}, r"^processes= is True: a worker's id is an int of 0 or more"),
        ({"devices": b"x"}, r"^devices= is b'x': give a list with one device per worker"),
    ],
)
def test_init_refuses_bytes_as_lists_and_true_as_a_worker_id(given: dict[str, Any], match: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, MultiProcessWeightSyncScheme() as scheme, pytest.raises(ConfigurationError, match=match):
        scheme.init_on_sender("policy", pipes=[ours], model=nn.Linear(2, 2), **given)


def test_the_error_for_a_worker_given_twice_names_both_ids() -> None:
    one, other = [], []  # they are equal, and cannot be hashed
    refuse_repeated({0: one, 1: other, 2: None, 3: None})

    with pytest.raises(ConfigurationError, match=r"^workers 0 and 2 are the same list: name each worker once\. "):
        refuse_repeated({0: one, 1: other, 2: one})
