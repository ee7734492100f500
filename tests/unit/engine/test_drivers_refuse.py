"""A driver that refuses a call names the call, the reason, and the steps that led to its state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet import Pair

from weightsync import MultiProcessWeightSyncScheme, StateError


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(MultiProcessWeightSyncScheme)
    yield made
    made.close()


def test_a_state_error_of_the_sender_names_the_call_a_hint_and_the_steps(pair: Pair) -> None:
    pair.sender.send_async()
    with pytest.raises(StateError) as caught:
        pair.sender.send_async()
    error, text = caught.value, str(caught.value)

    assert (error.machine, error.asked, error.state) == ("sender", "send_async", "pending_async")
    assert text.startswith("send_async(): version 1 still awaits worker 0. Call wait_async() or abandon(), or pass ")
    assert "on_pending='supersede'" in text
    assert error.steps == pair.sender._driver.machine.steps != ()
    assert {"wait_async", "abandon", "poll"} <= set(error.allowed)


def test_a_given_hint_replaces_the_drivers_own_hint(pair: Pair) -> None:
    pair.sync()
    driver = pair.receiver.driver

    assert str(driver.refused("receive")).startswith("receive(): the receiver is ")
    assert str(driver.refused("receive", "wait for rain.")).startswith("receive(): wait for rain. Nothing has changed")
    assert driver.refused("receive").machine == "receiver"


def test_receive_on_a_closed_receiver_raises_that_it_is_closed(pair: Pair) -> None:
    pair.sync()
    pair.receiver.close()
    with pytest.raises(
        StateError, match=r"^receive\(\): this receiver is closed for good; its model keeps version 1\."
    ):
        pair.receiver.receive(timeout=0)


def test_links_are_numbered_from_one(pair: Pair) -> None:
    pair.sync()

    assert pair.receiver.driver.data.link == 1
    assert [entry.link for entry in pair.sender._driver.data.workers.values()] == [1]
