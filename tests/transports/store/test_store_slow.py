"""A store that answers slowly, or not at all, costs no worker its link and holds up nobody else."""

from __future__ import annotations

import time
from typing import Any

import pytest

from weightsync.clock import Deadline
from weightsync.transports.store import heartbeat
from weightsync.transports.store.store import Client

#: Seconds; reached only by a failure.
PATIENCE = 30.0


def test_a_process_beats_while_it_asks_a_slow_store_about_many_links(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It beat once a round: with 60 links at 0.1 s each, all its workers lost it."""
    monkeypatch.setattr(heartbeat, "PERIOD", 0.05)
    monkeypatch.setattr(heartbeat, "_SILENCE", 1.0)
    lost: list[str] = []
    slow = heartbeat.Callbacks(lost.append, lost.append, lambda _: time.sleep(0.1))
    members = [heartbeat.join(store, slow) for _ in range(60)]  # a round takes 6 s
    client, waited = Client(store), Deadline(PATIENCE)
    beats = set()
    while len(beats) < 20 and not waited.passed:
        beats.add(client.peek(f"weightsync/heartbeat/{heartbeat.process_name()}"))
        time.sleep(0.05)

    assert waited.remaining > PATIENCE - 5
    assert not lost
    for member in members:
        member.leave()
    client.close()
