"""G2 for a model that is found by its path: the model at that path when a version goes live is the one that serves."""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fleet import PATIENCE
from torch import nn

from weightsync import ConfigurationError, MultiProcessWeightSyncScheme, RefusedError, WeightReceiver
from weightsync.testing import FakeClock


class Actor:
    """A context that can be referenced weakly."""

    def __init__(self) -> None:
        self.policy = nn.Linear(2, 2)


class LinearWithForeignState(nn.Linear):
    """A layer with state that is neither a parameter nor a buffer."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}elsewhere"] = torch.ones(1)


def filled(number: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    return model


@pytest.fixture
def pair() -> Any:
    ours, theirs = multiprocessing.Pipe()
    sending, receiving = MultiProcessWeightSyncScheme(), MultiProcessWeightSyncScheme()
    source, actor = filled(1.0), Actor()
    sending.init_on_sender("policy", pipes=[ours], model=source)
    receiving.init_on_worker("policy", context=actor, pipe=theirs)
    with sending, receiving:
        yield SimpleNamespace(
            source=source, actor=actor, sender=sending.get_sender(), receiver=receiving.get_receiver()
        )


def send(pair: Any, number: float) -> None:
    for parameter in pair.source.parameters():
        nn.init.constant_(parameter, number)
    pair.sender.send_async()
    assert pair.receiver.receive(timeout=PATIENCE)
    assert pair.sender.wait_async(timeout=PATIENCE).ok


def values_of(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}


def test_g2_the_module_that_replaced_another_gets_the_next_version(pair: Any) -> None:
    send(pair, 1.0)
    first, pair.actor.policy = pair.actor.policy, filled(0.0)

    send(pair, 2.0)

    assert values_of(pair.actor.policy) == {2.0}
    assert values_of(first) == {1.0}
    assert pair.receiver.model is pair.actor.policy
    assert pair.receiver.version == 2


@contextlib.contextmanager
def served_in_another_thread(pair: Any) -> Iterator[tuple[Future[None], threading.Event]]:
    """Serve the model in another thread until the event is set. Yields the future of that thread, and the event."""
    serving, over = threading.Event(), threading.Event()

    def serve() -> None:
        with pair.receiver.serving():
            serving.set()
            over.wait(PATIENCE)

    with ThreadPoolExecutor(1) as beside:
        served = beside.submit(serve)
        serving.wait(PATIENCE)
        yield served, over


def test_g10_receive_does_not_wait_for_threads_that_serve_the_replaced_module(pair: Any) -> None:
    send(pair, 1.0)
    with served_in_another_thread(pair) as (served, over):
        first, pair.actor.policy = pair.actor.policy, filled(0.0)
        pair.sender.send_async()
        with FakeClock():
            assert pair.receiver.receive(timeout=0) is False
        assert not served.done()
        over.set()
    assert pair.receiver.receive(timeout=PATIENCE) is True

    assert (pair.receiver.model, pair.receiver.version) == (pair.actor.policy, 2)
    assert values_of(first) == values_of(pair.actor.policy) == {1.0}


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_model_found_while_a_thread_serves_leaves_shared_memory_only_after_the_serving(
    pair: Any, by_hand: bool
) -> None:
    """A kernel that reads a parameter keeps no reference to its memory, which could be unmapped during the read."""
    policy = pair.actor.policy.share_memory()
    elsewhere, before = policy.weight.detach(), values_of(policy)
    with served_in_another_thread(pair) as (served, over):
        pair.sender.send_async()
        assert pair.receiver.receive(timeout=0) is False
        assert pair.receiver.model is policy
        assert policy.weight.data_ptr() == elsewhere.data_ptr()
        over.set()
        served.result(PATIENCE)
    if by_hand:
        pair.receiver.apply_weights(filled(5.0).state_dict())
    else:
        assert pair.receiver.receive(timeout=PATIENCE) is True

    assert values_of(policy) == ({5.0} if by_hand else {1.0})
    assert set(elsewhere.flatten().tolist()) <= before


def test_a_model_found_while_no_thread_serves_leaves_shared_memory_at_once(pair: Any) -> None:
    policy = pair.actor.policy.share_memory()

    assert not pair.receiver.receive(timeout=0)

    assert not policy.weight.is_shared()


def test_g2_a_replacement_with_other_weights_serves_no_version_until_the_next(pair: Any) -> None:
    send(pair, 1.0)
    pair.actor.policy = filled(0.0)

    assert not pair.receiver.receive(timeout=0)

    assert pair.receiver.version is None


def test_a_replacement_with_identical_weights_serves_the_same_version(pair: Any) -> None:
    send(pair, 1.0)
    pair.actor.policy = filled(1.0)

    assert not pair.receiver.receive(timeout=0)

    assert pair.receiver.version == 1


def test_versions_that_do_not_fit_the_replacement_are_refused(pair: Any) -> None:
    send(pair, 1.0)
    pair.actor.policy = nn.Linear(3, 2)
    pair.sender.send_async()

    assert not pair.receiver.receive(timeout=PATIENCE)

    assert pair.sender.wait_async(timeout=PATIENCE, on_failure="report").failed == (0,)


@pytest.mark.parametrize("when", ["before it came", "while it is awaited"])
def test_g2_an_unsupported_replacement_refuses_versions_and_serves_none(pair: Any, when: str) -> None:
    send(pair, 1.0)
    pair.actor.policy = LinearWithForeignState(2, 2)
    if when == "while it is awaited":
        assert pair.receiver.receive(timeout=0) is False
        assert pair.receiver.version is None
    pair.sender.send_async()

    assert pair.receiver.receive(timeout=PATIENCE) is False

    with pytest.raises(RefusedError, match=r"weights cannot be applied to what is at 'policy': .*elsewhere") as caught:
        pair.sender.wait_async(timeout=PATIENCE)
    assert str(pair.receiver.last_refusal) in str(caught.value)
    pair.actor.policy = filled(0.0)
    send(pair, 3.0)
    assert values_of(pair.actor.policy) == {3.0}


@pytest.mark.parametrize("gone", ["the attribute", "a number"])
def test_versions_for_a_path_without_a_model_are_refused(pair: Any, gone: str) -> None:
    send(pair, 1.0)
    if gone == "a number":
        pair.actor.policy = 5
    else:
        del pair.actor.policy
    pair.sender.send_async()

    assert pair.receiver.receive(timeout=PATIENCE) is False

    with pytest.raises(RefusedError, match="policy"):
        pair.sender.wait_async(timeout=PATIENCE)


def test_a_garbage_collected_context_leaves_the_model_found_before(pair: Any) -> None:
    send(pair, 1.0)
    model = pair.actor.policy
    pair.actor = None

    send(pair, 2.0)

    assert values_of(model) == {2.0}


def test_g8_a_copy_keeps_the_model_path_even_after_the_first_version(pair: Any) -> None:
    send(pair, 1.0)

    copied: WeightReceiver = pickle.loads(pickle.dumps(pair.receiver))

    assert copied.model == "policy"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nets[critic]", r"'nets\[critic\]' is not a model path: .* quoted keys"),
        ("nowhere.net", "The part 'nowhere' of the model path 'nowhere.net' does not resolve on the context"),
    ],
)
def test_a_send_without_weights_says_why_the_context_has_no_model_at_the_path(path: str, why: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    actor = Actor()
    with MultiProcessWeightSyncScheme() as scheme, theirs:
        scheme.init_on_sender(path, context=actor, pipes=[ours])

        with pytest.raises(ConfigurationError, match=why):
            scheme.get_sender().send()
